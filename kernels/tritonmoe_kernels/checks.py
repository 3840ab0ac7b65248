"""What launchers check of a tensor before they hand its address to a kernel."""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...] | torch.Size,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Raise a ValueError that says what is wrong with a contiguous tensor; None in `shape` matches any size."""
    have = tensor.shape
    if have != shape and not (len(have) == len(shape) and all(map(_matches, shape, have))):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(have)}, expected [{wanted}]")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, expected {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: its strides are {tensor.stride()}")


def _matches(wanted: int | None, size: int) -> bool:
    return wanted is None or wanted == size
