"""Residual add, RMSNorm, router, top-k and gate weights: one launch in decode, two kernels around a GEMM in prefill.

Floor of `norm_router`: the router's E·H weights are read once, 1 MB for 128 x 2048 in float32, and everything else is
small (a token's residual, delta and norm weight: 16 KB). At 4 TB/s that is 0.25 us, so latency decides: one program
would stream those weights for 10 to 20 us.

Schedule: grid (expert blocks, T), about 256 programs where there is work for them. Each asks for its router rows first,
since they do not depend on the step, then recomputes the norm of its token and stores its logits. The programs of a
token arrive at a counter; the last one sees all E logits and chooses. Block 0 alone writes the new residual and x. The
choice ranks experts by counting those in front of each (E² comparisons in one step, no rounds) where that is shorter
than K rounds of arg-max; both give the same ranks, those of a stable sort.

The order of every sum is fixed, so equal inputs give equal bits. On a GPU `residual + delta · multiplier` of float32
may contract to one fused multiply-add; 16-bit types round the product first, as the reference does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonmoe_kernels.checks import FLOATS, check_tensor
from tritonmoe_kernels.dependent_launch import await_inputs, launch_options, release_dependents
from tritonmoe_kernels.routing import MAX_DECODE_TOKENS, NormRouterOutput, Routing
from tritonmoe_kernels.tiles import cdiv, next_power_of_2

COUNTING_LIMIT = 128  # experts up to which counting (E² / threads) beats K rounds; at 256 it would spill


@triton.jit
def load_residual(residual_ptr, delta_ptr, offsets, mask, multiplier):
    """`residual + delta · multiplier` in the residual's dtype, rounded after the product and after the sum."""
    residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + offsets, mask=mask, other=0.0)
        scaled = (delta.to(tl.float32) * multiplier).to(delta.dtype)
        residual = (residual.to(tl.float32) + scaled.to(tl.float32)).to(residual.dtype)
    return residual


@triton.jit
def rms_normalize(values, weight_ptr, offsets, mask, epsilon, SIZE: tl.constexpr, WEIGHT_PLUS_ONE: tl.constexpr):
    """RMSNorm of float32 `values` (zero where masked) over SIZE elements, in float32."""
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if WEIGHT_PLUS_ONE:
        weight += 1.0
    return values * tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + epsilon) * weight


@triton.jit
def load_router(router_ptr, experts, h, mask, H: tl.constexpr, E: tl.constexpr):
    """Router rows of `experts`: [BLOCK_E, BLOCK_H]."""
    rows = (experts < E)[:, None] & mask[None, :]
    return tl.load(router_ptr + experts[:, None] * H + h[None, :], mask=rows, other=0.0)


@triton.jit
def store_logits(logits_ptr, bias_ptr, router, x, experts, E: tl.constexpr):
    """Logits of a block of experts for one token: products and sums in float32."""
    logits = tl.sum(router.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + experts, mask=experts < E, other=0.0).to(tl.float32)
    tl.store(logits_ptr + experts, logits, mask=experts < E)


@triton.jit
def arrive_last(counter_ptr):
    """Whether this program is the last of grid axis 0 to arrive; what the others stored before is then visible.

    The barrier comes first because one thread arrives for all: every warp must have stored by then. The last
    program leaves the counter at zero for the next launch.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    is_last = arrived == tl.num_programs(0) - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last


@triton.jit
def order_key(values, exists):
    """int32 keys in the order of float32 values: -0 equals 0, NaN is above all (as torch sorts), absent below all."""
    bits = values.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(values == 0.0, 0, key)
    key = tl.where(values != values, 0x7FFFFFFF, key)
    return tl.where(exists, key, -0x80000000)


@triton.jit
def rank_descending(key, COUNT: tl.constexpr, BLOCK: tl.constexpr, BY_COUNTING: tl.constexpr):
    """Place of each int32 key [BLOCK] in a stable descending sort; places from COUNT on may all read COUNT."""
    position = tl.arange(0, BLOCK)
    if BY_COUNTING:
        earlier = position[:, None] < position[None, :]
        in_front = tl.where(earlier, key[:, None] >= key[None, :], key[:, None] > key[None, :])
        rank = tl.sum(in_front.to(tl.int32), axis=0)
    else:
        packed = (key.to(tl.int64) << 32) | (BLOCK - 1 - position)  # unique, so one maximum finds value and position
        rank = tl.full([BLOCK], COUNT, tl.int32)
        for place in tl.static_range(COUNT):
            best = packed == tl.max(packed, axis=0)
            rank = tl.where(best, place, rank)
            packed = tl.where(best, -0x8000000000000000, packed)
    return rank


@triton.jit
def keep_best_groups(
    choice,
    SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Set `choice` [BLOCK_G · BLOCK_S] to -inf outside the TOPK_GROUPS groups with the best sum of their two best."""
    tile = tl.reshape(choice, [BLOCK_G, BLOCK_S])
    group_score = tl.max(tile, axis=1)
    if SIZE > 1:
        best = tl.argmax(tile, axis=1)
        rest = tl.where(tl.arange(0, BLOCK_S)[None, :] == best[:, None], float("-inf"), tile)
        group_score += tl.max(rest, axis=1)
    key = order_key(group_score, tl.arange(0, BLOCK_G) < NUM_GROUPS)
    eligible = rank_descending(key, TOPK_GROUPS, BLOCK_G, True) < TOPK_GROUPS
    return tl.reshape(tl.where(eligible[:, None], tile, float("-inf")), [BLOCK_G * BLOCK_S])


@triton.jit
def choose_experts(
    logits_ptr,
    selection_bias_ptr,
    E: tl.constexpr,
    COUNT: tl.constexpr,
    SCORE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BY_COUNTING: tl.constexpr,
):
    """Rank the experts of one token: (ids, scores, ranks), each [BLOCK_G · BLOCK_S]; rank < COUNT means chosen.

    The scores are softmax or sigmoid values, or the logits themselves for "topk_softmax".
    """
    SIZE: tl.constexpr = E // NUM_GROUPS
    BLOCK: tl.constexpr = BLOCK_G * BLOCK_S
    position = tl.arange(0, BLOCK)
    group = position // BLOCK_S
    member = position % BLOCK_S
    ids = group * SIZE + member
    exists = (group < NUM_GROUPS) & (member < SIZE)
    # .cg: other programs wrote these; read them from L2, where they met.
    scores = tl.load(logits_ptr + ids, mask=exists, other=float("-inf"), cache_modifier=".cg")
    if SCORE == "softmax":
        scores = tl.exp(scores - tl.max(scores, axis=0))
        scores = scores * (1.0 / tl.sum(scores, axis=0))
    elif SCORE == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    choice = scores
    if selection_bias_ptr is not None:
        choice += tl.load(selection_bias_ptr + ids, mask=exists, other=0.0).to(tl.float32)
    if NUM_GROUPS > 1:
        choice = tl.where(exists, choice, float("-inf"))
        choice = keep_best_groups(choice, SIZE, NUM_GROUPS, TOPK_GROUPS, BLOCK_G, BLOCK_S)
    rank = rank_descending(order_key(choice, exists), COUNT, BLOCK, BY_COUNTING)
    return ids, scores, rank


@triton.jit
def store_topk(
    topk_ids_ptr,
    topk_weights_ptr,
    ids,
    scores,
    rank,
    renorm_epsilon,
    renorm_minimum,
    scale,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """Scatter the chosen experts of one token, with their gate weights, to the places of their ranks."""
    chosen = rank < K
    weights = scores
    if SCORE == "topk_softmax":
        top = tl.max(tl.where(chosen, scores, float("-inf")), axis=0)
        weights = tl.where(chosen, tl.exp(scores - top), 0.0)
        weights = weights / tl.sum(weights, axis=0)
    elif RENORMALIZE:
        total = tl.sum(tl.where(chosen, scores, 0.0), axis=0) + renorm_epsilon
        weights = scores / tl.maximum(total, renorm_minimum)
    tl.store(topk_ids_ptr + rank, ids, mask=chosen)
    tl.store(topk_weights_ptr + rank, weights * scale, mask=chosen)


@triton.jit
def _norm_router_kernel(
    residual_ptr,  # [T, H]
    delta_ptr,  # [T, H] or None
    norm_weight_ptr,  # [H]
    router_ptr,  # [E, H]
    router_bias_ptr,  # [E] or None
    selection_bias_ptr,  # [E] or None
    residual_out_ptr,  # [T, H]
    x_ptr,  # [T, H]
    logits_ptr,  # [T, E] float32
    topk_ids_ptr,  # [T, K] int32
    topk_weights_ptr,  # [T, K] float32
    counter_ptr,  # [T] int32, zero
    residual_multiplier,
    epsilon,
    renorm_epsilon,
    renorm_minimum,
    scale,
    H: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    WEIGHT_PLUS_ONE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BY_COUNTING: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    experts = block * BLOCK_E + tl.arange(0, BLOCK_E)
    h = tl.arange(0, BLOCK_H)
    mask = h < H
    router = load_router(router_ptr, experts, h, mask, H, E)
    await_inputs(PDL)
    release_dependents(PDL)
    residual = load_residual(residual_ptr, delta_ptr, token * H + h, mask, residual_multiplier)
    if block == 0:  # stored before the norm: sm_80 would spill if it were kept until after
        tl.store(residual_out_ptr + token * H + h, residual, mask=mask)
    x = rms_normalize(residual.to(tl.float32), norm_weight_ptr, h, mask, epsilon, H, WEIGHT_PLUS_ONE)
    x = x.to(residual.dtype)
    if block == 0:
        tl.store(x_ptr + token * H + h, x, mask=mask)
    logits_ptr += token * E
    store_logits(logits_ptr, router_bias_ptr, router, x, experts, E)
    if arrive_last(counter_ptr + token):
        ids, scores, rank = choose_experts(
            logits_ptr, selection_bias_ptr, E, K, SCORE, NUM_GROUPS, TOPK_GROUPS, BLOCK_G, BLOCK_S, BY_COUNTING
        )
        topk_ids_ptr += token * K
        topk_weights_ptr += token * K
        store_topk(
            topk_ids_ptr,
            topk_weights_ptr,
            ids,
            scores,
            rank,
            renorm_epsilon,
            renorm_minimum,
            scale,
            K,
            SCORE,
            RENORMALIZE,
        )


def norm_router(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor,
    router: torch.Tensor,
    routing: Routing,
    counter: torch.Tensor,
    epsilon: float,
    residual_multiplier: float = 1.0,
    router_bias: torch.Tensor | None = None,
    selection_bias: torch.Tensor | None = None,
    weight_plus_one: bool = False,
    out: NormRouterOutput | None = None,
) -> NormRouterOutput:
    """Add, norm, route and choose for T <= 16 tokens in one launch.

    residual [T, H] and delta [T, H] (the attention's output) share a dtype; norm_weight [H]; router [E, H];
    biases [E]. `counter` [>= T] int32 is zero and belongs to this call's stream alone: the launch leaves it at zero.
    `out.residual` and `out.x` must not be the inputs: other programs still read those.
    """
    tokens = len(residual)
    check_decode_tokens(tokens, "add_rms_norm, a matrix product and route_topk")
    check_router(norm_weight, router, router_bias, selection_bias, counter, tokens)
    experts, hidden = router.shape
    check_tensor("residual", residual, (tokens, hidden), FLOATS, router.device)
    if delta is not None:
        check_tensor("delta", delta, (tokens, hidden), (residual.dtype,), router.device)
    check_routing(routing, experts, selection_bias)
    out = NormRouterOutput.allocate(residual, experts, routing.top_k) if out is None else out
    shapes = ((tokens, hidden), (tokens, hidden), (tokens, experts), *2 * ((tokens, routing.top_k),))
    dtypes = (residual.dtype, residual.dtype, torch.float32, torch.int32, torch.float32)
    for name, tensor, shape, dtype in zip(out._fields, out, shapes, dtypes, strict=True):
        check_tensor(f"out.{name}", tensor, shape, (dtype,), router.device)
    if not tokens:
        return out
    for name, tensor in (("out.residual", out.residual), ("out.x", out.x)):
        if tensor.data_ptr() in (residual.data_ptr(), None if delta is None else delta.data_ptr()):
            raise ValueError(f"{name} must not share memory with an input: programs of this launch still read it")
    block_h, block_e, num_warps = decode_tiles(tokens, hidden, experts, programs=256)
    block_g, block_s = group_blocks(experts, routing.num_groups)
    _norm_router_kernel[(cdiv(experts, block_e), tokens)](
        residual,
        delta,
        norm_weight,
        router,
        router_bias,
        selection_bias,
        *out,
        counter,
        residual_multiplier,
        epsilon,
        routing.renorm_epsilon,
        routing.renorm_minimum,
        routing.scale,
        H=hidden,
        E=experts,
        K=routing.top_k,
        SCORE=routing.score,
        RENORMALIZE=routing.renormalize,
        NUM_GROUPS=routing.num_groups,
        TOPK_GROUPS=routing.topk_groups,
        WEIGHT_PLUS_ONE=weight_plus_one,
        BLOCK_H=block_h,
        BLOCK_E=block_e,
        BLOCK_G=block_g,
        BLOCK_S=block_s,
        BY_COUNTING=block_g * block_s <= COUNTING_LIMIT,
        num_warps=num_warps,
        **launch_options(router.device),
    )
    return out


@triton.jit
def _add_rms_norm_kernel(
    residual_ptr,  # [T, H]
    delta_ptr,  # [T, H] or None
    norm_weight_ptr,  # [H]
    residual_out_ptr,  # [T, H], not written without a delta
    x_ptr,  # [T, H]
    residual_multiplier,
    epsilon,
    H: tl.constexpr,
    WEIGHT_PLUS_ONE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    await_inputs(PDL)
    release_dependents(PDL)
    offset = tl.program_id(0).to(tl.int64) * H
    h = tl.arange(0, BLOCK_H)
    mask = h < H
    residual = load_residual(residual_ptr, delta_ptr, offset + h, mask, residual_multiplier)
    if delta_ptr is not None:
        tl.store(residual_out_ptr + offset + h, residual, mask=mask)
    x = rms_normalize(residual.to(tl.float32), norm_weight_ptr, h, mask, epsilon, H, WEIGHT_PLUS_ONE)
    tl.store(x_ptr + offset + h, x.to(residual.dtype), mask=mask)


def add_rms_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor,
    epsilon: float,
    residual_multiplier: float = 1.0,
    weight_plus_one: bool = False,
    residual_out: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(residual + delta · multiplier, its RMSNorm), both [T, H]; without a delta the residual itself is returned.

    One program per token, any T; `residual_out` may be `residual`. Floor: four passes over [T, H].
    """
    hidden = len(norm_weight)
    check_tensor("norm_weight", norm_weight, (hidden,), FLOATS, residual.device)
    check_tensor("residual", residual, (None, hidden), FLOATS, residual.device)
    if delta is None and residual_out is not None:
        raise ValueError("residual_out is given without a delta: the residual does not change")
    if delta is None:
        residual_out = residual
    else:
        check_tensor("delta", delta, residual.shape, (residual.dtype,), residual.device)
        residual_out = torch.empty_like(residual) if residual_out is None else residual_out
    x = torch.empty_like(residual) if x is None else x
    for name, tensor in (("residual_out", residual_out), ("x", x)):
        check_tensor(name, tensor, residual.shape, (residual.dtype,), residual.device)
    if len(residual):
        block_h = next_power_of_2(hidden)
        _add_rms_norm_kernel[(len(residual),)](
            residual,
            delta,
            norm_weight,
            residual_out,
            x,
            residual_multiplier,
            epsilon,
            H=hidden,
            WEIGHT_PLUS_ONE=weight_plus_one,
            BLOCK_H=block_h,
            num_warps=min(8, max(1, block_h // 512)),
            **launch_options(residual.device),
        )
    return residual_out, x


@triton.jit
def _route_topk_kernel(
    logits_ptr,  # [T, E] float32
    selection_bias_ptr,  # [E] or None
    topk_ids_ptr,  # [T, K] int32
    topk_weights_ptr,  # [T, K] float32
    renorm_epsilon,
    renorm_minimum,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    logits_ptr += token * E
    ids, scores, rank = choose_experts(
        logits_ptr, selection_bias_ptr, E, K, SCORE, NUM_GROUPS, TOPK_GROUPS, BLOCK_G, BLOCK_S, False
    )
    topk_ids_ptr += token * K
    topk_weights_ptr += token * K
    store_topk(
        topk_ids_ptr, topk_weights_ptr, ids, scores, rank, renorm_epsilon, renorm_minimum, scale, K, SCORE, RENORMALIZE
    )


def route_topk(
    logits: torch.Tensor,
    routing: Routing,
    selection_bias: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] float32 -> (topk_ids [T, K] int32, topk_weights [T, K] float32), any T.

    One program of one warp per token: no reduction leaves the warp, and thousands of tokens hide its latency.
    """
    check_tensor("logits", logits, (None, None), (torch.float32,), logits.device)
    tokens, experts = logits.shape
    check_routing(routing, experts, selection_bias)
    if selection_bias is not None:
        check_tensor("selection_bias", selection_bias, (experts,), FLOATS, logits.device)
    shape = (tokens, routing.top_k)
    topk_ids = logits.new_empty(shape, dtype=torch.int32) if topk_ids is None else topk_ids
    topk_weights = torch.empty_like(topk_ids, dtype=torch.float32) if topk_weights is None else topk_weights
    check_tensor("topk_ids", topk_ids, shape, (torch.int32,), logits.device)
    check_tensor("topk_weights", topk_weights, shape, (torch.float32,), logits.device)
    if tokens:
        block_g, block_s = group_blocks(experts, routing.num_groups)
        _route_topk_kernel[(tokens,)](
            logits,
            selection_bias,
            topk_ids,
            topk_weights,
            routing.renorm_epsilon,
            routing.renorm_minimum,
            routing.scale,
            E=experts,
            K=routing.top_k,
            SCORE=routing.score,
            RENORMALIZE=routing.renormalize,
            NUM_GROUPS=routing.num_groups,
            TOPK_GROUPS=routing.topk_groups,
            BLOCK_G=block_g,
            BLOCK_S=block_s,
            num_warps=1,
        )
    return topk_ids, topk_weights


def decode_tiles(
    tokens: int, hidden: int, experts: int, programs: int, four_warps_up_to: int = 4096
) -> tuple[int, int, int]:
    """(BLOCK_H, BLOCK_E, num_warps) for about `programs` programs in all, with at most 64 router values a thread.

    Four warps where a row fits them: with more threads than experts, the compiler recomputes scores in every thread.
    """
    block_h = next_power_of_2(hidden)
    num_warps = 4 if block_h <= four_warps_up_to else 8
    wanted = next_power_of_2(cdiv(experts * tokens, programs))
    most = max(1, 64 * 32 * num_warps // block_h)
    return block_h, min(wanted, most, next_power_of_2(experts)), num_warps


def group_blocks(experts: int, num_groups: int) -> tuple[int, int]:
    """(BLOCK_G, BLOCK_S): the padded number of groups and the padded size of one."""
    return next_power_of_2(num_groups), next_power_of_2(experts // num_groups)


def check_decode_tokens(tokens: int, alternative: str) -> None:
    """Refuse more tokens than the decode form is made for."""
    if tokens > MAX_DECODE_TOKENS:
        raise ValueError(f"{tokens} tokens: the decode form takes at most {MAX_DECODE_TOKENS}, use {alternative}")


def check_router(
    norm_weight: torch.Tensor,
    router: torch.Tensor,
    router_bias: torch.Tensor | None,
    selection_bias: torch.Tensor | None,
    counter: torch.Tensor,
    tokens: int,
) -> None:
    """Check the tensors that `norm_router` and `speculate` share."""
    check_tensor("router", router, (None, None), FLOATS, router.device)
    experts, hidden = router.shape
    check_tensor("norm_weight", norm_weight, (hidden,), FLOATS, router.device)
    for name, bias in (("router_bias", router_bias), ("selection_bias", selection_bias)):
        if bias is not None:
            check_tensor(name, bias, (experts,), FLOATS, router.device)
    check_tensor("counter", counter, (None,), (torch.int32,), router.device)
    if len(counter) < tokens:
        raise ValueError(f"counter has {len(counter)} entries for {tokens} tokens")


def check_routing(routing: Routing, experts: int, selection_bias: torch.Tensor | None) -> None:
    """Refuse a routing that these experts cannot follow."""
    if routing.score not in ("softmax", "sigmoid", "topk_softmax"):
        raise ValueError(f"score is {routing.score!r}, expected 'softmax', 'sigmoid' or 'topk_softmax'")
    if not 1 <= routing.top_k <= experts:
        raise ValueError(f"top_k is {routing.top_k}, expected 1 to {experts}, the number of experts")
    if routing.num_groups < 1 or experts % routing.num_groups:
        raise ValueError(f"num_groups is {routing.num_groups}, which does not divide {experts} experts")
    if not 1 <= routing.topk_groups <= routing.num_groups:
        raise ValueError(f"topk_groups is {routing.topk_groups}, expected 1 to num_groups = {routing.num_groups}")
    if routing.score == "topk_softmax" and (selection_bias is not None or routing.num_groups > 1):
        raise ValueError("score 'topk_softmax' chooses by the logits alone: it takes no selection_bias and no groups")
