"""How much of what was foretold for a layer it then routed to, counted on the device.

One program; a few hundred bytes, beside the critical path.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonmoe_kernels.planner_state import MASS_UNIT
from tritonmoe_kernels.references import check_recall
from tritonmoe_kernels.tiles import next_power_of_2


@triton.jit
def _count_recall_kernel(
    foretold_ptr,  # [T, M]
    topk_ids_ptr,  # [T, K]
    topk_weights_ptr,  # [T, K]
    counts_ptr,  # [5]
    UNITS: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    pairs = tl.arange(0, BLOCK_P)
    is_pair = pairs < T * K
    ids = tl.load(topk_ids_ptr + pairs, mask=is_pair, other=-1)
    mass = (tl.load(topk_weights_ptr + pairs, mask=is_pair, other=0.0) * UNITS).to(tl.int64)
    is_right = tl.zeros([BLOCK_P], tl.int1)
    row_ptr = foretold_ptr + (pairs // K) * M
    num_foretold = tl.zeros([BLOCK_P], tl.int64)
    for m in range(M):
        guess = tl.load(row_ptr + m, mask=is_pair, other=-1)
        is_right |= (guess == ids) & (guess >= 0)
        num_foretold += ((guess >= 0) & (pairs % K == 0)).to(tl.int64)
    tl.store(counts_ptr, tl.load(counts_ptr) + tl.sum(num_foretold))
    has_guess = (tl.load(row_ptr, mask=is_pair, other=-1) >= 0).to(tl.int64)
    right = is_right.to(tl.int64)
    tl.store(counts_ptr + 1, tl.load(counts_ptr + 1) + tl.sum(right))
    tl.store(counts_ptr + 2, tl.load(counts_ptr + 2) + tl.sum(has_guess))
    tl.store(counts_ptr + 3, tl.load(counts_ptr + 3) + tl.sum(right * mass))
    tl.store(counts_ptr + 4, tl.load(counts_ptr + 4) + tl.sum(has_guess * mass))


def count_recall(
    foretold: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, counts: torch.Tensor
) -> None:
    """Add to counts [5] int64 what foretold [T, M] int32 says of topk_ids [T, K] int32, with weights [T, K] float32.

    The ids foretold; of the routed ids, those foretold and all of them; the gate weights of either, in units of
    MASS_UNIT, each rounded down. A row of -1 foretells nothing and its token counts nowhere.
    """
    check_recall(foretold, topk_ids, topk_weights, counts)
    tokens, top_k = topk_ids.shape
    _count_recall_kernel[(1,)](
        foretold,
        topk_ids,
        topk_weights,
        counts,
        UNITS=1.0 / MASS_UNIT,
        T=tokens,
        K=top_k,
        M=foretold.shape[1],
        BLOCK_P=next_power_of_2(topk_ids.numel()),
        num_warps=1,
    )
