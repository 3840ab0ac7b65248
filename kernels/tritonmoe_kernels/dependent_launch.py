"""Programmatic dependent launch: a kernel starts while the one before it still runs (NVIDIA, compute capability 9.0+).

A decode step is a chain of some hundred short kernels, and between two ordinary launches the GPU idles for one or two
microseconds. Here every kernel of the chain does three things, in this order:

1. reads what the launch before it does not write: weights, mostly;
2. `await_inputs`: waits until the launch before it has ended and its writes are visible;
3. `release_dependents`: lets the next launch begin its own first part. Without it that begins when this one has ended.

Because 3 comes after 2, whatever runs in part 1 starts after the launch before the last one has ended: part 1 may read
what that one or any earlier one wrote. Every program must pass 2, also one that has nothing to do, or the launches
after it could overtake the ones before it. Nothing is written before 2.

Two launches do otherwise. gate_up of missing experts, behind the fetches that bring them, computes with what these have
published, and comes to 2 last. Its own dependents begin before that; their first part reads slot ids alone, which were
there before the demand was fetched. A fetch ahead, behind the plan that lists it, copies what that has published,
publishes in turn, lets dependents begin, and comes to 2 last: so its end is the plan's, too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def await_inputs(PDL: tl.constexpr):
    """Wait for the writes of the launch before this one; without dependent launch they are already there."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_dependents(PDL: tl.constexpr):
    """Let the next launch begin. Comes after `await_inputs`, but where the module says so."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def launch_options(device: torch.device) -> dict[str, Any]:
    """Launch arguments of a kernel with a PDL parameter.

    Where several streams are joined before a launch it awaits all of them, so this holds there as well: each of them
    has ended, or was released and is awaited.
    """
    return _options(device.type, device.index)


@functools.cache
def _options(kind: str, index: int | None) -> dict[str, Any]:
    if kind != "cuda" or torch.version.hip or torch.cuda.get_device_capability(index) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
