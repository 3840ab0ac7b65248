"""Each kernel's contract in torch: `NAME_ref` takes what the launcher `NAME` takes and computes the same.

They are what tests compare kernels with, and what the engine runs where there is no GPU. Buffers and counters that only
a launch needs are accepted and not used. The formulas themselves are in reference.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tritonmoe_kernels import reference
from tritonmoe_kernels.checks import check_tensor
from tritonmoe_kernels.planner_state import MASS_UNIT
from tritonmoe_kernels.quantized import Matrix, QuantizedMatrix, dequantize
from tritonmoe_kernels.routing import NormRouterOutput, Routing, SpeculateOutput


def linear_ref(
    x: torch.Tensor,
    weight: Matrix,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
    weight_plus_one: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `linear` computes, through the references; of a quantised weight in float32, rounded once."""
    if norm_weight is not None:
        norm_weight = norm_weight.float() + 1.0 if weight_plus_one else norm_weight
        x = reference.rms_norm(x, norm_weight, epsilon)
    if isinstance(weight, QuantizedMatrix):
        result = F.linear(x.float(), dequantize(weight), None if bias is None else bias.float()).to(x.dtype)
    else:
        result = F.linear(x, weight, bias)
    return result if out is None else out.copy_(result)


def rope_qk_ref(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_heads: int,
    interleaved: bool = False,
    magnitude: float = 1.0,
    qk_norm: str = "none",
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    clip_qkv: float | None = None,
    tokens_per_row: int = 1,
    rows: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `rope_qk` computes, through the references in the engine's order; appends to keys and values likewise."""
    _, kv_heads, length, size = keys.shape
    q, k, v = qkv.split([num_heads * size, kv_heads * size, kv_heads * size], dim=-1)
    if qk_norm == "full":
        q, k = reference.rms_norm(q, q_norm, epsilon), reference.rms_norm(k, k_norm, epsilon)
    if clip_qkv is not None:
        q, k, v = (part.clamp(-clip_qkv, clip_qkv) for part in (q, k, v))
    q, k, v = (part.unflatten(-1, (-1, size)) for part in (q, k, v))
    if qk_norm == "head":
        q, k = reference.rms_norm(q, q_norm, epsilon), reference.rms_norm(k, k_norm, epsilon)
    angles = positions[:, None].float() * inv_freq
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    q, k = reference.rope(q, cos, sin, interleaved), reference.rope(k, cos, sin, interleaved)
    if qk_norm == "head_after_rope":
        q, k = reference.rms_norm(q, q_norm, epsilon), reference.rms_norm(k, k_norm, epsilon)
    row = torch.arange(len(qkv), device=qkv.device) // tokens_per_row if rows is None else rows.long()
    keep = (positions >= 0) & (positions < length)
    if not bool(keep.all()):
        row, positions, k, v = row[keep], positions[keep], k[keep], v[keep]
    keys[row, :, positions] = k
    values[row, :, positions] = v
    return q


def attention_decode_ref(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attention_decode` in float32 torch, rounded once; `workspace` is not used."""
    result = attention_prefill_ref(q[:, None], keys, values, lengths.long()[:, None] - 1, scale, window, sinks)
    return result[:, 0] if out is None else out.copy_(result[:, 0])


def attention_prefill_ref(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attention_prefill` in float32 torch, rounded once; entries that nobody sees may hold anything."""
    keys, values = keys.float(), values.float()
    last = positions.amax(dim=1, keepdim=True)  # [B, 1]
    if bool((last + 1 < keys.shape[2]).any()):
        seen = torch.arange(keys.shape[2], device=q.device) <= last  # [B, L]
        keys, values = (part.masked_fill(~seen[:, None, :, None], 0.0) for part in (keys, values))
    result = reference.attention(q.float(), keys, values, positions, scale, window, sinks)
    result = result.masked_fill(positions[..., None] < 0, 0.0).to(q.dtype)
    return result if out is None else out.copy_(result)


def norm_router_ref(
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
    """What `norm_router` computes, through the references; `counter` and `out` are not used."""
    residual, x = add_rms_norm_ref(residual, delta, norm_weight, epsilon, residual_multiplier, weight_plus_one)
    logits = reference.router_logits(x, router, router_bias)
    topk_ids, topk_weights = route_topk_ref(logits, routing, selection_bias)
    return NormRouterOutput(residual, x, logits, topk_ids, topk_weights)


def add_rms_norm_ref(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor,
    epsilon: float,
    residual_multiplier: float = 1.0,
    weight_plus_one: bool = False,
    residual_out: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `add_rms_norm` computes, in plain torch; the output buffers are not used."""
    if delta is not None:
        residual = residual + delta * residual_multiplier
    weight = norm_weight.float() + 1.0 if weight_plus_one else norm_weight
    return residual, reference.rms_norm(residual, weight, epsilon)


def route_topk_ref(
    logits: torch.Tensor,
    routing: Routing,
    selection_bias: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `route_topk` computes, through the reference; the output buffers are not used."""
    ids, weights = reference.route_topk(
        logits,
        routing.top_k,
        routing.score,
        routing.renormalize,
        selection_bias,
        routing.renorm_epsilon,
        routing.renorm_minimum,
        routing.scale,
        routing.num_groups,
        routing.topk_groups,
    )
    return ids.int(), weights


def speculate_ref(
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
    """What `speculate` computes, through the references, q included; `counter` and `out` are not used."""
    quasi = residual.float()
    if default_vectors is not None:
        assert topk_ids is not None
        assert topk_weights is not None
        quasi = quasi + reference.combine(default_vectors[topk_ids.long()].float(), topk_weights) * residual_multiplier
    weight = norm_weight.float() + 1.0 if weight_plus_one else norm_weight
    q = reference.rms_norm(quasi, weight, epsilon).to(residual.dtype)
    logits = reference.router_logits(q, router, router_bias)
    ids, _ = reference.route_topk(
        logits,
        count,
        routing.score,
        routing.renormalize,
        selection_bias,
        num_groups=routing.num_groups,
        topk_groups=routing.topk_groups,
    )
    return SpeculateOutput(logits, ids.int(), q)


def expert_gemm_ref(
    x: torch.Tensor,
    slot_ids: torch.Tensor,
    gate_up: Matrix,
    down: Matrix,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    kind: str = "silu",
    limit: float = 0.0,
    alpha: float = 0.0,
    out: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    num_experts: int | None = None,
    form: str | None = None,
    programs: int | None = None,
    ready: torch.Tensor | None = None,
) -> torch.Tensor:
    """`expert_gemm` in float32 torch, rounded once; arguments from `hidden` on change nothing."""
    present = (slot_ids >= 0)[..., None]
    result = reference.expert_mlp(x.float(), slot_ids, gate_up, down, gate_up_bias, down_bias, kind, limit, alpha)
    result = result.to(x.dtype)
    return result if out is None else out.copy_(torch.where(present, result, out))


def combine_ref(
    expert_out: torch.Tensor,
    topk_weights: torch.Tensor,
    shared: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    multiplier: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`combine` in float32 torch, rounded once."""
    total = reference.combine(expert_out.float(), topk_weights)
    if shared is not None:
        total = total + shared.float()
    total = total * multiplier
    if residual is not None:
        total = total + residual.float()
    result = total.to(expert_out.dtype)
    return result if out is None else out.copy_(result)


def count_recall_ref(
    foretold: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, counts: torch.Tensor
) -> None:
    """`count_recall` in torch."""
    check_recall(foretold, topk_ids, topk_weights, counts)
    mass = (topk_weights / MASS_UNIT).long()
    is_right = ((topk_ids[:, :, None] == foretold[:, None, :]) & (foretold >= 0)[:, None, :]).any(-1)
    has_guess = (foretold[:, :1] >= 0).expand_as(topk_ids)
    sums = ((foretold >= 0), is_right, has_guess, is_right * mass, has_guess * mass)
    counts += torch.stack([part.sum() for part in sums])


def check_recall(
    foretold: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, counts: torch.Tensor
) -> None:
    check_tensor("topk_ids", topk_ids, (None, None), (torch.int32,), counts.device)
    check_tensor("topk_weights", topk_weights, topk_ids.shape, (torch.float32,), counts.device)
    check_tensor("foretold", foretold, (len(topk_ids), None), (torch.int32,), counts.device)
    check_tensor("counts", counts, (5,), (torch.int64,), counts.device)
