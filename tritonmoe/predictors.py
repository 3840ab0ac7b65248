"""Which experts a later layer will want, foretold from what is known once a layer has chosen its own.

`residual` and `quasi-hidden` put the residual after this layer's attention, the latter with the mean outputs of the
chosen experts added, through the norm and the router of a later layer (arXiv 2603.19289; `kernels speculate`). They
answer on the device. `previous-token` and `oracle` answer on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tritonmoe.moe import routing_rule
from tritonmoe.operations import Operations
from tritonmoe.spec import ModelSpec
from tritonmoe.weights import ModelWeights
from tritonmoe_kernels.routing import MAX_DECODE_TOKENS, NormRouterOutput, SpeculateOutput


class Predictor:
    """Foretells nothing."""

    def guess(self, layer_id: int, routed: NormRouterOutput) -> dict[int, SpeculateOutput]:
        """By later layer: logits [T, E] and ids [T, M], best first, on the device."""
        return {}

    def known(self, layer_id: int) -> dict[int, np.ndarray]:
        """By later layer: ids [T, M], best first, on the host."""
        return {}

    def begin(self) -> None:
        """A generation begins."""

    def begin_step(self) -> None:
        """A decode step begins."""

    def observe(self, layer_id: int, topk_ids: np.ndarray) -> None:
        """The ids [T, K] that a layer really chose in this step."""


class RouterPredictor(Predictor):
    """Later layers' own routers, on a guess of their input; without default vectors on the residual alone."""

    def __init__(
        self,
        ops: Operations,
        spec: ModelSpec,
        weights: ModelWeights,
        lookahead: int,
        candidates: int,
        default_vectors: torch.Tensor | None = None,
    ) -> None:
        """`default_vectors` [layers, E, H] on the weights' device; ids beyond the model's k: `candidates`."""
        self._ops, self._spec, self._weights = ops, spec, weights
        self._lookahead, self._candidates = lookahead, candidates
        self._defaults = default_vectors
        self._counter = torch.zeros(MAX_DECODE_TOKENS, dtype=torch.int32, device=weights.embedding.device)
        self._moe_layers = list(spec.moe_layers)

    def guess(self, layer_id: int, routed: NormRouterOutput) -> dict[int, SpeculateOutput]:
        if len(routed.x) > MAX_DECODE_TOKENS:  # a step of so many tokens wants nearly every expert anyway
            return {}
        later = [i for i in self._moe_layers if i > layer_id][: self._lookahead]
        return {i: self._guess(layer_id, i, routed) for i in later}

    def _guess(self, layer_id: int, later: int, routed: NormRouterOutput) -> SpeculateOutput:
        moe, weights = self._spec.layers[later].moe, self._weights.layers[later]
        assert moe is not None
        assert weights.moe is not None
        mixed = (None, None, None)
        if self._defaults is not None:
            mixed = (self._defaults[layer_id], routed.topk_ids, routed.topk_weights)
        return self._ops.speculate(
            routed.residual,
            *mixed,
            weights.post_norm,
            weights.moe.router,
            routing_rule(moe.num_experts_per_tok, moe.router),
            min(moe.num_experts, moe.num_experts_per_tok + self._candidates),
            self._counter,
            self._spec.norm_epsilon,
            self._spec.residual_multiplier,
            weights.moe.router_bias,
            weights.moe.selection_bias,
        )


class HostPredictor(Predictor):
    """Ids that the host knows before the layer runs: those of the step before, or a recorded trace's."""

    def __init__(self, spec: ModelSpec, lookahead: int, trace: Sequence[Sequence[np.ndarray]] | None = None) -> None:
        """`trace`: per decode step the ids [T, K] of each layer (an empty array for a dense one)."""
        self._lookahead = lookahead
        self._moe_layers = list(spec.moe_layers)
        self._trace = trace
        self.begin()

    def begin(self) -> None:
        self._step = -1
        self._last: dict[int, np.ndarray] = {}

    def begin_step(self) -> None:
        self._step += 1

    def known(self, layer_id: int) -> dict[int, np.ndarray]:
        later = [i for i in self._moe_layers if i > layer_id][: self._lookahead]
        if self._trace is not None:
            step = self._trace[self._step] if self._step < len(self._trace) else ()
            return {i: step[i] for i in later if i < len(step)}
        return {i: self._last[i] for i in later if i in self._last}

    def observe(self, layer_id: int, topk_ids: np.ndarray) -> None:
        self._last[layer_id] = topk_ids
