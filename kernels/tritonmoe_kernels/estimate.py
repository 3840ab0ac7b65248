"""A small network's estimate of the next layer's router logits, for the few tokens of a decode step, in four launches.

Memory bound: all weights but the layer vectors are read once for a layer, D·(H + 2N + E) of them; 16.8 M at 2048 wide
(34 MB in bf16, 8 us at 4.3 TB/s). It runs beside the experts, so it takes few programs: each owns BLOCK_N rows of a
matrix and reads them in steps of BLOCK_K.

Sums run in float32 in a fixed order; between launches values are rounded to the weights' dtype, and so are the normed
ones before they are multiplied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonmoe_kernels.checks import FLOATS, check_tensor
from tritonmoe_kernels.estimate_reference import LAYER_NORM_EPSILON, EstimatorWeights
from tritonmoe_kernels.routing import MAX_DECODE_TOKENS
from tritonmoe_kernels.tiles import cdiv, next_power_of_2

BLOCK_N, BLOCK_K = 8, 512  # 32 values a thread of a tile: two tiles are in flight without spills


@triton.jit
def _estimate_kernel(
    out_ptr,  # [T, N]
    x_ptr,  # [T, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N] or None
    skip_ptr,  # [T, N] or None, added at the end
    norm_weight_ptr,  # [K] or None
    norm_bias_ptr,  # [K]
    epsilon,
    N: tl.constexpr,
    K: tl.constexpr,
    IS_SILU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    units = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ptrs = weight_ptr + tl.minimum(units, N - 1).to(tl.int64) * K  # beyond the end: the last row, not stored
    x_ptr += token * K
    if norm_weight_ptr is not None:
        columns = tl.arange(0, BLOCK_ROW)
        values = tl.load(x_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
        mean = tl.sum(values, axis=0) / K
        centred = tl.where(columns < K, values - mean, 0.0)
        inverse = tl.rsqrt(tl.sum(centred * centred, axis=0) / K + epsilon)
    sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        tile = tl.load(row_ptrs[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0)
        x = tl.load(x_ptr + k, mask=k < K, other=0.0)
        if norm_weight_ptr is not None:
            scale = tl.load(norm_weight_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            shift = tl.load(norm_bias_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            x = ((x.to(tl.float32) - mean) * inverse * scale + shift).to(x.dtype)
        sums += tile.to(tl.float32) * x.to(tl.float32)[None, :]
    out = tl.sum(sums, axis=1)
    mask = units < N
    if bias_ptr is not None:
        out += tl.load(bias_ptr + units, mask=mask, other=0.0).to(tl.float32)
    if IS_SILU:
        out = out * tl.sigmoid(out)
    if skip_ptr is not None:
        out += tl.load(skip_ptr + token * N + units, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + units, out.to(out_ptr.dtype.element_ty), mask=mask)


def estimate(
    q: torch.Tensor,
    weights: EstimatorWeights,
    base: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits [T, E] float32 of the next layer's router, from the quasi-hidden state q [T, H], for T <= 16 tokens.

    hidden = q · intoᵀ + layer; inner = hidden + silu(hidden · upᵀ) · downᵀ; logits = LayerNorm(inner) · headᵀ + base,
    where `base` [T, E] float32 are logits that the network only corrects.
    """
    tokens, hidden = q.shape
    if tokens > MAX_DECODE_TOKENS:
        raise ValueError(f"{tokens} tokens: at most {MAX_DECODE_TOKENS} are supported, use matrix products")
    check_weights(weights, hidden, q.dtype, q.device)
    experts = len(weights.head)
    out = q.new_empty(tokens, experts, dtype=torch.float32) if out is None else out
    check_tensor("q", q, (None, None), FLOATS, q.device)
    check_tensor("out", out, (tokens, experts), (torch.float32,), q.device)
    if base is not None:
        check_tensor("base", base, (tokens, experts), (torch.float32,), q.device)
    if not tokens:
        return out
    width, inner = len(weights.into), len(weights.up)
    narrow, wide, summed = (q.new_empty(tokens, size) for size in (width, inner, width))
    _launch(narrow, q, weights.into, bias=weights.layer)
    _launch(wide, narrow, weights.up, is_silu=True)
    _launch(summed, wide, weights.down, skip=narrow)
    _launch(out, summed, weights.head, skip=base, norm=(weights.norm_weight, weights.norm_bias))
    return out


def _launch(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    skip: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, torch.Tensor] | None = None,
    is_silu: bool = False,
) -> None:
    units, size = weight.shape
    norm_weight, norm_bias = (None, None) if norm is None else norm
    _estimate_kernel[(len(x), cdiv(units, BLOCK_N))](
        out,
        x,
        weight,
        bias,
        skip,
        norm_weight,
        norm_bias,
        LAYER_NORM_EPSILON,
        N=units,
        K=size,
        IS_SILU=is_silu,
        BLOCK_N=BLOCK_N,
        BLOCK_K=min(BLOCK_K, next_power_of_2(size)),
        BLOCK_ROW=next_power_of_2(size),
        num_warps=4,
    )


def check_weights(weights: EstimatorWeights, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    """ValueError that names the tensor whose shape, type or place is wrong."""
    width, inner = len(weights.into), len(weights.up)
    shapes = {
        "into": (width, hidden), "layer": (width,), "up": (inner, width), "down": (width, inner),
        "norm_weight": (width,), "norm_bias": (width,), "head": (None, width),
    }  # fmt: skip
    for name, shape in shapes.items():
        check_tensor(name, getattr(weights, name), shape, (dtype,), device)
