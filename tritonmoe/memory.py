"""How much memory there is, and a clear error before something does not fit."""

from __future__ import annotations

import os

import torch

from tritonmoe.errors import InputError


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device` now (main memory: without swapping)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_memory(needed: int, device: torch.device, what: str, remedy: str) -> None:
    """InputError unless `needed` bytes are available on `device`."""
    available = available_bytes(device)
    if needed > available:
        place = "on the GPU" if device.type == "cuda" else "in main memory"
        raise InputError(
            f"out of memory: {what} needs {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB are free {place}; "
            f"use {remedy}"
        )
