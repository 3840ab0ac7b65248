"""The feed-forward block of a layer: router, routed experts and shared expert, or a dense MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tritonmoe.operations import MAX_DECODE_TOKENS, Operations
from tritonmoe.spec import MoeSpec, RouterSpec
from tritonmoe.weights import GluWeights, MoeWeights
from tritonmoe_kernels import reference
from tritonmoe_kernels.routing import NormRouterOutput, Routing


@dataclass(frozen=True)
class Scratch:
    """What launches of one stream share: arrival counters, at zero between launches, and slot ids of a single slot."""

    counter: torch.Tensor  # [MAX_DECODE_TOKENS] int32
    first_slot: torch.Tensor  # [MAX_DECODE_TOKENS, 1] int32, all 0

    @classmethod
    def allocate(cls, device: torch.device) -> Scratch:
        return cls(
            torch.zeros(MAX_DECODE_TOKENS, dtype=torch.int32, device=device),
            torch.zeros(MAX_DECODE_TOKENS, 1, dtype=torch.int32, device=device),
        )


def routing_rule(top_k: int, router: RouterSpec) -> Routing:
    """The part of a router's description that its kernel takes."""
    return Routing(
        top_k,
        router.score,
        router.renormalize,
        router.renorm_epsilon,
        router.renorm_minimum,
        router.scale,
        router.num_groups,
        router.topk_groups,
    )


def route(
    ops: Operations,
    spec: MoeSpec,
    weights: MoeWeights,
    residual: torch.Tensor,
    delta: torch.Tensor,
    post_norm: torch.Tensor,
    epsilon: float,
    multiplier: float,
    scratch: Scratch,
) -> NormRouterOutput:
    """Add the attention's output to the residual [T, H], norm it, choose experts."""
    rule = routing_rule(spec.num_experts_per_tok, spec.router)
    if len(residual) <= MAX_DECODE_TOKENS:
        return ops.norm_router(
            residual,
            delta,
            post_norm,
            weights.router,
            rule,
            scratch.counter,
            epsilon,
            multiplier,
            weights.router_bias,
            weights.selection_bias,
        )
    residual, x = ops.add_rms_norm(residual, delta, post_norm, epsilon, multiplier)
    logits = reference.router_logits(x, weights.router, weights.router_bias)
    return NormRouterOutput(residual, x, logits, *ops.route_topk(logits, rule, weights.selection_bias))


def moe_block(
    ops: Operations,
    spec: MoeSpec,
    weights: MoeWeights,
    routed: NormRouterOutput,
    multiplier: float,
    scratch: Scratch,
) -> torch.Tensor:
    """Routed plus shared expert output, added to the residual: [T, H]."""
    experts = weights.experts
    out = routed.x.new_empty(*routed.topk_ids.shape, routed.x.shape[1])  # every row of it is written
    expert_out = ops.expert_gemm(
        routed.x,
        routed.topk_ids,
        experts.gate_up,
        experts.down,
        experts.gate_up_bias,
        experts.down_bias,
        spec.activation,
        spec.swiglu_limit,
        spec.swiglu_alpha,
        out,
    )
    shared = None
    if weights.shared is not None:
        shared = glu_mlp(ops, weights.shared, routed.x, scratch)
        if weights.shared_gate is not None:
            shared = shared * F.linear(routed.x, weights.shared_gate).sigmoid()
    return ops.combine(expert_out, routed.topk_weights, shared, routed.residual, multiplier)


def glu_mlp(ops: Operations, weights: GluWeights, x: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Dense SiLU-GLU: x [T, H] (normed) -> [T, H]. Few tokens stream it as an expert that every token chose."""
    if len(x) > MAX_DECODE_TOKENS:
        return reference.glu_mlp(x, weights.gate_up, weights.down)
    slot_ids = scratch.first_slot[: len(x)]
    out = x.new_empty(len(x), 1, x.shape[1])
    return ops.expert_gemm(x, slot_ids, weights.gate_up[None], weights.down[None], out=out).squeeze(1)
