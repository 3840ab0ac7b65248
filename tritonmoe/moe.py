"""The expert block of a layer: router, routed experts, shared expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tritonmoe.spec import MoeSpec
from tritonmoe.weights import MoeWeights
from tritonmoe_kernels import reference


def route(spec: MoeSpec, weights: MoeWeights, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H] (normed) -> (topk_ids [T, K] int64, topk_weights [T, K] float32)."""
    router = spec.router
    return reference.route_topk(
        reference.router_logits(x, weights.router, weights.router_bias),
        spec.num_experts_per_tok,
        router.score,
        router.renormalize,
        weights.selection_bias,
        router.renorm_epsilon,
        router.renorm_minimum,
        router.scale,
        router.num_groups,
        router.topk_groups,
    )


def moe_block(spec: MoeSpec, weights: MoeWeights, x: torch.Tensor) -> torch.Tensor:
    """x [T, H] (normed) -> routed plus shared expert output [T, H]."""
    topk_ids, topk_weights = route(spec, weights, x)
    experts = weights.experts
    expert_out = reference.expert_mlp(
        x,
        topk_ids,
        experts.gate_up,
        experts.down,
        experts.gate_up_bias,
        experts.down_bias,
        spec.activation,
        spec.swiglu_limit,
        spec.swiglu_alpha,
    )
    out = reference.combine(expert_out, topk_weights)
    if weights.shared is None:
        return out
    shared = reference.glu_mlp(x, weights.shared.gate_up, weights.shared.down)
    if weights.shared_gate is not None:
        shared = shared * F.linear(x, weights.shared_gate).sigmoid()
    return out + shared
