"""The operations a layer is made of: Triton kernels on a GPU, their torch references elsewhere.

Both have the same signatures, so the decoder is written once; what computes is chosen by where the weights are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tritonmoe.errors import InputError
from tritonmoe.model.matrices import row_slice
from tritonmoe_kernels import estimate_reference, fetch_reference, plan_reference, references
from tritonmoe_kernels.quantized import Matrix, QuantizedMatrix, dequantize
from tritonmoe_kernels.routing import MAX_DECODE_TOKENS

# Up to so many tokens a projection streams its weights through our own kernel; from there on the library's is faster.
MAX_STREAMED_TOKENS = 1
# The library's wants weights of fewer bits dequantised, so many elements at a time.
DEQUANTIZED_ELEMENTS = 8 << 20
DEQUANTIZED_BYTES = 16  # for each: of `dequantize`'s float32 values, scales and product, and the result


def streams(tokens: int, weight: Matrix) -> bool:
    """Whether so many tokens go through `linear`, which reads the weights for each of them."""
    return tokens <= (MAX_STREAMED_TOKENS if isinstance(weight, torch.Tensor) else MAX_DECODE_TOKENS)


def product(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None, to_float: bool = False) -> torch.Tensor:
    """x [T, H] times weight [N, H] transposed, plus bias: [T, N] in x's dtype, or in float32 (`to_float`), to which
    sums of 16-bit values then go without a rounding in between where a GPU makes them."""
    if isinstance(weight, torch.Tensor):
        if to_float and x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, weight.T, out_dtype=torch.float32)
        out = F.linear(x, weight, bias)
        return out.float() if to_float else out
    count, rows = max(1, DEQUANTIZED_ELEMENTS // weight.shape[1]), weight.shape[0]
    count = -(-count // weight.format.group_rows) * weight.format.group_rows
    found = []
    for first in range(0, rows, count):
        part = row_slice(weight, first, min(count, rows - first))
        assert isinstance(part, QuantizedMatrix)
        found.append(product(x, dequantize(part, x.dtype), None, to_float))
    out = torch.cat(found, dim=1)
    return out if bias is None else out + bias


class Operations(NamedTuple):
    """The launchers of `tritonmoe_kernels`, whose docstrings say what each computes."""

    linear: Callable[..., torch.Tensor]
    rope_qk: Callable[..., torch.Tensor]
    attention_decode: Callable[..., torch.Tensor]
    attention_prefill: Callable[..., torch.Tensor]
    norm_router: Callable[..., Any]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    route_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    speculate: Callable[..., Any]
    estimate: Callable[..., torch.Tensor]
    expert_gemm: Callable[..., torch.Tensor]
    combine: Callable[..., torch.Tensor]
    plan_demand: Callable[..., None]
    plan_prefetch: Callable[..., None]
    fetch: Callable[..., None]
    count_recall: Callable[..., None]

    def project(
        self,
        x: torch.Tensor,
        weight: Matrix,
        bias: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        epsilon: float = 0.0,
    ) -> torch.Tensor:
        """x [T, H], normed first where there is a norm, through a dense weight [N, H]: [T, N]."""
        if streams(len(x), weight):
            return self.linear(x, weight, bias, norm_weight, epsilon)
        if norm_weight is not None:
            _, x = self.add_rms_norm(x, None, norm_weight, epsilon)
        return product(x, weight, bias)


REFERENCES = Operations(
    linear=references.linear_ref,
    rope_qk=references.rope_qk_ref,
    attention_decode=references.attention_decode_ref,
    attention_prefill=references.attention_prefill_ref,
    norm_router=references.norm_router_ref,
    add_rms_norm=references.add_rms_norm_ref,
    route_topk=references.route_topk_ref,
    speculate=references.speculate_ref,
    estimate=estimate_reference.estimate_ref,
    expert_gemm=references.expert_gemm_ref,
    combine=references.combine_ref,
    plan_demand=plan_reference.plan_demand_ref,
    plan_prefetch=plan_reference.plan_prefetch_ref,
    fetch=fetch_reference.fetch_ref,
    count_recall=references.count_recall_ref,
)


def kernels() -> Operations:
    """The Triton kernels; InputError where triton is not installed."""
    try:
        import triton  # noqa: F401
    except ImportError:
        raise InputError("the GPU path needs the package triton, which is not installed; use --device cpu") from None
    from tritonmoe_kernels import (
        attention,
        estimate,
        expert_gemm,
        fetch,
        linear,
        norm_router,
        plan,
        recall,
        rope_qk,
        speculate,
    )  # fmt: skip

    return Operations(
        linear=linear.linear,
        rope_qk=rope_qk.rope_qk,
        attention_decode=attention.attention_decode,
        attention_prefill=attention.attention_prefill,
        norm_router=norm_router.norm_router,
        add_rms_norm=norm_router.add_rms_norm,
        route_topk=norm_router.route_topk,
        speculate=speculate.speculate,
        estimate=estimate.estimate,
        expert_gemm=expert_gemm.expert_gemm,
        combine=expert_gemm.combine,
        plan_demand=plan.plan_demand,
        plan_prefetch=plan.plan_prefetch,
        fetch=fetch.fetch,
        count_recall=recall.count_recall,
    )


def operations(device: torch.device) -> Operations:
    """What computes on `device`."""
    return kernels() if device.type == "cuda" else REFERENCES
