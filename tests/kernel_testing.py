"""What kernel tests share: where they run, in which dtypes, and how results are compared.

On a GPU the kernels run compiled, in every dtype. Without one they run under Triton's interpreter
(TRITON_INTERPRET=1, set before triton is imported), whose `tl.dot` on bfloat16 is wrong: float32 and float16 there.
"""

from __future__ import annotations

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if ON_GPU else [torch.float32, torch.float16]

# Marks of every kernel test module.
KERNEL_MARKS = [
    pytest.mark.kernel,
    pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="needs a GPU or TRITON_INTERPRET=1"),
]

# Largest and root-mean-square error, relative to the largest expected magnitude, by dtype of the result.
TOLERANCE = {
    torch.float32: (1e-5, 2e-6),
    torch.float16: (4e-3, 6e-4),
    torch.bfloat16: (3e-2, 5e-3),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Seeded noise, made on the CPU so that every machine tests the same numbers."""
    return (scale * torch.randn(shape, generator=generator(seed))).to(DEVICE, dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """An output buffer in which every element that is not written shows."""
    fill = float("nan") if dtype.is_floating_point else -(2**30)
    return torch.full(shape, fill, dtype=dtype, device=DEVICE)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> None:
    """Both the largest and the root-mean-square error must be small; `factor` loosens both (say why where used)."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all(), "not every element was written, or one overflowed"
    largest, rms = (factor * limit for limit in TOLERANCE[actual.dtype])
    error = (actual.double() - expected.double()).abs()
    scale = expected.double().abs().max().clamp(min=1e-30)
    assert error.max() <= largest * scale, f"largest error {error.max() / scale:.3g} of {largest:.3g}"
    actual_rms = error.square().mean().sqrt() / scale
    assert actual_rms <= rms, f"rms error {actual_rms:.3g} of {rms:.3g}"
