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
    strided: int = 0,
) -> None:
    """Raise a ValueError that says what is wrong with a tensor; None in `shape` matches any size.

    It must be contiguous, but for its first `strided` axes, which may have any stride.
    """
    have = tensor.shape
    if have != shape and not (len(have) == len(shape) and all(map(_matches, shape, have))):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(have)}, expected [{wanted}]")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, expected {device}")
    if not (tensor.is_contiguous() or (strided and _is_contiguous(have[strided:], tensor.stride()[strided:]))):
        part = f" from axis {strided} on" if strided else ""
        raise ValueError(f"{name} is not contiguous{part}: its strides are {tensor.stride()}")


def _is_contiguous(sizes: torch.Size, strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _matches(wanted: int | None, size: int) -> bool:
    return wanted is None or wanted == size
