"""The attention block of a layer: projections, q/k norms, RoPE, cache, softmax."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tritonmoe.kv_cache import KVCache
from tritonmoe.spec import AttentionSpec
from tritonmoe.weights import AttentionWeights
from tritonmoe_kernels import reference


def attention_block(
    spec: AttentionSpec,
    weights: AttentionWeights,
    x: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    cache: KVCache,
    layer_id: int,
    length: int,
    epsilon: float,
) -> torch.Tensor:
    """x [B, T, H] (already normed), positions [B, T] -> [B, T, H]; appends to the cache.

    `length` is a bound on every position: only the first `length` cache entries are read.
    """
    qkv = F.linear(x, weights.qkv, weights.qkv_bias)
    q, k, v = qkv.split([spec.q_size, spec.kv_size, spec.kv_size], dim=-1)
    if spec.qk_norm == "full":
        q = reference.rms_norm(q, weights.q_norm, epsilon)
        k = reference.rms_norm(k, weights.k_norm, epsilon)
    if spec.clip_qkv is not None:
        q, k, v = (part.clamp(-spec.clip_qkv, spec.clip_qkv) for part in (q, k, v))
    q = q.unflatten(-1, (spec.num_heads, spec.head_dim))
    k = k.unflatten(-1, (spec.num_kv_heads, spec.head_dim))
    v = v.unflatten(-1, (spec.num_kv_heads, spec.head_dim))
    if spec.qk_norm == "head":
        q, k = _head_norms(weights, q, k, epsilon)
    q = reference.rope(q, *rotary, spec.rope.interleaved)
    k = reference.rope(k, *rotary, spec.rope.interleaved)
    if spec.qk_norm == "head_after_rope":
        q, k = _head_norms(weights, q, k, epsilon)
    cache.append(layer_id, k, v, positions)
    out = reference.attention(
        q,
        cache.keys[layer_id][:, :, :length],
        cache.values[layer_id][:, :, :length],
        positions,
        spec.scale,
        spec.window,
        weights.sinks,
    )
    return F.linear(out, weights.output, weights.output_bias)


def _head_norms(
    weights: AttentionWeights, q: torch.Tensor, k: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.rms_norm(q, weights.q_norm, epsilon), reference.rms_norm(k, weights.k_norm, epsilon)
