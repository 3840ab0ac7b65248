"""Which experts a later layer will want, foretold from what is known once a layer has chosen its own.

`residual` and `quasi-hidden` put the residual after this layer's attention, the latter with the mean outputs of the
chosen experts added, through the norm and the router of a later layer (arXiv 2603.19289; `kernels speculate`);
`estimator` puts that state through a small trained network instead, `hybrid` does for each layer what was measured to
be best. They answer on the device. `previous-token` and `oracle` answer on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from tritonmoe.model.moe import routing_rule
from tritonmoe.model.operations import Operations
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import ModelWeights
from tritonmoe.prediction.estimator import Estimator
from tritonmoe_kernels import reference
from tritonmoe_kernels.estimate_reference import estimate_ref
from tritonmoe_kernels.routing import MAX_DECODE_TOKENS, NormRouterOutput, Routing, SpeculateOutput


class Predictor:
    """Foretells nothing."""

    def later(self, layer_id: int) -> list[int]:
        """The layers that are foretold on the device when this one has been routed, the next one first."""
        return []

    def guess(self, layer_id: int, later: int, routed: NormRouterOutput) -> SpeculateOutput:
        """Of one of them: logits [T, E] and ids [T, M], best first, for few tokens. Guesses of different layers may run
        at once, each behind its own of the layer before."""
        raise NotImplementedError("nothing is foretold")

    def guess_prompt(self, layer_id: int, routed: NormRouterOutput) -> dict[int, SpeculateOutput]:
        """Of all of them, for any number of tokens."""
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
    """Later layers' own routers on a guess of their input, or an estimator of their logits."""

    def __init__(
        self,
        ops: Operations,
        spec: ModelSpec,
        weights: ModelWeights,
        lookahead: int,
        candidates: int,
        default_vectors: torch.Tensor | None = None,
        estimator: Estimator | None = None,
        kinds: Mapping[int, str] | None = None,
    ) -> None:
        """`default_vectors` [layers, E, H] on the weights' device, as is `estimator`; ids beyond the model's k:
        `candidates`. `kinds` says by later layer how it is foretold: "residual" leaves the default vectors out,
        "estimator" needs one; anything else, and by default, is the router."""
        self._ops, self._spec, self._weights = ops, spec, weights
        self._lookahead, self._candidates = lookahead, candidates
        self._defaults, self._estimator, self._kinds = default_vectors, estimator, dict(kinds or {})
        shape, device = (lookahead, MAX_DECODE_TOKENS), weights.embedding.device
        self._counters = torch.zeros(shape, dtype=torch.int32, device=device)  # of launches that may run at once
        self._moe_layers = list(spec.moe_layers)

    def later(self, layer_id: int) -> list[int]:
        return [i for i in self._moe_layers if i > layer_id][: self._lookahead]

    def guess_prompt(self, layer_id: int, routed: NormRouterOutput) -> dict[int, SpeculateOutput]:
        """`guess` for any number of tokens, by operations that suit many, and with `q`."""
        return {later: self._guess_many(layer_id, later, routed) for later in self.later(layer_id)}

    def guess(self, layer_id: int, later: int, routed: NormRouterOutput) -> SpeculateOutput:
        rule, weights = self._rule(later), self._weights.layers[later]
        assert weights.moe is not None
        mixed, out = (None, None, None), None
        if self._defaults is not None and self._kinds.get(later) != "residual":
            mixed = (self._defaults[layer_id], routed.topk_ids, routed.topk_weights)
        is_estimated = self._kinds.get(later) == "estimator"
        if is_estimated:
            shape = len(routed.x), len(weights.moe.router)
            logits = routed.residual.new_empty(*shape, dtype=torch.float32)
            ids = torch.empty(shape[0], rule.top_k, dtype=torch.int32, device=logits.device)
            out = SpeculateOutput(logits, ids, torch.empty_like(routed.residual))
        guess = self._ops.speculate(
            routed.residual,
            *mixed,
            weights.post_norm,
            weights.moe.router,
            rule,
            rule.top_k,
            self._counters[self.later(layer_id).index(later)],
            self._spec.norm_epsilon,
            self._spec.residual_multiplier,
            weights.moe.router_bias,
            weights.moe.selection_bias,
            out=out,
        )
        return self._estimated(later, guess, self._ops.estimate) if is_estimated else guess

    def _guess_many(self, layer_id: int, later: int, routed: NormRouterOutput) -> SpeculateOutput:
        rule, weights, kind = self._rule(later), self._weights.layers[later], self._kinds.get(later)
        assert weights.moe is not None
        quasi = routed.residual
        if self._defaults is not None and kind != "residual":
            outputs = self._defaults[layer_id][routed.topk_ids.long()]  # [T, K, H]
            quasi = self._ops.combine(outputs, routed.topk_weights, None, quasi, self._spec.residual_multiplier)
        _, q = self._ops.add_rms_norm(quasi, None, weights.post_norm, self._spec.norm_epsilon)
        logits = reference.router_logits(q, weights.moe.router, weights.moe.router_bias)
        guess = SpeculateOutput(logits, routed.topk_ids, q)
        if kind == "estimator":
            return self._estimated(later, guess, estimate_ref)
        return guess._replace(ids=self._ops.route_topk(logits, rule, weights.moe.selection_bias)[0])

    def _estimated(self, later: int, guess: SpeculateOutput, estimate: Callable[..., torch.Tensor]) -> SpeculateOutput:
        """What the estimator makes of the quasi-hidden state, and of the router's logits where it corrects them."""
        estimator, moe = self._estimator, self._weights.layers[later].moe
        assert estimator is not None
        assert moe is not None
        network = estimator.of_layer(self._moe_layers.index(later) - 1)
        logits = estimate(guess.q, network, guess.logits if estimator.corrects else None)
        ids, _ = self._ops.route_topk(logits, self._rule(later), moe.selection_bias)
        return SpeculateOutput(logits, ids, guess.q)

    def _rule(self, later: int) -> Routing:
        """That of the layer, with as many ids as are foretold of it."""
        moe = self._spec.layers[later].moe
        assert moe is not None
        count = min(moe.num_experts, moe.num_experts_per_tok + self._candidates)
        return replace(routing_rule(moe.num_experts_per_tok, moe.router), top_k=count)


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
