"""How much memory there is, and a clear error before something does not fit."""

from __future__ import annotations

import math
import mmap
import os
import resource
from pathlib import Path

import torch

from tritonmoe.errors import InputError

HUGE_PAGE_BYTES = 2 << 20
CGROUP = Path("/sys/fs/cgroup")
MAX_BYTES = 1 << 47  # what a process can address


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised memory; large tensors on the host lie in huge pages where the system grants them.

    Filling fresh memory is bound by its page faults: reading a cached file into ordinary pages ran at 0.6 GB/s
    where memory that was touched before took 7 GB/s.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes >= MAX_BYTES:  # also on the meta device, where sizes are only added up
        raise InputError(f"out of memory: config.json asks for a tensor of {num_bytes / 1e9:.3g} GB; use another model")
    if device.type != "cpu" or num_bytes < 4 * HUGE_PAGE_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise InputError(
            f"out of memory: {num_bytes / 1e9:.1f} GB could not be allocated; use a smaller model"
        ) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device` now (main memory: without swapping, within the container's limit)."""
    if device.type == "cuda":
        # What torch's allocator keeps for later counts as free: it gives it back when it needs to.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = min(free, _address_space_left())
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no control group, or one without a limit ("max")
        return int(free)
    return max(0, int(min(free, limit - used)))


def _address_space_left() -> float:
    """What `ulimit -v` leaves; infinite without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return math.inf
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    except OSError:
        return limit
    return max(0, limit - used)


def require_memory(needed: int, device: torch.device, what: str, remedy: str) -> None:
    """InputError unless `needed` bytes are available on `device`."""
    available = available_bytes(device)
    if needed > available:
        place = "on the GPU" if device.type == "cuda" else "in main memory"
        raise InputError(
            f"out of memory: {what} needs {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB are free {place}; "
            f"use {remedy}"
        )
