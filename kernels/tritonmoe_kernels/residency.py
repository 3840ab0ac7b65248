"""Which routed experts can be computed with at once: all that the critical path needs to know of a layer's plan.

`norm_router` says it itself as it chooses; `find_resident` is for ids that come from elsewhere: one program, three
reads that depend on each other, of a few hundred bytes, about 2 us. What is said is frozen for the layer:
`plan_demand`, which runs beside the experts that are there, takes the rest for missing, whatever has landed meanwhile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonmoe_kernels.dependent_launch import await_inputs, launch_options, release_dependents
from tritonmoe_kernels.references import check_residency
from tritonmoe_kernels.routing import Residency
from tritonmoe_kernels.tiles import next_power_of_2


@triton.jit
def look(landed_ptrs, mask, SEM: tl.constexpr):
    """Epochs that a fetch kernel may write at any time, the same for every thread.

    A load would be done once by every warp, or once more in another layout, and the copies of a value could differ; of
    an atomic addition there is one, whose result is handed round. It adds nothing, so it takes nothing back either.
    """
    return tl.atomic_add(landed_ptrs, 0, mask=mask, sem=SEM, scope="gpu")


@triton.jit
def table_ids(table_ptr, step_ptr, table_steps, table_stride, pairs, mask):
    """Ids of this step for the pairs t · K + k, from a table of which one step is `table_stride` from the next."""
    return tl.load(table_ptr + (tl.load(step_ptr) % table_steps) * table_stride + pairs, mask=mask, other=-1)


@triton.jit
def store_resident(hit_ids_ptr, slot_of_ptr, copy_epoch_ptr, landed_ptr, ids, pairs, mask):
    """Store the slots of what is resident of `ids`, -1 of the others, each at its place in `pairs`."""
    slots = tl.load(slot_of_ptr + ids, mask=mask & (ids >= 0), other=-1)
    is_mapped = slots >= 0
    copy_epoch = tl.load(copy_epoch_ptr + slots, mask=is_mapped, other=0)
    landed = look(landed_ptr + slots, is_mapped, "acquire")
    tl.store(hit_ids_ptr + pairs, tl.where(is_mapped & (landed == copy_epoch), slots, -1), mask=mask)


@triton.jit(do_not_specialize=["table_steps", "table_stride"])
def _find_resident_kernel(
    topk_ids_ptr,  # [PAIRS]
    hit_ids_ptr,  # [PAIRS]
    slot_of_ptr,  # [E]
    copy_epoch_ptr,  # [S]
    landed_ptr,  # [S]
    table_ptr,  # [table_steps, PAIRS] or None
    step_ptr,  # [1] or None
    table_steps,
    table_stride,
    PAIRS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    pairs = tl.arange(0, BLOCK_P)
    is_pair = pairs < PAIRS
    await_inputs(PDL)
    release_dependents(PDL)
    if table_ptr is not None:
        ids = table_ids(table_ptr, step_ptr, table_steps, table_stride, pairs, is_pair)
        tl.store(topk_ids_ptr + pairs, ids, mask=is_pair)
    else:
        ids = tl.load(topk_ids_ptr + pairs, mask=is_pair, other=-1)
    store_resident(hit_ids_ptr, slot_of_ptr, copy_epoch_ptr, landed_ptr, ids, pairs, is_pair)


def find_resident(topk_ids: torch.Tensor, residency: Residency) -> None:
    """Write the slots of a layer's routed experts that are resident to `residency.hit_ids`, -1 elsewhere.

    topk_ids [T, K] int32 from 0 to E - 1, or -1 for none; a `residency.table` overwrites it first.
    """
    check_residency(topk_ids, residency)
    _find_resident_kernel[(1,)](
        topk_ids,
        *residency_arguments(residency),
        PAIRS=topk_ids.numel(),
        BLOCK_P=next_power_of_2(topk_ids.numel()),
        num_warps=1,
        **launch_options(topk_ids.device),
    )


def residency_arguments(residency: Residency | None) -> tuple[object, ...]:
    """What a kernel takes of it: pointers in the order of `_find_resident_kernel`, steps and stride of the table."""
    if residency is None:
        return (None,) * 6 + (1, 0)
    table = residency.table
    pointers = (residency.hit_ids, residency.slot_of, residency.copy_epoch, residency.landed, table, residency.step)
    return (*pointers, 1, 0) if table is None else (*pointers, len(table), table.stride(0))
