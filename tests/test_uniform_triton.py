"""The counter-based random numbers are Triton's, so that a kernel can draw the same ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch, triton, triton.language as tl
from tritonmoe.generation.sampling import uniform

@triton.jit
def draw(out_ptr, seed, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out_ptr + offsets, tl.rand(seed, offsets))

for seed in (0, 7, 123456789, (5 << 32) + 17):
    out = torch.empty(64)
    draw[(1,)](out, seed, N=64)
    assert out.tolist() == torch.tensor([uniform(seed, i) for i in range(64)], dtype=torch.float32).tolist(), seed
print("equal")
"""


def test_uniform_equals_triton_rand(tmp_path: Path) -> None:
    """In a process of its own: interpretation is decided when triton is imported."""
    pytest.importorskip("triton")
    script = tmp_path / "draw.py"  # a jit function must come from a file
    script.write_text(SCRIPT)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "equal", done.stderr
