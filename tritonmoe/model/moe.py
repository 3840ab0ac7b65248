"""The feed-forward block of a layer: router, routed experts and shared expert, or a dense MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from tritonmoe.model.matrices import select
from tritonmoe.model.operations import Operations, product
from tritonmoe.model.spec import LayerSpec, ModelSpec, MoeSpec, RouterSpec
from tritonmoe.model.step_graph import StepGraph
from tritonmoe.model.weights import ExpertWeights, GluWeights, LayerWeights, ModelWeights, MoeWeights
from tritonmoe_kernels import reference
from tritonmoe_kernels.routing import MAX_DECODE_TOKENS, NormRouterOutput, Routing


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


@dataclass
class Hooks:
    """Called during a forward pass, by whoever studies the model; not in captured steps."""

    on_route: Callable[[int, torch.Tensor], None] | None = None  # layer, topk_ids [T, K] int32
    on_routed: Callable[[int, NormRouterOutput], None] | None = None  # layer, all that its routing gave
    on_experts: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None  # also their outputs [T, K, H]
    # After a layer: layer, is_prefill, topk_ids and topk_weights [T, K], what it foretold (ids [T, M] by later layer).
    on_layer: Callable[[int, bool, np.ndarray, np.ndarray, dict[int, np.ndarray]], None] | None = None


class Experts:
    """Runs the MoE block of any layer with all experts on the device; subclasses keep them elsewhere."""

    def __init__(self, ops: Operations, spec: ModelSpec, weights: ModelWeights) -> None:
        self.hooks = Hooks()
        self._ops = ops
        self._spec = spec
        self._weights = weights
        self._scratch = Scratch.allocate(weights.embedding.device)
        self.step_graph: StepGraph | None = None  # while a decode step is captured

    is_capturable = True  # whether a decode step can be captured in CUDA graphs
    needs_host = False  # whether the host decides something in the middle of a decode step
    layout: object = None  # another value: captured steps do what is no longer right

    def begin(self) -> None:
        """A generation begins."""

    def begin_decode(self, batch: int) -> None:
        """Decode steps of so many sequences follow."""

    def begin_step(self, batch: int) -> None:
        """A decode step of so many sequences follows, whatever was run since the last one."""

    def abandon_step(self) -> None:
        """A step that was being captured has failed."""

    def step_launched(self) -> None:
        """A decode step has been launched."""

    def close(self) -> None:
        """Give back what is held outside the weights."""

    def outstanding(self) -> str:
        """What a step may be waiting for, to follow a message; empty where there is no such thing."""
        return ""

    def report(self) -> list[str]:
        """What happened to experts since the last `begin`, as lines to print."""
        return []

    def layer(self, layer_id: int, residual: torch.Tensor, delta: torch.Tensor, is_prefill: bool) -> torch.Tensor:
        """residual, delta (the attention's output) [T, H] -> the residual after the block [T, H]."""
        layer, weights = self._spec.layers[layer_id], self._weights.layers[layer_id]
        if layer.moe is None or weights.moe is None:
            return self._dense(weights, residual, delta)
        routed = self._route(layer_id, residual, delta, is_prefill)
        if self.hooks.on_route is not None:
            self.hooks.on_route(layer_id, routed.topk_ids)
        if self.hooks.on_routed is not None:
            self.hooks.on_routed(layer_id, routed)
        out = routed.x.new_empty(*routed.topk_ids.shape, routed.x.shape[1])
        weights_used = self._compute(layer_id, routed, out, is_prefill)
        if self.hooks.on_experts is not None:
            self.hooks.on_experts(layer_id, routed.topk_ids, out)
        shared = self._shared(weights.moe, routed.x)
        return self._ops.combine(out, weights_used, shared, routed.residual, self._spec.residual_multiplier)

    def _route(self, layer_id: int, residual: torch.Tensor, delta: torch.Tensor, is_prefill: bool) -> NormRouterOutput:
        """Add the attention's output to the residual, norm it, choose experts."""
        return self._true_routing(layer_id, residual, delta)

    def _compute(self, layer_id: int, routed: NormRouterOutput, out: torch.Tensor, is_prefill: bool) -> torch.Tensor:
        """Fill `out` [T, K, H] with the outputs of the chosen experts; returns the weights [T, K] to sum them with."""
        moe = self._weights.layers[layer_id].moe
        assert moe is not None
        self._run_slots(layer_id, routed.x, routed.topk_ids, moe.experts, out)
        if self.hooks.on_layer is not None:
            ids, weights = routed.topk_ids.cpu().numpy(), routed.topk_weights.cpu().numpy()
            self.hooks.on_layer(layer_id, is_prefill, ids, weights, {})
        return routed.topk_weights

    def _true_routing(self, layer_id: int, residual: torch.Tensor, delta: torch.Tensor) -> NormRouterOutput:
        spec, weights = self._moe(layer_id)
        norm, epsilon = self._weights.layers[layer_id].post_norm, self._spec.norm_epsilon
        rule, multiplier = routing_rule(spec.num_experts_per_tok, spec.router), self._spec.residual_multiplier
        if len(residual) <= MAX_DECODE_TOKENS:
            return self._ops.norm_router(
                residual,
                delta,
                norm,
                weights.router,
                rule,
                self._scratch.counter,
                epsilon,
                multiplier,
                weights.router_bias,
                weights.selection_bias,
            )
        residual, x = self._ops.add_rms_norm(residual, delta, norm, epsilon, multiplier)
        logits = reference.router_logits(x, weights.router, weights.router_bias)
        return NormRouterOutput(residual, x, logits, *self._ops.route_topk(logits, rule, weights.selection_bias))

    def _gate_weights(self, layer_id: int, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The true router's weights on other experts than it chose, made as it makes its own."""
        router = self._moe(layer_id)[0].router
        return reference.gate_weights(
            logits,
            ids.long(),
            router.score,
            router.renormalize,
            router.renorm_epsilon,
            router.renorm_minimum,
            router.scale,
        )

    def _run_slots(
        self,
        layer_id: int,
        x: torch.Tensor,
        slot_ids: torch.Tensor,
        slots: ExpertWeights,
        out: torch.Tensor,
        programs: int | None = None,
        ready: torch.Tensor | None = None,
    ) -> None:
        """Run x [T, H] through the experts in `slot_ids` [T, K] int32 of `slots`; rows of -1 stay as they are.

        `programs` and `ready` as in `expert_gemm`, for slots of which few are expected.
        """
        spec, _ = self._moe(layer_id)
        self._ops.expert_gemm(
            x,
            slot_ids,
            slots.gate_up,
            slots.down,
            slots.gate_up_bias,
            slots.down_bias,
            spec.activation,
            spec.swiglu_limit,
            spec.swiglu_alpha,
            out,
            num_experts=spec.num_experts,
            programs=programs,
            ready=ready,
        )

    def _moe(self, layer_id: int) -> tuple[MoeSpec, MoeWeights]:
        layer: LayerSpec = self._spec.layers[layer_id]
        weights: LayerWeights = self._weights.layers[layer_id]
        assert layer.moe is not None
        assert weights.moe is not None
        return layer.moe, weights.moe

    def _dense(self, weights: LayerWeights, residual: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        assert weights.dense is not None
        multiplier = self._spec.residual_multiplier
        residual, x = self._ops.add_rms_norm(residual, delta, weights.post_norm, self._spec.norm_epsilon, multiplier)
        return residual + self._glu_mlp(weights.dense, x) * multiplier

    def _shared(self, weights: MoeWeights, x: torch.Tensor) -> torch.Tensor | None:
        if weights.shared is None:
            return None
        shared = self._glu_mlp(weights.shared, x)
        if weights.shared_gate is None:
            return shared
        return shared * F.linear(x, weights.shared_gate).sigmoid()

    def _glu_mlp(self, weights: GluWeights, x: torch.Tensor) -> torch.Tensor:
        """Dense SiLU-GLU: x [T, H] (normed) -> [T, H]. Few tokens stream it as an expert that every token chose."""
        if len(x) > MAX_DECODE_TOKENS:
            return product(reference.activation(product(x, weights.gate_up), "silu"), weights.down)
        slot_ids, out = self._scratch.first_slot[: len(x)], x.new_empty(len(x), 1, x.shape[1])
        one, other = select(weights.gate_up, None), select(weights.down, None)
        return self._ops.expert_gemm(x, slot_ids, one, other, out=out).squeeze(1)


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
