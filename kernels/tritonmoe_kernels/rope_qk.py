"""Query/key norm, RoPE and KV append, in one launch over the fused qkv projection.

Floor: the projection is read once and q, k, v are written once, 2 · (q_size + 2 · kv_size) values a token: 20 KB for
32 + 4 heads of 128 in 16 bits, 5 ns of bandwidth. In decode it is one launch's latency; in prefill 4,096 tokens move
84 MB, 20 us.

Schedule: grid (T, q heads + KV heads), one program of one warp per head of a token; the program of a KV head appends k
and v. A head is read as the two halves of its rotated pairs and the rest that RoPE leaves alone, so the rotation needs
no exchange between threads. cos and sin are computed in place from position · inv_freq in float32: no table, and any
position. A norm over the full projection is recomputed by each program (its row is in L2), in up to eight warps.

Rounding to the projection's dtype happens where the engine's sequence rounds: after the full norm, the clip, the norm
per head before RoPE, the rotation, the norm per head after it. float32 may differ in the last bits: a·cos - b·sin
contracts to a fused multiply-add on a GPU, and sums have another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonmoe_kernels.checks import FLOATS, check_tensor
from tritonmoe_kernels.dependent_launch import await_inputs, launch_options, release_dependents
from tritonmoe_kernels.tiles import next_power_of_2


@triton.jit
def load_part(base_ptr, weight_ptr, d, mask, inverse, clip, NORM: tl.constexpr, CLIP: tl.constexpr):
    """One part of a head as float32, full-normed and clipped where asked; `weight_ptr` is at this head's weights."""
    raw = tl.load(base_ptr + d, mask=mask, other=0.0)
    values = raw.to(tl.float32)
    if NORM == "full":
        weight = tl.load(weight_ptr + d, mask=mask, other=0.0).to(tl.float32)
        values = (values * inverse * weight).to(raw.dtype).to(tl.float32)
    if CLIP:
        values = tl.clamp(values, -clip, clip, propagate_nan=tl.PropagateNan.ALL).to(raw.dtype).to(tl.float32)
    return values


@triton.jit
def norm_part(values, weight_ptr, d, mask, inverse, dtype: tl.constexpr):
    """Finish the per-head norm of one part, rounded to `dtype`."""
    weight = tl.load(weight_ptr + d, mask=mask, other=0.0).to(tl.float32)
    return (values * inverse * weight).to(dtype).to(tl.float32)


@triton.jit
def rotate_head(
    in_ptr,
    out_ptr,
    weight_ptr,
    inv_freq_ptr,
    position,
    inverse,
    magnitude,
    epsilon,
    clip,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    CLIP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Norm, rotate and store one head: pairs (a, b), then the D - 2R values of the rest."""
    dtype: tl.constexpr = in_ptr.dtype.element_ty
    pair = tl.arange(0, BLOCK_R)
    rest = 2 * R + tl.arange(0, BLOCK_REST)
    in_pair = pair < R
    in_rest = rest < D
    first = 2 * pair if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else R)
    a = load_part(in_ptr, weight_ptr, first, in_pair, inverse, clip, NORM, CLIP)
    b = load_part(in_ptr, weight_ptr, second, in_pair, inverse, clip, NORM, CLIP)
    c = load_part(in_ptr, weight_ptr, rest, in_rest, inverse, clip, NORM, CLIP)
    if NORM == "head":
        inverse = tl.rsqrt((tl.sum(a * a + b * b, axis=0) + tl.sum(c * c, axis=0)) / D + epsilon)
        a = norm_part(a, weight_ptr, first, in_pair, inverse, dtype)
        b = norm_part(b, weight_ptr, second, in_pair, inverse, dtype)
        c = norm_part(c, weight_ptr, rest, in_rest, inverse, dtype)
    angle = position.to(tl.float32) * tl.load(inv_freq_ptr + pair, mask=in_pair, other=0.0)
    cos = tl.cos(angle) * magnitude
    sin = tl.sin(angle) * magnitude
    turned = (a * cos - b * sin).to(dtype).to(tl.float32)
    b = (b * cos + a * sin).to(dtype).to(tl.float32)
    a = turned
    if NORM == "head_after_rope":
        inverse = tl.rsqrt((tl.sum(a * a + b * b, axis=0) + tl.sum(c * c, axis=0)) / D + epsilon)
        a = norm_part(a, weight_ptr, first, in_pair, inverse, dtype)
        b = norm_part(b, weight_ptr, second, in_pair, inverse, dtype)
        c = norm_part(c, weight_ptr, rest, in_rest, inverse, dtype)
    tl.store(out_ptr + first, a.to(dtype), mask=in_pair)
    tl.store(out_ptr + second, b.to(dtype), mask=in_pair)
    tl.store(out_ptr + rest, c.to(dtype), mask=in_rest)


@triton.jit
def inverse_rms(ptr, epsilon, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """1 / RMS of SIZE contiguous values."""
    offsets = tl.arange(0, BLOCK)
    values = tl.load(ptr + offsets, mask=offsets < SIZE, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + epsilon)


@triton.jit
def _rope_qk_kernel(
    qkv_ptr,  # [T, (HEADS + 2 · KV_HEADS) · D]
    positions_ptr,  # [T] int64
    rows_ptr,  # [T] int32 or int64, or None: row = token // tokens_per_row
    inv_freq_ptr,  # [R] float32
    q_norm_ptr,  # [D], or [HEADS · D] when "full", or None
    k_norm_ptr,  # [D], or [KV_HEADS · D] when "full", or None
    q_ptr,  # [T, HEADS, D]
    keys_ptr,  # [B, KV_HEADS, L, D]
    values_ptr,  # [B, KV_HEADS, L, D]
    stride_kb,
    stride_kh,
    stride_kl,
    stride_vb,
    stride_vh,
    stride_vl,
    length,
    tokens_per_row,
    magnitude,
    epsilon,
    clip,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    CLIP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    PDL: tl.constexpr,
):
    await_inputs(PDL)
    release_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    qkv_ptr += token * ((HEADS + 2 * KV_HEADS) * D)
    q_inverse = 1.0
    k_inverse = 1.0
    if head < HEADS:
        if NORM == "full":
            q_inverse = inverse_rms(qkv_ptr, epsilon, HEADS * D, BLOCK_Q)
            q_norm_ptr += head * D
        rotate_head(
            qkv_ptr + head * D,
            q_ptr + (token * HEADS + head) * D,
            q_norm_ptr,
            inv_freq_ptr,
            position,
            q_inverse,
            magnitude,
            epsilon,
            clip,
            D,
            R,
            INTERLEAVED,
            NORM,
            CLIP,
            BLOCK_R,
            BLOCK_REST,
        )
    elif (position >= 0) & (position < length):
        kv_head = head - HEADS
        row = token // tokens_per_row if rows_ptr is None else tl.load(rows_ptr + token).to(tl.int64)
        if NORM == "full":
            k_inverse = inverse_rms(qkv_ptr + HEADS * D, epsilon, KV_HEADS * D, BLOCK_KV)
            k_norm_ptr += kv_head * D
        rotate_head(
            qkv_ptr + head * D,
            keys_ptr + row * stride_kb + kv_head.to(tl.int64) * stride_kh + position * stride_kl,
            k_norm_ptr,
            inv_freq_ptr,
            position,
            k_inverse,
            magnitude,
            epsilon,
            clip,
            D,
            R,
            INTERLEAVED,
            NORM,
            CLIP,
            BLOCK_R,
            BLOCK_REST,
        )
        d = tl.arange(0, BLOCK_D)
        v = load_part(qkv_ptr + (head + KV_HEADS) * D, None, d, d < D, 1.0, clip, "none", CLIP)
        values_ptr += row * stride_vb + kv_head.to(tl.int64) * stride_vh + position * stride_vl
        tl.store(values_ptr + d, v.to(qkv_ptr.dtype.element_ty), mask=d < D)


def rope_qk(
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
    """Norm and rotate q and k, append k and v to one layer's cache, return q [T, heads, D].

    qkv [T, q_size + 2 · kv_size]; positions [T] int64; inv_freq [R] float32 rotates the first 2R values of a head and
    `magnitude` multiplies cos and sin; keys, values [B, kv_heads, L, D], written at (row, position) in place, where
    row is `rows` [T] or token // tokens_per_row. A token whose position is outside the cache is not appended, so -1
    marks padding. q_norm and k_norm are [D], or [q_size] and [kv_size] when qk_norm is "full".
    """
    _check(qkv, positions, inv_freq, keys, values, num_heads, qk_norm, q_norm, k_norm, tokens_per_row, rows)
    tokens, (_, kv_heads, length, size) = len(qkv), keys.shape
    pairs = len(inv_freq)
    q = qkv.new_empty(tokens, num_heads, size) if q is None else q
    check_tensor("q", q, (tokens, num_heads, size), (qkv.dtype,), qkv.device)
    if not tokens:
        return q
    block_q = next_power_of_2(num_heads * size)
    _rope_qk_kernel[(tokens, num_heads + kv_heads)](
        qkv,
        positions,
        rows,
        inv_freq,
        q_norm,
        k_norm,
        q,
        keys,
        values,
        *keys.stride()[:3],
        *values.stride()[:3],
        length,
        tokens_per_row,
        magnitude,
        epsilon,
        0.0 if clip_qkv is None else clip_qkv,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        D=size,
        R=pairs,
        INTERLEAVED=interleaved,
        NORM=qk_norm,
        CLIP=clip_qkv is not None,
        BLOCK_R=next_power_of_2(pairs),
        BLOCK_REST=next_power_of_2(max(1, size - 2 * pairs)),
        BLOCK_D=next_power_of_2(size),
        BLOCK_Q=block_q,
        BLOCK_KV=next_power_of_2(kv_heads * size),
        num_warps=1 if qk_norm != "full" else min(8, max(1, block_q // 512)),
        **launch_options(qkv.device),
    )
    return q


def _check(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_heads: int,
    qk_norm: str,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    tokens_per_row: int,
    rows: torch.Tensor | None,
) -> None:
    if keys.ndim != 4 or keys.shape != values.shape:
        raise ValueError(
            f"keys {list(keys.shape)} and values {list(values.shape)} must share a shape [B, kv_heads, L, D]"
        )
    batch, kv_heads, _, size = keys.shape
    check_tensor("qkv", qkv, (None, (num_heads + 2 * kv_heads) * size), FLOATS, keys.device)
    tokens = len(qkv)
    for name, cache in (("keys", keys), ("values", values)):
        if cache.dtype != qkv.dtype or cache.device != qkv.device or cache.stride(-1) != 1:
            raise ValueError(
                f"{name} is {cache.dtype} on {cache.device} with last stride {cache.stride(-1)}, "
                f"expected {qkv.dtype} on {qkv.device} with last stride 1"
            )
    check_tensor("positions", positions, (tokens,), (torch.int64,), qkv.device)
    check_tensor("inv_freq", inv_freq, (None,), (torch.float32,), qkv.device)
    if not 1 <= len(inv_freq) <= size // 2:
        raise ValueError(f"inv_freq rotates {2 * len(inv_freq)} values of a head of {size}")
    if rows is not None:
        check_tensor("rows", rows, (tokens,), (torch.int32, torch.int64), qkv.device)
    elif tokens_per_row < 1 or tokens > batch * tokens_per_row:
        raise ValueError(f"{tokens} tokens in rows of {tokens_per_row} do not fit a cache of {batch} rows")
    if qk_norm not in ("none", "head", "full", "head_after_rope"):
        raise ValueError(f"qk_norm is {qk_norm!r}, expected 'none', 'head', 'full' or 'head_after_rope'")
    for name, weight, heads in (("q_norm", q_norm, num_heads), ("k_norm", k_norm, kv_heads)):
        if (weight is None) != (qk_norm == "none"):
            raise ValueError(f"{name} is {'missing' if weight is None else 'given'} with qk_norm {qk_norm!r}")
        if weight is not None:
            check_tensor(name, weight, (heads * size if qk_norm == "full" else size,), FLOATS, qkv.device)
