"""Host memory that a GPU copies from at full speed, and that its kernels can read: registered with CUDA, page by page.

A page is registered whole, and once, so that what is registered lies on pages of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import weakref
from typing import Any

import torch

from tritonmoe.errors import InputError
from tritonmoe.memory import HUGE_PAGE_BYTES, empty_tensor

logger = logging.getLogger(__name__)

MAPPED_BYTES = 4 * HUGE_PAGE_BYTES  # from here on `empty_tensor` maps pages that nothing else shares
REGISTER_PORTABLE, REGISTER_MAPPED = 1, 2  # cudaHostRegister: for every device, and readable by kernels


def own_pages(num_bytes: int) -> torch.Tensor:
    """Uninitialised host memory [num_bytes] uint8 on pages of its own."""
    return empty_tensor((max(num_bytes, MAPPED_BYTES),), torch.uint8, torch.device("cpu"))[:num_bytes]


def register(memory: torch.Tensor, registered: list[torch.Tensor]) -> str:
    """Pin a tensor's memory and add it to `registered`; returns why that failed, or nothing."""
    if memory.nbytes == 0:  # refused as an invalid argument
        return ""
    try:
        cudart = _cudart()
        code = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, REGISTER_PORTABLE | REGISTER_MAPPED)
    except RuntimeError as problem:  # CUDA could not be initialised
        return str(problem).partition("\n")[0]
    if int(code) == 0:
        registered.append(memory)
        return ""
    _clear_last_error()
    return str(cudart.cudaGetErrorString(code))


def unregister(registered: list[torch.Tensor]) -> None:
    """Make the memory pageable again and forget it."""
    while registered:
        memory = registered.pop()
        code = _cudart().cudaHostUnregister(memory.data_ptr())
        if int(code) != 0:
            _clear_last_error()
            logger.warning("%.3g GB of pinned memory could not be unregistered (error %d)", memory.nbytes / 1e9, code)


def device_address(address: int) -> int | str:
    """Where kernels find registered memory, or why they do not."""
    found = ctypes.c_uint64()
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(address), 0)
    return found.value if code == 0 else f"the driver does not map pinned memory (error {code})"


def mapped_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor of the GPU `device` whose memory is the host's: what kernels read of it, they read over
    the link. InputError where the system does not pin so much or the driver does not map it."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = own_pages(num_bytes)
    registered: list[torch.Tensor] = []
    problem = register(memory, registered)
    address = problem or device_address(memory.data_ptr())
    if isinstance(address, str):
        unregister(registered)
        size = f"{num_bytes / 1e9:.2g} GB"
        raise InputError(f"the GPU cannot read {size} of main memory ({address}); use --embedding device")
    owner = _DeviceArray(num_bytes, address)
    weakref.finalize(owner, unregister, registered)  # which holds the memory until then
    return torch.as_tensor(owner, device=device).view(dtype).view(shape)


class _DeviceArray:
    """What torch makes a tensor of without a copy, and keeps for as long as that lives."""

    def __init__(self, num_bytes: int, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _cudart() -> Any:
    """The CUDA runtime as torch binds it, which its stubs do not describe."""
    return torch.cuda.cudart()


def _clear_last_error() -> None:
    """CUDA keeps the error of a refused call for the next kernel launch to report, as if that had failed."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device="cuda").fill_(0.0)
