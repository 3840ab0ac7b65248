"""Dense projection of one token, with the RMSNorm before it: y = norm(x) · Wᵀ + b.

Memory bound: N·H weights are read once (21 MB for a fused q|k|v projection of 5120 x 2048 in bf16, 4.9 us at 4.3 TB/s).
A program owns BLOCK_N rows and asks for all of them at once, before it waits for the kernel that makes x
(dependent_launch.py), then normalises x itself: x and the norm's weight come from L2, so that saves a launch and costs
little. Rows longer than BLOCK_K are read in steps, the first of them ahead of the wait.

Sums run in float32 in a fixed order. The normed x is rounded to its dtype first, as the reference does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonmoe_kernels.checks import FLOATS, check_tensor
from tritonmoe_kernels.dependent_launch import await_inputs, launch_options, release_dependents
from tritonmoe_kernels.launch_table import launch_config
from tritonmoe_kernels.quantized import Matrix
from tritonmoe_kernels.tiles import cdiv, next_power_of_2
from tritonmoe_kernels.weight_tiles import (
    check_matrix,
    fetch_weights,
    load_columns,
    operands,
    products,
    step_columns,
    step_of_x,
    tile_rows,
)

MOST_TILES = 65535  # of a grid's second axis
MAX_TOKENS = 16  # every token reads the weights again, from L2: beyond, a matrix product is faster


@triton.jit
def _normed(x_ptr, norm_weight_ptr, inverse, columns, H: tl.constexpr, BLOCK_K: tl.constexpr, PLUS_ONE: tl.constexpr):
    """x at `columns` in float32, normed and rounded to its dtype where there is a norm."""
    x = load_columns(x_ptr + columns, columns, H, BLOCK_K, "")
    if norm_weight_ptr is not None:
        norm_weight = load_columns(norm_weight_ptr + columns, columns, H, BLOCK_K, "").to(tl.float32)
        if PLUS_ONE:
            norm_weight += 1.0
        x = (x.to(tl.float32) * inverse * norm_weight).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def _linear_kernel(
    out_ptr,  # [T, N]
    x_ptr,  # [T, H]
    weight,  # Parts of [N, H]
    strides,
    bias_ptr,  # [N] or None
    norm_weight_ptr,  # [H] or None
    epsilon,
    N: tl.constexpr,
    H: tl.constexpr,
    WEIGHT_PLUS_ONE: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_N
    rows = tile_rows(first, N, BLOCK_N)
    x_ptr += token.to(tl.int64) * H
    tile = fetch_weights(weight, strides, 0, first, rows, 0, LAYOUT, H, BLOCK_K, "")
    await_inputs(PDL)
    release_dependents(PDL)
    inverse = 1.0
    if norm_weight_ptr is not None:
        h = tl.arange(0, BLOCK_H)
        values = tl.load(x_ptr + h, mask=h < H, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(values * values, axis=0) / H + epsilon)
    columns = step_of_x(0, LAYOUT, BLOCK_K)
    x = _normed(x_ptr, norm_weight_ptr, inverse, columns, H, BLOCK_K, WEIGHT_PLUS_ONE)
    sums = products(tile, x, strides.byte, LAYOUT)
    for start in range(BLOCK_K, H, BLOCK_K):
        tile = fetch_weights(weight, strides, 0, first, rows, start, LAYOUT, H, BLOCK_K, "")
        columns = step_of_x(start, LAYOUT, BLOCK_K)
        x = _normed(x_ptr, norm_weight_ptr, inverse, columns, H, BLOCK_K, WEIGHT_PLUS_ONE)
        sums += products(tile, x, strides.byte, LAYOUT)
    out = tl.sum(sums, axis=1)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + first + rows).to(tl.float32)
    units = first + tl.arange(0, BLOCK_N)
    tl.store(out_ptr + token.to(tl.int64) * N + units, out.to(out_ptr.dtype.element_ty), mask=units < N)


def linear(
    x: torch.Tensor,
    weight: Matrix,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
    weight_plus_one: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, H], normed first where `norm_weight` [H] is given, times weight [N, H] transposed, plus bias [N]: [T, N].

    T <= 16. x, weight and bias share a dtype, or weight is quantised, its parts without an axis of slots; `out` may
    have another one (float32 logits are not rounded on the way).
    """
    units, hidden = weight.shape
    check_tensor("x", x, (None, hidden), FLOATS, x.device)
    check_matrix("weight", weight, (units, hidden), x.dtype, x.device)
    tokens = len(x)
    if tokens > MAX_TOKENS:
        raise ValueError(f"{tokens} tokens: at most {MAX_TOKENS} are supported, use a matrix product")
    if bias is not None:
        check_tensor("bias", bias, (units,), (x.dtype,), x.device)
    if norm_weight is not None:
        check_tensor("norm_weight", norm_weight, (hidden,), FLOATS, x.device)
    out = x.new_empty(tokens, units) if out is None else out
    check_tensor("out", out, (tokens, units), FLOATS, x.device)
    if not tokens:
        return out
    parts, strides, layout = operands(weight)
    launch = launch_config("linear", x.dtype, (units, hidden), tokens, x.device, layout.name)
    block_n = max(launch["block_n"], next_power_of_2(cdiv(units, MOST_TILES)))
    _linear_kernel[(tokens, cdiv(units, block_n))](
        out,
        x,
        parts,
        strides,
        bias,
        norm_weight,
        epsilon,
        N=units,
        H=hidden,
        WEIGHT_PLUS_ONE=weight_plus_one,
        LAYOUT=layout,
        BLOCK_N=block_n,
        BLOCK_K=step_columns(layout, hidden, launch["block_k"]),
        BLOCK_H=next_power_of_2(hidden),
        num_warps=launch["num_warps"],
        **launch_options(x.device),
    )
    return out
