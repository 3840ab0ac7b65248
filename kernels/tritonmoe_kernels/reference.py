"""Plain torch references: what each kernel computes, in few lines that a reader can check.

Matrix products run in the dtype of their inputs; norms, softmax, routing and reductions in float32, with one
rounding at the end. Shapes use the letters of kernels/README.md: B sequences, T tokens, H hidden, E experts,
K experts per token, I intermediate, S slots, L cached positions, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from tritonmoe_kernels.quantized import Matrix, QuantizedMatrix, dequantize


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """`x / sqrt(mean(x²) + epsilon) · weight` over the last axis (arXiv 1910.07467), in x's dtype."""
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + epsilon)
    return (y if weight is None else y * weight.float()).to(x.dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first 2·R values of each head (arXiv 2104.09864).

    x [..., heads, D]; cos, sin [..., R] float32. Pairs are (i, i + R), or (2i, 2i + 1) when `interleaved`.
    """
    size = 2 * cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    part = x[..., :size].float()
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
    rotated = (a * cos - b * sin, b * cos + a * sin)
    part = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return torch.cat((part.to(x.dtype), x[..., size:]), dim=-1)


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal grouped-query attention over a cache whose entry j belongs to position j.

    q [B, T, heads, D]; keys, values [B, kv_heads, L, D]; positions [B, T] int64: query (b, t) sees the entries
    `max(0, p - window + 1) … p` for p = positions[b, t] < L. `sinks` [heads] adds exp(sink) to each denominator.
    Returns [B, T, heads · D].
    """
    batch, tokens, heads, size = q.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    grouped = q.view(batch, tokens, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)  # [B, kv, G, T, D]
    scores = (grouped.flatten(2, 3) @ keys.transpose(-1, -2)).float().mul_(scale)  # in place: the largest tensor
    scores = scores.view(batch, kv_heads, heads // kv_heads, tokens, length)
    index = torch.arange(length, device=q.device)
    visible = index <= positions[..., None]  # [B, T, L]
    if window is not None:
        visible &= index > positions[..., None] - window
    scores.masked_fill_(~visible[:, None, None], float("-inf"))
    if sinks is not None:
        column = sinks.float().view(1, kv_heads, -1, 1, 1).expand(batch, -1, -1, tokens, 1)
        weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :length]
    else:
        weights = scores.softmax(-1)
    out = weights.to(values.dtype).flatten(2, 3) @ values  # [B, kv, G·T, D]
    out = out.view(batch, kv_heads, -1, tokens, size).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, tokens, heads * size)


def router_logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, H], weight [E, H] -> float32 logits [T, E]; products and sums in float32."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


def route_topk(
    logits: torch.Tensor,
    top_k: int,
    score: str,
    renormalize: bool,
    selection_bias: torch.Tensor | None = None,
    renorm_epsilon: float = 0.0,
    renorm_minimum: float = 0.0,
    scale: float = 1.0,
    num_groups: int = 1,
    topk_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts: logits [T, E] float32 -> (topk_ids [T, K] int64, topk_weights [T, K] float32).

    `score` is "softmax" (over all experts), "sigmoid", or "topk_softmax" (softmax over the K chosen logits).
    The bias enters the choice only. Of `num_groups` equal groups only the `topk_groups` with the largest sum of
    their two best scores stay eligible (arXiv 2412.19437). Equal scores go to the lower id.
    """
    choice = logits
    if score != "topk_softmax":
        choice = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        choice = choice if selection_bias is None else choice + selection_bias.float()
    if num_groups > 1:
        grouped = choice.unflatten(-1, (num_groups, -1))
        best = _largest(grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1), topk_groups)
        eligible = torch.zeros_like(choice[:, :num_groups], dtype=torch.bool).scatter_(1, best, True)
        choice = grouped.masked_fill(~eligible[..., None], float("-inf")).view_as(choice)
    ids = _largest(choice, top_k)
    return ids, gate_weights(logits, ids, score, renormalize, renorm_epsilon, renorm_minimum, scale)


def gate_weights(
    logits: torch.Tensor,
    ids: torch.Tensor,
    score: str,
    renormalize: bool,
    renorm_epsilon: float = 0.0,
    renorm_minimum: float = 0.0,
    scale: float = 1.0,
) -> torch.Tensor:
    """Weights [T, K] float32 of the experts `ids` [T, K] int64 by their logits [T, E], however they were chosen."""
    if score == "topk_softmax":
        return logits.gather(1, ids).softmax(-1) * scale
    weights = (logits.softmax(-1) if score == "softmax" else logits.sigmoid()).gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + renorm_epsilon).clamp(min=renorm_minimum)
    return weights * scale


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the largest values of each row, descending; a stable sort, since topk leaves ties undefined."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def activation(gate_up: torch.Tensor, kind: str, limit: float = 0.0, alpha: float = 0.0) -> torch.Tensor:
    """[..., 2I] (gate | up) -> [..., I]: "silu" = silu(gate) · up, "swiglu_clamped" = GPT-OSS's clamped form."""
    gate, up = gate_up.chunk(2, dim=-1)
    if kind == "silu":
        return F.silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * gate * torch.sigmoid(gate * alpha)


def expert_mlp(
    x: torch.Tensor,
    slot_ids: torch.Tensor,
    gate_up: Matrix,
    down: Matrix,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    kind: str = "silu",
    limit: float = 0.0,
    alpha: float = 0.0,
) -> torch.Tensor:
    """Run each token through the experts in its slots.

    x [T, H]; slot_ids [T, K] integers, -1 where the expert is absent; gate_up [S, 2I, H] (gate rows, then up rows);
    down [S, H, I]; biases [S, 2I] and [S, H]. Returns [T, K, H], zero where absent. Computes in x's dtype, of quantised
    matrices from values rounded to it.
    """
    tokens, top_k = slot_ids.shape
    out = x.new_zeros(tokens * top_k, down.shape[1])
    for slot, rows in _rows_by_slot(slot_ids):
        hidden = activation(_expert_linear(x[rows // top_k], gate_up, gate_up_bias, slot), kind, limit, alpha)
        out[rows] = _expert_linear(hidden, down, down_bias, slot)
    return out.view(tokens, top_k, -1)


def _rows_by_slot(slot_ids: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Each slot that is present, with the pairs t · K + k that name it."""
    flat = slot_ids.reshape(-1)
    order = flat.argsort(stable=True)
    slots, counts = torch.unique_consecutive(flat[order], return_counts=True)
    for slot, rows in zip(slots.tolist(), order.split(counts.tolist()), strict=True):
        if slot >= 0:
            yield slot, rows


def _expert_linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, slot: int) -> torch.Tensor:
    if isinstance(weight, QuantizedMatrix):
        values = dequantize(weight.slot(slot), x.dtype)[0]
    else:
        values = weight[slot].to(x.dtype)
    return F.linear(x, values, None if bias is None else bias[slot].to(x.dtype))


def combine(expert_out: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum over K in fixed order: [T, K, H], [T, K] float32 -> [T, H] in expert_out's dtype."""
    total = expert_out[:, 0].float() * topk_weights[:, 0, None]
    for k in range(1, expert_out.shape[1]):
        total += expert_out[:, k].float() * topk_weights[:, k, None]
    return total.to(expert_out.dtype)
