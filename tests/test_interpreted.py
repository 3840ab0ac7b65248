"""The kernel tests under Triton's interpreter, in a process of their own: the mode is read at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run compiled where there is a GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="already interpreted")
def test_kernels_interpreted() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "kernel and not gpu", "-p", "no:cacheprovider"],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stdout[-4000:]
