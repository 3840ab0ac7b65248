"""Which routed experts can be computed with at once: all that the critical path needs to know of a layer's plan.

One program between a layer's router and its experts; three reads that depend on each other, of a few hundred bytes:
about 1.5 us. What it says is frozen for the layer: `plan_demand`, which runs beside the experts that are there, takes
the rest for missing, whatever has landed in the meantime.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonmoe_kernels.dependent_launch import await_inputs, launch_options, release_dependents
from tritonmoe_kernels.plan import STEP, look
from tritonmoe_kernels.planner_state import PlannerState
from tritonmoe_kernels.references import check_resident
from tritonmoe_kernels.tiles import next_power_of_2


@triton.jit(do_not_specialize=["layer", "table_steps"])
def _find_resident_kernel(
    hit_ids_ptr,  # [PAIRS]
    topk_ids_ptr,  # [PAIRS]
    table_ptr,  # [table_steps, L, PAIRS] or None
    state,  # PlannerState
    layer,
    table_steps,
    L: tl.constexpr,
    E: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    pairs = tl.arange(0, BLOCK_P)
    is_pair = pairs < PAIRS
    layer = layer.to(tl.int64)
    await_inputs(PDL)
    release_dependents(PDL)
    if table_ptr is not None:
        row = (tl.load(state.header + STEP) % table_steps) * L + layer
        ids = tl.load(table_ptr + row * PAIRS + pairs, mask=is_pair, other=-1)
        tl.store(topk_ids_ptr + pairs, ids, mask=is_pair)
    else:
        ids = tl.load(topk_ids_ptr + pairs, mask=is_pair, other=-1)
    slots = tl.load(state.slot_of + layer * E + ids, mask=(ids >= 0) & (ids < E), other=-1)
    copy_epoch = tl.load(state.copy_epoch + slots, mask=slots >= 0, other=-1)
    landed = look(state.landed + slots, slots >= 0, "acquire")
    tl.store(hit_ids_ptr + pairs, tl.where((slots >= 0) & (landed == copy_epoch), slots, -1), mask=is_pair)


def find_resident(
    state: PlannerState,
    layer: int,
    topk_ids: torch.Tensor,
    hit_ids: torch.Tensor,
    routing_table: torch.Tensor | None = None,
) -> None:
    """Write the slots of a layer's routed experts that are resident, -1 elsewhere.

    topk_ids, hit_ids [T, K] int32. `routing_table` [steps, L, T, K] int32, by header's STEP modulo steps, overwrites
    topk_ids first.
    """
    check_resident(state, topk_ids, hit_ids, routing_table)
    num_layers, num_experts = state.slot_of.shape
    _find_resident_kernel[(1,)](
        hit_ids,
        topk_ids,
        routing_table,
        state,
        layer,
        1 if routing_table is None else len(routing_table),
        L=num_layers,
        E=num_experts,
        PAIRS=topk_ids.numel(),
        BLOCK_P=next_power_of_2(topk_ids.numel()),
        num_warps=1,
        **launch_options(topk_ids.device, after_join=True),  # of the branch that planned ahead
    )
