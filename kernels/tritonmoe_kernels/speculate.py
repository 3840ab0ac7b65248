"""Speculation of the next layer's experts before this layer's experts have run, in one launch (arXiv 2603.19289).

Floor: the next router's E·H weights and, for each token, K default vectors of H; 1 MB + 32 KB for 128 x 2048 in float32
with 8 default vectors in bfloat16, 0.3 us at 4 TB/s. Latency decides: it runs beside the experts that are
there, and only then is planned what is fetched ahead.

Schedule: that of `norm_router`, with about 32 programs so that most of the GPU stays with the experts: each program
asks for its router rows, mixes the default vectors of its token in the order of K, norms, stores its logits, and the
last to arrive ranks all E. The quasi-hidden state stays in float32 until it is rounded to the residual's dtype.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from tritonmoe_kernels.checks import FLOATS, check_tensor
from tritonmoe_kernels.norm_router import (
    COUNTING_LIMIT,
    arrive_last,
    check_decode_tokens,
    check_router,
    check_routing,
    choose_experts,
    decode_tiles,
    group_blocks,
    load_router,
    rms_normalize,
    store_logits,
)
from tritonmoe_kernels.routing import Routing, SpeculateOutput
from tritonmoe_kernels.tiles import cdiv


@triton.jit
def _speculate_kernel(
    residual_ptr,  # [T, H]
    default_ptr,  # [experts of this layer, H] or None
    topk_ids_ptr,  # [T, K] int32 or None
    topk_weights_ptr,  # [T, K] float32 or None
    norm_weight_ptr,  # [H]
    router_ptr,  # [E, H]
    router_bias_ptr,  # [E] or None
    selection_bias_ptr,  # [E] or None
    logits_ptr,  # [T, E] float32
    ids_ptr,  # [T, M] int32
    q_ptr,  # [T, H] or None
    counter_ptr,  # [T] int32, zero
    residual_multiplier,
    epsilon,
    H: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    SCORE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    WEIGHT_PLUS_ONE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BY_COUNTING: tl.constexpr,
):
    block = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    experts = block * BLOCK_E + tl.arange(0, BLOCK_E)
    h = tl.arange(0, BLOCK_H)
    mask = h < H
    router = load_router(router_ptr, experts, h, mask, H, E)
    residual = tl.load(residual_ptr + token * H + h, mask=mask, other=0.0)
    quasi = residual.to(tl.float32)
    if default_ptr is not None:
        mixed = tl.zeros([BLOCK_H], tl.float32)
        for k in tl.static_range(K):
            row = tl.load(topk_ids_ptr + token * K + k).to(tl.int64) * H
            weight = tl.load(topk_weights_ptr + token * K + k)
            mixed += weight * tl.load(default_ptr + row + h, mask=mask, other=0.0).to(tl.float32)
        quasi += mixed * residual_multiplier
    q = rms_normalize(quasi, norm_weight_ptr, h, mask, epsilon, H, WEIGHT_PLUS_ONE).to(residual.dtype)
    if q_ptr is not None and block == 0:
        tl.store(q_ptr + token * H + h, q, mask=mask)
    logits_ptr += token * E
    store_logits(logits_ptr, router_bias_ptr, router, q, experts, E)
    if arrive_last(counter_ptr + token):
        ids, _scores, rank = choose_experts(
            logits_ptr, selection_bias_ptr, E, M, SCORE, NUM_GROUPS, TOPK_GROUPS, BLOCK_G, BLOCK_S, BY_COUNTING
        )
        tl.store(ids_ptr + token * M + rank, ids, mask=rank < M)


def speculate(
    residual: torch.Tensor,
    default_vectors: torch.Tensor | None,
    topk_ids: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    norm_weight: torch.Tensor,
    router: torch.Tensor,
    routing: Routing,
    count: int,
    counter: torch.Tensor,
    epsilon: float,
    residual_multiplier: float = 1.0,
    router_bias: torch.Tensor | None = None,
    selection_bias: torch.Tensor | None = None,
    weight_plus_one: bool = False,
    out: SpeculateOutput | None = None,
) -> SpeculateOutput:
    """The `count` ids that the next layer would choose first, and its logits, for T <= 16 tokens.

    residual [T, H] after this layer's attention. Of this layer: default_vectors [experts, H], topk_ids [T, K] int32,
    topk_weights [T, K] float32, or None for all three to predict from the residual alone. Of the next: norm_weight [H],
    router [E, H], biases [E] and routing, of which score and groups order the ids. `counter` [>= T] int32 is zero, and
    not the one of `norm_router`: both launches may run at once. Give `out.q` to keep the quasi-hidden state.
    """
    tokens = len(residual)
    check_decode_tokens(tokens, "a matrix product and route_topk")
    check_router(norm_weight, router, router_bias, selection_bias, counter, tokens)
    experts, hidden = router.shape
    check_tensor("residual", residual, (tokens, hidden), FLOATS, router.device)
    if not 1 <= count <= experts:
        raise ValueError(f"count is {count}, expected 1 to {experts}, the number of experts")
    check_routing(replace(routing, top_k=count), experts, selection_bias)
    _check_defaults(default_vectors, topk_ids, topk_weights, tokens, hidden, router.device)
    if out is None:
        logits = residual.new_empty(tokens, experts, dtype=torch.float32)
        out = SpeculateOutput(logits, residual.new_empty(tokens, count, dtype=torch.int32))
    check_tensor("out.logits", out.logits, (tokens, experts), (torch.float32,), router.device)
    check_tensor("out.ids", out.ids, (tokens, count), (torch.int32,), router.device)
    if out.q is not None:
        check_tensor("out.q", out.q, (tokens, hidden), (residual.dtype,), router.device)
        if tokens and out.q.data_ptr() == residual.data_ptr():
            raise ValueError("out.q must not share memory with the residual: programs of this launch still read it")
    if not tokens:
        return out
    # K default vectors are in flight at once: four warps run out of registers on gfx1100 beyond 2,048 values.
    block_h, block_e, num_warps = decode_tiles(tokens, hidden, experts, programs=32, four_warps_up_to=2048)
    block_g, block_s = group_blocks(experts, routing.num_groups)
    _speculate_kernel[(cdiv(experts, block_e), tokens)](
        residual,
        default_vectors,
        topk_ids,
        topk_weights,
        norm_weight,
        router,
        router_bias,
        selection_bias,
        *out,
        counter,
        residual_multiplier,
        epsilon,
        H=hidden,
        E=experts,
        K=0 if topk_ids is None else topk_ids.shape[1],
        M=count,
        SCORE=routing.score,
        NUM_GROUPS=routing.num_groups,
        TOPK_GROUPS=routing.topk_groups,
        WEIGHT_PLUS_ONE=weight_plus_one,
        BLOCK_H=block_h,
        BLOCK_E=block_e,
        BLOCK_G=block_g,
        BLOCK_S=block_s,
        BY_COUNTING=block_g * block_s <= COUNTING_LIMIT,
        num_warps=num_warps,
    )
    return out


def _check_defaults(
    default_vectors: torch.Tensor | None,
    topk_ids: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    tokens: int,
    hidden: int,
    device: torch.device,
) -> None:
    given = (default_vectors is not None, topk_ids is not None, topk_weights is not None)
    if default_vectors is None or topk_ids is None or topk_weights is None:
        if any(given):
            raise ValueError("default_vectors, topk_ids and topk_weights go together: give all three or none")
        return
    check_tensor("default_vectors", default_vectors, (None, hidden), FLOATS, device)
    check_tensor("topk_ids", topk_ids, (tokens, None), (torch.int32,), device)
    check_tensor("topk_weights", topk_weights, topk_ids.shape, (torch.float32,), device)
