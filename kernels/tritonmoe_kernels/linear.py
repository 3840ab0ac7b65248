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
from tritonmoe_kernels.tiles import cdiv, next_power_of_2

MAX_TOKENS = 16  # every token reads the weights again, from L2: beyond, a matrix product is faster


@triton.jit
def _weight_rows(row_ptrs, columns, H: tl.constexpr, BLOCK_K: tl.constexpr):
    if H % BLOCK_K == 0:
        tile = tl.load(row_ptrs[:, None] + columns[None, :])
    else:
        tile = tl.load(row_ptrs[:, None] + columns[None, :], mask=(columns < H)[None, :], other=0.0)
    return tile


@triton.jit
def _products(tile, x_ptr, norm_weight_ptr, inverse, columns, H: tl.constexpr, WEIGHT_PLUS_ONE: tl.constexpr):
    """Weights times x, normed where there is a norm, in float32."""
    x = tl.load(x_ptr + columns, mask=columns < H, other=0.0)
    if norm_weight_ptr is not None:
        norm_weight = tl.load(norm_weight_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)
        if WEIGHT_PLUS_ONE:
            norm_weight += 1.0
        x = (x.to(tl.float32) * inverse * norm_weight).to(x.dtype)
    return tile.to(tl.float32) * x.to(tl.float32)[None, :]


@triton.jit
def _linear_kernel(
    out_ptr,  # [T, N]
    x_ptr,  # [T, H]
    weight_ptr,  # [N, H]
    bias_ptr,  # [N] or None
    norm_weight_ptr,  # [H] or None
    epsilon,
    N: tl.constexpr,
    H: tl.constexpr,
    WEIGHT_PLUS_ONE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    units = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(units, N - 1).to(tl.int64)  # beyond the end: the last row again, not stored
    row_ptrs = weight_ptr + rows * H
    x_ptr += token.to(tl.int64) * H
    columns = tl.arange(0, BLOCK_K)
    tile = _weight_rows(row_ptrs, columns, H, BLOCK_K)
    await_inputs(PDL)
    release_dependents(PDL)
    inverse = 1.0
    if norm_weight_ptr is not None:
        h = tl.arange(0, BLOCK_H)
        values = tl.load(x_ptr + h, mask=h < H, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(values * values, axis=0) / H + epsilon)
    sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    sums += _products(tile, x_ptr, norm_weight_ptr, inverse, columns, H, WEIGHT_PLUS_ONE)
    for start in range(BLOCK_K, H, BLOCK_K):
        tile = _weight_rows(row_ptrs, start + columns, H, BLOCK_K)
        sums += _products(tile, x_ptr, norm_weight_ptr, inverse, start + columns, H, WEIGHT_PLUS_ONE)
    out = tl.sum(sums, axis=1)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + rows).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * N + units, out.to(out_ptr.dtype.element_ty), mask=units < N)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
    weight_plus_one: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, H], normed first where `norm_weight` [H] is given, times weight [N, H] transposed, plus bias [N]: [T, N].

    T <= 16. x, weight and bias share a dtype; `out` may have another one (float32 logits are not rounded on the way).
    """
    check_tensor("weight", weight, (None, None), FLOATS, weight.device)
    units, hidden = weight.shape
    check_tensor("x", x, (None, hidden), (weight.dtype,), weight.device)
    tokens = len(x)
    if tokens > MAX_TOKENS:
        raise ValueError(f"{tokens} tokens: at most {MAX_TOKENS} are supported, use a matrix product")
    if bias is not None:
        check_tensor("bias", bias, (units,), (weight.dtype,), weight.device)
    if norm_weight is not None:
        check_tensor("norm_weight", norm_weight, (hidden,), FLOATS, weight.device)
    out = x.new_empty(tokens, units) if out is None else out
    check_tensor("out", out, (tokens, units), FLOATS, weight.device)
    if not tokens:
        return out
    launch = launch_config("linear", weight.dtype, (units, hidden), tokens, weight.device)
    block_h = next_power_of_2(hidden)
    block_k = min(block_h, launch["block_k"])
    _linear_kernel[(tokens, cdiv(units, launch["block_n"]))](
        out,
        x,
        weight,
        bias,
        norm_weight,
        epsilon,
        N=units,
        H=hidden,
        WEIGHT_PLUS_ONE=weight_plus_one,
        BLOCK_N=launch["block_n"],
        BLOCK_K=block_k,
        BLOCK_H=block_h,
        num_warps=launch["num_warps"],
        **launch_options(weight.device),
    )
    return out
