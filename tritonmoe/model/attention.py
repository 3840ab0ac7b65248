"""The attention block of a layer: projections, q/k norms, RoPE, cache, softmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tritonmoe.model.operations import Operations
from tritonmoe.model.spec import AttentionSpec
from tritonmoe.model.weights import AttentionWeights


@dataclass(frozen=True)
class Tokens:
    """The tokens of a forward pass: T of each of B sequences, all at once.

    In decode T is 1 and `positions` are known on the device only. In prefill every row's tokens lie at `start` to
    `start + T`.
    """

    positions: torch.Tensor  # [B · T] int64
    lengths: torch.Tensor  # [B · T] int64: positions + 1, made once for all layers
    batch: int
    start: int | None  # None in decode
    length: int | None  # a bound of all positions (exclusive) that is known on the host, or None

    @property
    def per_row(self) -> int:
        return len(self.positions) // self.batch


def attention_block(
    ops: Operations,
    spec: AttentionSpec,
    weights: AttentionWeights,
    residual: torch.Tensor,
    input_norm: torch.Tensor,
    epsilon: float,
    inv_freq: torch.Tensor,
    tokens: Tokens,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """residual [B · T, H] -> attention output [B · T, H]; appends to one layer's keys, values [B, kv_heads, L, D]."""
    qkv = ops.project(residual, weights.qkv, weights.qkv_bias, input_norm, epsilon)
    q = ops.rope_qk(
        qkv,
        tokens.positions,
        inv_freq,
        keys,
        values,
        spec.num_heads,
        spec.rope.interleaved,
        1.0 if spec.rope.yarn is None else spec.rope.yarn.attention_factor,
        spec.qk_norm,
        weights.q_norm,
        weights.k_norm,
        epsilon,
        spec.clip_qkv,
        tokens.per_row,
    )
    if tokens.length is not None:
        keys, values = keys[:, :, : tokens.length], values[:, :, : tokens.length]
    if tokens.start is None:
        out = ops.attention_decode(q, keys, values, tokens.lengths, spec.scale, spec.window, weights.sinks)
    else:
        out = _prefill(ops, spec, weights, q.view(tokens.batch, tokens.per_row, *q.shape[1:]), tokens, keys, values)
    return ops.project(out, weights.output, weights.output_bias)


def _prefill(
    ops: Operations,
    spec: AttentionSpec,
    weights: AttentionWeights,
    q: torch.Tensor,
    tokens: Tokens,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """q [B, T, heads, D] -> [B · T, heads · D]."""
    batch, count, heads, size = q.shape
    is_plain = spec.window is None and weights.sinks is None
    if is_plain and q.is_cuda and q.dtype.itemsize == 2:
        # Where torch's flash attention can do it, it is 1.3 times as fast as ours (docs/measurements/kernels.json).
        q, options = q.transpose(1, 2), {"scale": spec.scale, "enable_gqa": True}
        if tokens.start == 0:
            out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, **options)
        else:
            # Imported where it is needed: it brings torch's compiler along, which takes a second.
            from torch.nn.attention.bias import causal_lower_right

            mask = causal_lower_right(count, keys.shape[2])
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, **options)
        return out.transpose(1, 2).reshape(batch * count, heads * size)
    positions = tokens.positions.view(batch, count)
    return ops.attention_prefill(q, keys, values, positions, spec.scale, spec.window, weights.sinks).flatten(0, 1)
