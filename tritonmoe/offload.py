"""The MoE block of a model whose experts live in host memory: fetched into slots, foretold, computed as they arrive.

A decode layer, on the host: read the ids that the router chose (and those foretold for later layers), plan, enqueue the
missing records' copies, run the experts that are there, then the others as their copies are ordered before them. What
is foretold is copied behind what is needed. The host waits for the ids alone, never for a copy.

A prefill layer wants nearly all experts, so they pass through the slots in waves: while one half is computed with, the
other half is filled, and the next layer's first experts follow behind the last wave.

Every row of the output is computed by the same launch form whatever was present, and the weighted sum over a token's
experts runs afterwards in fixed order. So the logits do not depend on the slots, the predictor or the order of copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tritonmoe.copy_engine import CopyEngine, Priority, copy_engine
from tritonmoe.counters import Counters
from tritonmoe.errors import InputError
from tritonmoe.expert_store import ExpertStore
from tritonmoe.moe import Experts, routing_rule
from tritonmoe.operations import Operations
from tritonmoe.policy import Policy
from tritonmoe.predictors import Predictor
from tritonmoe.scheduler import Plan, Scheduler, Wave
from tritonmoe.slot_pool import SlotPool
from tritonmoe.spec import ModelSpec
from tritonmoe.weights import ExpertWeights, ModelWeights
from tritonmoe_kernels import reference
from tritonmoe_kernels.routing import MAX_DECODE_TOKENS, NormRouterOutput, SpeculateOutput


class OffloadedExperts(Experts):
    """Experts in an `ExpertStore`, computed in slots under a `Policy`."""

    def __init__(
        self,
        ops: Operations,
        spec: ModelSpec,
        weights: ModelWeights,
        store: ExpertStore,
        num_slots: int,
        policy: Policy,
        predictor: Predictor,
        default_vectors: torch.Tensor | None = None,
        measure: bool = False,
        make_copies: Callable[[torch.Tensor, Callable[[int, int], object]], CopyEngine] = copy_engine,
    ) -> None:
        super().__init__(ops, spec, weights)
        self.policy = policy
        self._store = store
        self.predictor = predictor
        self._defaults = default_vectors
        self._measure = measure
        self._moe_layers = list(spec.moe_layers)
        self._num_experts = max(moe.num_experts for moe in spec.moe_layers.values())
        self.pool = SlotPool(num_slots, len(spec.layers), self._num_experts, policy.eviction)
        self.counters = Counters(len(spec.layers), store.layout.num_bytes)  # of decode steps
        self.prefill_counters = Counters(len(spec.layers), store.layout.num_bytes)
        self.scheduler = Scheduler(self.pool, self.counters)
        self._make_copies = make_copies
        self._slots, self.copies = self._make_slots(num_slots)
        self._guesses: dict[int, SpeculateOutput] = {}
        self._foretold: dict[int, np.ndarray] = {}  # by layer, what was foretold for it in this step
        self._is_torn = False  # an exception may have left the bookkeeping half done

    is_capturable = False  # the host decides in the middle of every layer

    def begin(self) -> None:
        self.settle()
        self.predictor.begin()
        layers, record_bytes = len(self._spec.layers), self._store.layout.num_bytes
        self.counters, self.prefill_counters = Counters(layers, record_bytes), Counters(layers, record_bytes)
        self.scheduler.counters = self.counters
        self.copies.num_copies = 0

    def report(self) -> list[str]:
        self.counters.wait_s += self.copies.waited_s()
        fetched = self.prefill_counters.moved_records() * self._store.layout.num_bytes
        return [*self.counters.lines(), f"prefill fetched {fetched / 1e6:,.1f} MB"]

    def close(self) -> None:
        """Stop copying, and make the store's memory pageable again."""
        self.copies.close()
        self._store.close()

    def layer(self, layer_id: int, residual: torch.Tensor, delta: torch.Tensor, is_prefill: bool) -> torch.Tensor:
        if self._is_torn:
            self._start_afresh()
        self._is_torn = True  # until the end of the layer: an interrupt comes between any two of its statements
        if layer_id == self._moe_layers[0]:
            self.scheduler.counters = self.prefill_counters if is_prefill else self.counters
        self.copies.pump()
        residual = super().layer(layer_id, residual, delta, is_prefill)
        self._is_torn = False
        return residual

    def settle(self) -> None:
        """Give up what is foretold and wait for what is under way: between generations."""
        if self._is_torn:
            self._start_afresh()
        self._is_torn = True
        self._guesses.clear()
        self._foretold.clear()
        self._cancel(self.scheduler.abandon())
        self.copies.drain()
        self._is_torn = False

    def resize(self, num_slots: int) -> None:
        """Another number of slots, all empty; between generations."""
        self.settle()
        self.copies.close()
        self.scheduler.resize(num_slots)
        moved = self.copies.num_copies
        self._slots, self.copies = self._make_slots(num_slots)
        self.copies.num_copies = moved

    def _start_afresh(self) -> None:
        """Forget every slot: what an exception interrupted cannot be told from what it did not."""
        self.copies.reset()
        self.pool = SlotPool(self.pool.num_slots, len(self._spec.layers), self._num_experts, self.policy.eviction)
        self.scheduler = Scheduler(self.pool, self.counters)
        self.copies.landed = self.pool.landed
        self._guesses.clear()
        self._foretold.clear()
        self._is_torn = False

    def _cancel(self, fetches: list[tuple[int, int]]) -> None:
        """Take back the copies (slot, epoch) that have not started; the others land."""
        for slot, epoch in fetches:
            if self.copies.cancel(slot, epoch):
                self.scheduler.abort(slot, epoch)

    def _make_slots(self, num_slots: int) -> tuple[ExpertWeights, CopyEngine]:
        layout = self._store.layout
        shape = (num_slots, layout.num_elements)
        buffer = torch.empty(shape, dtype=layout.dtype, device=self._weights.embedding.device)
        return layout.views(buffer), self._make_copies(buffer, self.pool.landed)

    def _route(self, layer_id: int, residual: torch.Tensor, delta: torch.Tensor, is_prefill: bool) -> NormRouterOutput:
        guess = self._guesses.pop(layer_id, None)
        is_first = layer_id == self._moe_layers[0]
        if is_first and not is_prefill:
            self.predictor.begin_step()
            self.counters.tokens += len(residual)
        if is_first or is_prefill or self.policy.execute == "routed":
            return self._true_routing(layer_id, residual, delta)
        if guess is None:
            raise InputError(
                f"--execute speculated takes at most {MAX_DECODE_TOKENS} sequences at once; "
                "use fewer, or --execute routed"
            )
        spec, weights = self._moe(layer_id)
        if self.policy.gate == "routed":
            routed = self._true_routing(layer_id, residual, delta)
            ids = guess.ids[:, : spec.num_experts_per_tok].contiguous()
            return routed._replace(topk_ids=ids, topk_weights=self._gate_weights(layer_id, routed.logits, ids))
        if self._measure:
            self._compare(layer_id, guess, self._true_routing(layer_id, residual, delta))
        norm, epsilon = self._weights.layers[layer_id].post_norm, self._spec.norm_epsilon
        residual, x = self._ops.add_rms_norm(residual, delta, norm, epsilon, self._spec.residual_multiplier)
        rule = routing_rule(spec.num_experts_per_tok, spec.router)
        chosen = self._ops.route_topk(guess.logits, rule, weights.selection_bias)
        return NormRouterOutput(residual, x, guess.logits, *chosen)

    def _compare(self, layer_id: int, guess: SpeculateOutput, true: NormRouterOutput) -> None:
        """Count how far what is executed agrees with what the router would have chosen on the same residual."""
        ids, weights = true.topk_ids.cpu().numpy(), true.topk_weights.cpu().numpy()
        self.counters.foretell(layer_id, guess.ids.cpu().numpy(), ids, weights)

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

    def _compute(self, layer_id: int, routed: NormRouterOutput, out: torch.Tensor, is_prefill: bool) -> torch.Tensor:
        guesses = {} if is_prefill else self.predictor.guess(layer_id, routed)
        if self.policy.execute == "speculated":
            self._guesses = dict(guesses)
        ids, weights, foretold = self._to_host(routed, guesses)
        foretold.update({} if is_prefill else self.predictor.known(layer_id))
        if not is_prefill:
            self.predictor.observe(layer_id, ids)
            if self.policy.execute == "routed":  # else what is foretold is what runs
                self._account(layer_id, ids, weights)
        self._foretold.update(foretold)
        wanted = distinct(ids)
        self._cancel(self.scheduler.refute(layer_id, wanted))
        if not is_prefill:
            wanted = self._leave_out(layer_id, ids, weights, wanted, out)
        self._run_waves(layer_id, routed.x, ids, wanted, out, foretold, is_prefill)
        if self.hooks.on_layer is not None:
            self.hooks.on_layer(layer_id, is_prefill, ids, weights, foretold)
        return routed.topk_weights

    def _run_waves(
        self,
        layer_id: int,
        x: torch.Tensor,
        ids: np.ndarray,
        wanted: Sequence[int],
        out: torch.Tensor,
        foretold: dict[int, np.ndarray],
        is_prefill: bool,
    ) -> None:
        """Compute with the wanted experts, in as many waves as the slots need."""
        # In prefill half of the slots at a time, so that the other half is filled meanwhile.
        most = max(1, self.pool.num_slots // 2) if is_prefill else self.pool.num_slots
        plan = self.scheduler.plan(layer_id, wanted, most)
        wave = self._next_wave(layer_id, plan)
        if is_prefill:
            foretold = self._prefill_ahead(layer_id, len(wanted))
        while wave is not None:
            following = self._next_wave(layer_id, plan) if is_prefill else None
            if plan.is_done:
                self._prefetch(foretold)
            self._run_wave(layer_id, x, ids, wave, out)
            self.scheduler.finish(layer_id, wave)
            wave = following if following is not None else self._next_wave(layer_id, plan)
        assert plan.is_done, "no slot could be had for an expert that is needed"
        self.copies.pump()

    def _next_wave(self, layer_id: int, plan: Plan) -> Wave | None:
        """Plan a wave and enqueue the copies it needs."""
        wave = plan.next_wave()
        if wave is not None:
            for expert, slot, epoch in wave.demand:
                self.copies.submit(self._store.record(layer_id, expert), slot, epoch, Priority.DEMAND)
            self.copies.pump()
        return wave

    def _run_wave(self, layer_id: int, x: torch.Tensor, ids: np.ndarray, wave: Wave, out: torch.Tensor) -> None:
        missing = {**wave.late, **{expert: slot for expert, slot, _ in wave.demand}}
        # Before any wait: on a GPU the ids would queue up behind the records.
        ready_ids, missing_ids = self._slot_ids(ids, wave.ready), self._slot_ids(ids, missing)
        if wave.ready:
            self._run_slots(layer_id, x, ready_ids, self._slots, out)
        if missing:
            self.copies.wait(missing.values())
            self._run_slots(layer_id, x, missing_ids, self._slots, out)
        self.copies.release([*wave.ready.values(), *missing.values()])

    def _prefetch(self, foretold: dict[int, np.ndarray]) -> None:
        # What will run anyway is no guess.
        priority = Priority.DEMAND if self.policy.execute == "speculated" else Priority.PREFETCH
        for later in sorted(foretold):
            # Best first: every token's most likely expert, then every token's second.
            for expert, slot, epoch in self.scheduler.prefetch(later, distinct(foretold[later].T)):
                self.copies.submit(self._store.record(later, expert), slot, epoch, priority)
        self.copies.pump()

    def _prefill_ahead(self, layer_id: int, num_wanted: int) -> dict[int, np.ndarray]:
        """The next layer's experts in order, where this one wanted nearly all of its own."""
        later = next((i for i in self._moe_layers if i > layer_id), None)
        if later is None or num_wanted < 0.75 * self._num_experts:
            return {}
        return {later: np.arange(self._num_experts)[None]}

    def _leave_out(
        self, layer_id: int, ids: np.ndarray, weights: np.ndarray, wanted: list[int], out: torch.Tensor
    ) -> list[int]:
        """Drop the missing experts that no token gives more than `miss_tolerance` of its gate mass; fill their rows."""
        tolerance = self.policy.miss_tolerance
        if tolerance <= 0.0:
            return wanted
        share = weights / weights.sum(-1, keepdims=True)
        kept = [
            expert
            for expert in wanted
            if self.pool.lookup(layer_id, expert) >= 0 or share[ids == expert].max() >= tolerance
        ]
        dropped = sorted(set(wanted) - set(kept))
        if dropped:
            is_dropped = np.isin(ids, dropped)
            counters = self.counters.layers[layer_id]
            counters.left_out += int(is_dropped.sum())
            counters.left_out_mass += float(share[is_dropped].sum())
            rows = tuple(torch.from_numpy(index).to(out.device) for index in is_dropped.nonzero())
            if self.policy.miss_fill == "default-vector":
                assert self._defaults is not None, "the policy fills in default vectors and there are none"
                experts = torch.from_numpy(ids[is_dropped].astype(np.int64)).to(out.device)
                out[rows] = self._defaults[layer_id, experts].to(out.dtype)
            else:
                out[rows] = 0.0
        return kept

    def _account(self, layer_id: int, ids: np.ndarray, weights: np.ndarray) -> None:
        """Compare what was foretold for this layer with what it chose."""
        foretold = self._foretold.pop(layer_id, None)
        if foretold is not None:
            self.counters.foretell(layer_id, foretold, ids, weights)

    def _to_host(
        self, routed: NormRouterOutput, guesses: dict[int, SpeculateOutput]
    ) -> tuple[np.ndarray, np.ndarray, dict[int, np.ndarray]]:
        """ids [T, K], weights [T, K] and the foretold ids [T, M] by layer, in one copy."""
        parts = [routed.topk_ids, routed.topk_weights.view(torch.int32), *(guess.ids for guess in guesses.values())]
        packed = torch.cat(parts, dim=1)
        if packed.is_cuda:
            landing = torch.empty(packed.shape, dtype=torch.int32, pin_memory=True)
            landing.copy_(packed, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            while not event.query():
                self.copies.pump()
            packed = landing
        values = packed.numpy()
        sizes = [part.shape[1] for part in parts]
        ids, weights, *foretold = np.split(values, np.cumsum(sizes)[:-1], axis=1)
        return ids, weights.view(np.float32), dict(zip(guesses, foretold, strict=True))

    def _slot_ids(self, ids: np.ndarray, slots: dict[int, int]) -> torch.Tensor:
        """ids [T, K] -> the slot of each, -1 where it is not among `slots`: [T, K] int32 on the device."""
        table = np.full(self._num_experts, -1, dtype=np.int32)
        table[list(slots)] = list(slots.values())
        found = torch.from_numpy(table[ids])
        device = self._weights.embedding.device
        return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


def distinct(ids: np.ndarray) -> list[int]:
    """The different ids in order of their first appearance."""
    return list(dict.fromkeys(ids.ravel().tolist()))
