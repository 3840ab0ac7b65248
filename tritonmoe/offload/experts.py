"""The MoE block of a model whose experts live in host memory: fetched into slots, foretold, computed as they arrive.

Decode steps are planned and fetched on the device where it can do that (`DeviceScheduler`), else on the host.

A decode layer, on the host: read the ids that the router chose (and those foretold for later layers), plan, enqueue the
missing records' copies, run the experts that are there, then the others as their copies are ordered before them. What
is foretold is copied behind what is needed. The host waits for the ids alone, never for a copy. On a GPU all that is
launched between two of the host's decisions is one captured graph (`StepGraph`): a layer costs the host two of them.

A prefill layer wants nearly all experts, so they pass through the slots in waves: while one half is computed with, the
other half is filled, and the next layer's first experts follow behind the last wave.

Every row of the output is computed by the same launch form whatever was present, and the weighted sum over a token's
experts runs afterwards in fixed order. So the logits do not depend on the slots, the predictor or the order of copies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from tritonmoe.errors import InputError, is_out_of_memory
from tritonmoe.model.expert_store import ExpertStore, expert_name, not_arrived
from tritonmoe.model.moe import Experts, routing_rule
from tritonmoe.model.operations import Operations
from tritonmoe.model.spec import ModelSpec
from tritonmoe.model.weights import ModelWeights
from tritonmoe.offload.copy_engine import DEPTH, CopyEngine, Priority, copy_engine
from tritonmoe.offload.counters import Counters
from tritonmoe.offload.device_scheduler import GUARD_STEPS, DeviceScheduler, RoutingTables, device_addresses
from tritonmoe.offload.policy import Policy, holds_a_step, minimum_slots, should_host_plan
from tritonmoe.offload.prefetch_guard import PrefetchGuard
from tritonmoe.offload.scheduler import Plan, Scheduler, Wave
from tritonmoe.offload.slot_pool import SlotPool
from tritonmoe.prediction.predictors import Predictor
from tritonmoe.waiting import STEP_TIMEOUT_S, await_until
from tritonmoe_kernels.routing import MAX_DECODE_TOKENS, NormRouterOutput, SpeculateOutput

logger = logging.getLogger(__name__)

NOTHING = Wave({}, {}, [])
SCAN_DEPTH = 12  # copies under way ahead of a scan, which wants them anyway while the host is busy with launches
SCAN_SHARE = 0.75  # of a layer's experts: a prefill step that wants so many will want as many of the next layer
# Of launches for missing experts: few to start where nothing may be missing, and enough where everything is. gate_up
# beside a fetch has fewer (EARLY_WARPS), so that it is for down to choose.
LATE_PROGRAMS, MANY_LATE_PROGRAMS = 528, 2112


class Block(NamedTuple):
    """What a layer computes: the experts `topk_ids` [T, K] of x [T, H], into out [T, K, H]."""

    layer_id: int
    x: torch.Tensor
    topk_ids: torch.Tensor
    out: torch.Tensor


class Guess(NamedTuple):
    """What a layer will run of what was foretold for it: ids [T, K] int32, gate weights [T, K] float32."""

    foretold: SpeculateOutput
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor | None  # None where the layer's own router gives them


class Turn:
    """A decode layer's exchange between device and host, and what the host made of it.

    Where the step is captured this is made once: the tensors stay, the graphs copy into and out of them.
    """

    def __init__(
        self,
        layer_id: int,
        routed: NormRouterOutput,
        guesses: dict[int, SpeculateOutput],
        out: torch.Tensor,
    ) -> None:
        """`guesses` by later layer; `out` [T, K, H] is where the experts' outputs go."""
        self.block = Block(layer_id, routed.x, routed.topk_ids, out)
        self.layer_id, self.x, self.out = layer_id, routed.x, out
        self.later = list(guesses)
        parts = [routed.topk_ids, routed.topk_weights.view(torch.int32), *(guess.ids for guess in guesses.values())]
        ends = np.cumsum([part.shape[1] for part in parts]).tolist()
        self._columns = [slice(end - part.shape[1], end) for end, part in zip(ends, parts, strict=True)]
        packed = torch.cat(parts, dim=1)
        is_cuda = packed.is_cuda
        self._landing = torch.empty(packed.shape, dtype=torch.int32, pin_memory=True) if is_cuda else packed
        if is_cuda:
            self._landing.copy_(packed, non_blocking=True)
        # Of the slots that are ready and of those that are awaited, [T, K] each, -1 elsewhere.
        shape = (2, *routed.topk_ids.shape)
        self._slot_ids = torch.empty(shape, dtype=torch.int32, pin_memory=is_cuda)
        self._device_slot_ids = torch.empty(shape, dtype=torch.int32, device=packed.device)
        self._host_slot_ids: np.ndarray = self._slot_ids.numpy()
        # What the host reads and decides:
        self.ids: np.ndarray = np.empty((0, 0), dtype=np.int32)
        self.weights: np.ndarray = np.empty((0, 0), dtype=np.float32)
        self.foretold: dict[int, np.ndarray] = {}
        self.wave = NOTHING
        self.missing: dict[int, int] = {}  # of the wave, expert -> slot

    def read(self) -> None:
        """Take the ids and weights [T, K], and the foretold ids [T, M] by later layer, that the device has written."""
        landed = self._landing.numpy().copy()
        self.ids, weights, *foretold = (landed[:, columns] for columns in self._columns)
        self.weights = weights.view(np.float32)
        self.foretold = dict(zip(self.later, foretold, strict=True))

    def assign(self, wave: Wave, num_experts: int) -> None:
        """What to compute with once `send` has run on the device."""
        self.wave, self.missing = wave, wave.missing
        self._host_slot_ids[0] = slot_table(wave.ready, num_experts)[self.ids]
        self._host_slot_ids[1] = slot_table(self.missing, num_experts)[self.ids]

    def send(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The assigned slots on the device, those that are ready and those that are awaited: [T, K] int32 each."""
        self._device_slot_ids.copy_(self._slot_ids, non_blocking=True)
        return self._device_slot_ids[0], self._device_slot_ids[1]


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
        plan_on_device: bool | None = None,
        tables: RoutingTables | None = None,
    ) -> None:
        """`plan_on_device`: whether decode steps plan and fetch without the host; by default on a GPU that can read the
        store, unless so few slots make the host faster. `tables` replaces what they route and foretell."""
        super().__init__(ops, spec, weights)
        self.policy = policy
        self._store = store
        self.predictor = predictor
        self._defaults = default_vectors
        self._measure = measure
        self._moe_layers = list(spec.moe_layers)
        self._num_experts = max(moe.num_experts for moe in spec.moe_layers.values())
        self._exists = np.zeros((len(spec.layers), self._num_experts), dtype=bool)
        for layer_id, moe in spec.moe_layers.items():
            self._exists[layer_id, : moe.num_experts] = True
        self.pool = SlotPool(num_slots, len(spec.layers), self._num_experts, policy.eviction)
        self.counters = Counters(len(spec.layers), store.layout.num_bytes)  # of decode steps
        self.prefill_counters = Counters(len(spec.layers), store.layout.num_bytes)
        self.scheduler = Scheduler(self.pool, self.counters)
        self._make_copies = make_copies
        self._resizes = 0
        self._make_slots(num_slots)
        self._guesses: dict[int, Guess] = {}  # by layer, what will run there
        is_cuda, shape = weights.embedding.is_cuda, (len(spec.layers), self._num_experts)
        self._mapped = torch.zeros(shape, dtype=torch.bool, pin_memory=is_cuda)  # for `cache_bias`
        self._foretold: dict[int, np.ndarray] = {}  # by layer, what was foretold for it in this step
        self._device: DeviceScheduler | None = None  # that holds the slots now; else the pool does
        self._devices: dict[int, DeviceScheduler] = {}  # by batch size
        self._least: dict[int, int] = {}  # slots, by batch size
        self._told: set[str] = set()  # why the host plans, printed once
        self._guard: PrefetchGuard | None = None  # of steps that the host plans
        self._guard_line: str | None = None  # of the device's last steps
        self._steps = 0
        self._plan_on_device = plan_on_device
        self._tables = tables
        self._turn: Turn | None = None  # whose computation is enqueued and whose slots are still held
        self._is_torn = False  # an exception may have left the bookkeeping half done
        self.is_capturable = not measure
        self._is_closed = False

    @property
    def needs_host(self) -> bool:
        return self._device is None

    @property
    def layout(self) -> object:
        return self._resizes, None if self._device is None else id(self._device)

    def begin(self) -> None:
        self.settle()
        self.predictor.begin()
        layers, record_bytes = len(self._spec.layers), self._store.layout.num_bytes
        self.copies.waited_s()  # of the last generation
        self.counters, self.prefill_counters = Counters(layers, record_bytes), Counters(layers, record_bytes)
        self.scheduler.counters = self.counters
        self.copies.num_copies = 0
        nothing = np.zeros(layers, dtype=np.int64)
        self._guard = PrefetchGuard(record_bytes, nothing, nothing) if self.policy.guards_prefetch else None
        self._guard_line = None

    def begin_decode(self, batch: int) -> None:
        """Hand the slots to the device's scheduler for the decode steps that follow, where it can do them."""
        self.settle()
        device = self._device_scheduler(batch)
        if device is not None:
            device.load(self.pool)
            self._device = device

    def begin_step(self, batch: int) -> None:
        device = self._device
        self._note_mapped(self._moe_layers[0])
        if device is not None and device.batch == batch and not self._is_torn:
            return
        # Somebody else has used the slots, or a step of the device's was interrupted: what it did not fetch is lost.
        if device is not None or self._device_scheduler(batch) is not None:
            self.begin_decode(batch)

    def abandon_step(self) -> None:
        self._is_torn = True
        if self._device is not None:
            self._device.abandon()

    def step_launched(self) -> None:
        if self._device is not None:
            self._device.step_launched()

    def _device_scheduler(self, batch: int) -> DeviceScheduler | None:
        may_plan = self._weights.embedding.is_cuda if self._plan_on_device is None else self._plan_on_device
        if not may_plan or not self.is_capturable or self.hooks.on_layer is not None:
            return None
        least = self._least.get(batch) or self._least.setdefault(batch, minimum_slots(self._spec, self.policy, batch))
        if batch > MAX_DECODE_TOKENS:
            return self._host_plans(f"{batch} sequences at once are more than {MAX_DECODE_TOKENS}")
        if self.pool.num_slots < least:
            return self._host_plans(f"{batch} sequence(s) at once need {least} slots, not {self.pool.num_slots}")
        if self.policy.predictor == "oracle":
            return self._host_plans("it knows the oracle's answers")
        if self._plan_on_device is None and should_host_plan(
            self._spec, self.policy, self.pool.num_slots, self._store.layout.num_bytes, batch
        ):
            return None
        if batch not in self._devices:
            addresses = device_addresses(self._store, self._buffer.device)
            if isinstance(addresses, str):
                return self._host_plans(addresses)
            self._devices[batch] = DeviceScheduler(
                self._ops, self._spec, self._store, self._buffer, addresses, self.policy, batch, self._tables
            )
        return self._devices[batch]

    def _host_plans(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            logger.warning("the host plans decode steps, which is slower: %s", why)

    def _take_back(self) -> None:
        """Have the pool hold the slots again; of a step that was interrupted halfway nobody knows what they hold."""
        device, was_torn = self._device, self._is_torn
        if device is None:
            return
        self._is_torn = True  # until the pool is true of the slots
        self._device = None
        device.collect(self.counters)
        self._guard_line = device.guard_line()
        if was_torn:
            device.settle()
        else:
            device.store(self.pool)
            self._is_torn = False

    def report(self) -> list[str]:
        if self._device is not None:
            self._device.collect(self.counters)
            self._guard_line = self._device.guard_line()
        self._add_waits(self.scheduler.counters)
        fetched = self.prefill_counters.moved_records() * self._store.layout.num_bytes
        lines = [*self.counters.lines(), f"prefill fetched {fetched / 1e6:,.1f} MB"]
        guarded = self._guard_line or (None if self._guard is None else self._guard.line())
        return lines if guarded is None else [*lines, guarded]

    def waited_s(self) -> float:
        """Exposed transfer time since `begin`, where the host knows it."""
        self._add_waits(self.scheduler.counters)
        return (self.counters.wait_s or 0.0) + (self.prefill_counters.wait_s or 0.0)

    def _add_waits(self, counters: Counters) -> None:
        waited = self.copies.waited_s()
        if counters.wait_s is not None:
            counters.wait_s += waited

    def close(self) -> None:
        """Stop copying, and make the store's memory pageable again."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._device is not None:  # whose fetches are under way on a branch of their own
                self._device.settle()
            self.copies.close()
        finally:
            self._store.close()

    def layer(self, layer_id: int, residual: torch.Tensor, delta: torch.Tensor, is_prefill: bool) -> torch.Tensor:
        if is_prefill and self._device is not None:
            self._take_back()
        if self._device is not None:
            self._is_torn = True  # what was planned and not fetched would be awaited for ever
            residual = super().layer(layer_id, residual, delta, is_prefill)
            self._is_torn = layer_id < self._moe_layers[-1]  # or what the next layer awaits would never be there
            return residual
        if self.step_graph is not None:
            return super().layer(layer_id, residual, delta, is_prefill)
        self._enter(layer_id, is_prefill)
        self._note_mapped(layer_id)
        self.copies.pump()
        residual = super().layer(layer_id, residual, delta, is_prefill)
        self._is_torn = False
        return residual

    def _enter(self, layer_id: int, is_prefill: bool) -> None:
        """Begin to change the bookkeeping; until it is whole again an interrupt leaves it torn."""
        if self._is_torn:
            self._start_afresh()
        self._is_torn = True
        self.copies.depth = SCAN_DEPTH if is_prefill else DEPTH
        counters = self.prefill_counters if is_prefill else self.counters
        if layer_id == self._moe_layers[0] and self.scheduler.counters is not counters:
            self._add_waits(self.scheduler.counters)
            self.scheduler.counters = counters

    def beside(
        self,
        num_slots: int,
        policy: Policy,
        predictor: Predictor,
        make_copies: Callable[[torch.Tensor, Callable[[int, int], object]], CopyEngine],
    ) -> OffloadedExperts:
        """The same experts in slots of their own, planned on the host."""
        return OffloadedExperts(
            self._ops, self._spec, self._weights, self._store, num_slots, policy, predictor, self._defaults,
            make_copies=make_copies, plan_on_device=False,
        )  # fmt: skip

    def differing_slot(self, layer_id: int, experts: Iterable[int]) -> tuple[int, int, int] | None:
        """The first of these experts whose slot does not hold its record: expert, slot, first byte that differs.

        Experts that are in no slot (any more) are passed over. For between two steps; waits for the device.
        """
        slots = self.pool.resident(layer_id) if self._device is None else self._device.resident(layer_id)
        for expert in experts:
            slot = int(slots[expert])
            if slot >= 0:
                held = self._buffer[slot].view(torch.uint8)
                record = self._store.record(layer_id, expert).view(torch.uint8).to(held.device)
                if not torch.equal(held, record):
                    return expert, slot, int((held != record).nonzero()[0])
        return None

    def settle(self) -> None:
        """Give up what is foretold and wait for what is under way: between generations."""
        self._take_back()
        if self._is_torn:
            self._start_afresh()
        self._is_torn = True
        self._guesses.clear()
        self._foretold.clear()
        self._cancel(self.scheduler.abandon())
        self.copies.drain()
        self._is_torn = False

    def resize(self, num_slots: int) -> None:
        """Another number of slots, all empty; between generations.

        Where memory does not hold them there are as many as before, or else half of that and so on, and a line says so.
        """
        self.settle()
        self._is_torn = True  # until there are as many slots as the pool says
        former = self.pool.num_slots
        self._free_slots()
        self._take_slots(num_slots, former)
        self._is_torn = False

    def _free_slots(self) -> None:
        """Before others are allocated; what relies on them goes, too."""
        self._resizes += 1
        self.copies.close()
        self._devices.clear()
        self._make_slots(0)

    def _take_slots(self, wanted: int, former: int) -> None:
        for size in (wanted, *(former >> halved for halved in range(former.bit_length()))):
            self.scheduler.resize(size)
            try:
                self._make_slots(size)
            except (RuntimeError, MemoryError) as problem:
                if not is_out_of_memory(problem):
                    raise
                continue
            if size != wanted:
                logger.warning("out of memory: %d expert slots could not be had; there are %d", wanted, size)
            return
        self.scheduler.resize(former)  # what is tried first when there is memory again
        raise InputError("out of memory: not one expert slot could be had; free some of the device's and try again")

    def _start_afresh(self) -> None:
        """Forget every slot: what an exception interrupted cannot be told from what it did not."""
        self.copies.reset()
        if len(self._buffer) != self.pool.num_slots:  # it was a resize
            self._free_slots()
            self._take_slots(self.pool.num_slots, self.pool.num_slots)
        self.pool = SlotPool(self.pool.num_slots, len(self._spec.layers), self._num_experts, self.policy.eviction)
        self.scheduler = Scheduler(self.pool, self.counters)
        self.copies.landed, self.copies.name = self.pool.landed, partial(owner_name, self.pool)
        self._guesses.clear()
        self._foretold.clear()
        self._turn = None
        self._is_torn = False

    def _cancel(self, fetches: list[tuple[int, int]]) -> None:
        """Take back the copies (slot, epoch) that have not started; the others land."""
        for slot, epoch in fetches:
            if self.copies.cancel(slot, epoch):
                self.scheduler.abort(slot, epoch)

    def _make_slots(self, num_slots: int) -> None:
        layout, device = self._store.layout, self._weights.embedding.device
        buffer = torch.empty((num_slots, layout.num_bytes), dtype=torch.uint8, device=device)
        copies = self._make_copies(buffer, self.pool.landed)
        copies.name = partial(owner_name, self.pool)
        copies.num_copies = self.copies.num_copies if self._resizes else 0
        self._buffer, self._slots, self.copies = buffer, layout.views(buffer), copies

    def outstanding(self) -> str:
        """What has not arrived yet, for whoever waited for too long."""
        found = self.copies.under_way() if self._device is None else self._device.outstanding()
        return not_arrived(found)

    def _route(self, layer_id: int, residual: torch.Tensor, delta: torch.Tensor, is_prefill: bool) -> NormRouterOutput:
        guess = self._guesses.pop(layer_id, None)
        is_first = layer_id == self._moe_layers[0]
        if self._device is not None and not is_prefill:
            self._device.join()  # what follows reads what was planned, and guessed, beside the last layer
        is_true = self.policy.execute == "routed" or (is_prefill and not self.policy.is_router_free)
        if is_first or is_true:
            routed = self._true_routing(layer_id, residual, delta)
            return self._prefer_mapped(layer_id, routed) if self.policy.cache_bias and not is_prefill else routed
        if guess is None:
            raise InputError(
                f"--execute speculated takes at most {MAX_DECODE_TOKENS} sequences at once; "
                "use fewer, or --execute routed"
            )
        if guess.topk_weights is None:
            routed = self._true_routing(layer_id, residual, delta)
            if self._measure and not is_prefill:
                self._compare(layer_id, guess.foretold, routed)
            weights = self._gate_weights(layer_id, routed.logits, guess.topk_ids)
            return routed._replace(topk_ids=guess.topk_ids, topk_weights=weights)
        if self._measure and not is_prefill:
            self._compare(layer_id, guess.foretold, self._true_routing(layer_id, residual, delta))
        norm, epsilon = self._weights.layers[layer_id].post_norm, self._spec.norm_epsilon
        residual, x = self._ops.add_rms_norm(residual, delta, norm, epsilon, self._spec.residual_multiplier)
        return NormRouterOutput(residual, x, guess.foretold.logits, guess.topk_ids, guess.topk_weights)

    def _foretell(self, layer_id: int, routed: NormRouterOutput) -> dict[int, SpeculateOutput]:
        """What the predictor knows on the device, by later layer, the next one first."""
        if len(routed.x) > MAX_DECODE_TOKENS:  # a step of so many tokens wants nearly every expert anyway
            return {}
        return {later: self.predictor.guess(layer_id, later, routed) for later in self.predictor.later(layer_id)}

    def _choose(self, guesses: dict[int, SpeculateOutput]) -> None:
        """Where guesses are executed, choose by that of the next layer what will run there: beside this layer, not on
        the way of the next."""
        if self.policy.execute != "speculated":
            return
        self._guesses.clear()
        for later, guess in list(guesses.items())[:1]:
            spec, weights = self._moe(later)
            if self.policy.gate == "routed":
                self._guesses[later] = Guess(guess, guess.ids[:, : spec.num_experts_per_tok].contiguous(), None)
            else:
                rule = routing_rule(spec.num_experts_per_tok, spec.router)
                chosen = self._ops.route_topk(guess.logits, rule, weights.selection_bias)
                self._guesses[later] = Guess(guess, *chosen)

    def _prefer_mapped(self, layer_id: int, routed: NormRouterOutput) -> NormRouterOutput:
        """The choice made anew, with a bonus for experts that have a slot, or are on their way to one."""
        spec, weights = self._moe(layer_id)
        if self._device is None:
            mapped = self._mapped[layer_id].to(routed.logits.device, non_blocking=True)
        else:
            mapped = self._device.state.slot_of[layer_id] >= 0
        logits = routed.logits + self.policy.cache_bias * mapped[: spec.num_experts]
        ids, _ = self._ops.route_topk(
            logits, routing_rule(spec.num_experts_per_tok, spec.router), weights.selection_bias
        )
        return routed._replace(topk_ids=ids, topk_weights=self._gate_weights(layer_id, routed.logits, ids))

    def _note_mapped(self, layer_id: int) -> None:
        """Which experts have a slot, for the next routing of the layer that the host plans."""
        if self.policy.cache_bias:
            self._mapped[layer_id] = torch.from_numpy(self.pool.slot_of[layer_id] >= 0)

    def _compare(self, layer_id: int, guess: SpeculateOutput, true: NormRouterOutput) -> None:
        """Count how far what is executed agrees with what the router would have chosen on the same residual."""
        ids, weights = true.topk_ids.cpu().numpy(), true.topk_weights.cpu().numpy()
        self.counters.foretell(layer_id, guess.ids.cpu().numpy(), ids, weights)

    def _compute(self, layer_id: int, routed: NormRouterOutput, out: torch.Tensor, is_prefill: bool) -> torch.Tensor:
        if is_prefill:
            self._prefill(Block(layer_id, routed.x, routed.topk_ids, out))
            if self.hooks.on_layer is not None:
                ids, weights = routed.topk_ids.cpu().numpy(), routed.topk_weights.cpu().numpy()
                self.hooks.on_layer(layer_id, True, ids, weights, {})
            if self.policy.is_router_free:
                self._choose(self.predictor.guess_prompt(layer_id, routed))
            return routed.topk_weights
        if self._device is not None:
            self._compute_on_device(self._device, layer_id, routed, out)
            return routed.topk_weights
        guesses = self._foretell(layer_id, routed)
        self._choose(guesses)
        turn = Turn(layer_id, routed, guesses, out)
        graph = self.step_graph
        if graph is None:
            self._decide(turn)
            self._prefetch(turn.foretold)  # on a CPU the computation leaves no other time for it
            ready, missing = turn.send()
            if turn.wave.ready:
                self._run_slots(layer_id, turn.x, ready, self._slots, out)
            self._await(turn)
            if turn.missing:
                self._run_slots(layer_id, turn.x, missing, self._slots, out)
            self._finish(turn)
            self.copies.pump()
        else:
            graph.pause(lambda: self._replay_decide(turn))
            ready, missing = turn.send()
            self._run_slots(layer_id, turn.x, ready, self._slots, out)
            graph.pause(lambda: self._await(turn))
            self._run_slots(layer_id, turn.x, missing, self._slots, out)
            if layer_id == self._moe_layers[-1]:
                graph.at_end(self._finish_last)
        return routed.topk_weights

    def _compute_on_device(
        self, device: DeviceScheduler, layer_id: int, routed: NormRouterOutput, out: torch.Tensor
    ) -> None:
        guesses: dict[int, SpeculateOutput] = {}
        for i, later in enumerate(self.predictor.later(layer_id)):
            with device.beside(routed, i):
                guesses[later] = self.predictor.guess(layer_id, later, routed)
        if self.policy.miss_tolerance > 0.0:
            self._fill(layer_id, routed.topk_ids, out)
        ids = device.plan(layer_id, routed)
        self._run_slots(layer_id, routed.x, ids.hits, self._slots, out)
        if self.policy.predictor != "none":
            device.look_ahead(layer_id, routed, {later: guess.ids for later, guess in guesses.items()})
            with device.behind_guesses():  # not before: no fetch waits for it
                self._choose(guesses)
        programs = LATE_PROGRAMS if holds_a_step(self._spec, self.pool.num_slots) else MANY_LATE_PROGRAMS
        with device.behind_copies(layer_id) as ready:
            self._run_slots(layer_id, routed.x, ids.misses, self._slots, out, programs, ready)
        if layer_id == self._moe_layers[-1]:
            device.end()

    def _fill(self, layer_id: int, topk_ids: torch.Tensor, out: torch.Tensor) -> None:
        """What stands for experts that are left out, before the others are written."""
        if self.policy.miss_fill == "default-vector":
            assert self._defaults is not None, "the policy fills in default vectors and there are none"
            out.copy_(self._defaults[layer_id][topk_ids.long()])
        else:
            out.zero_()

    def _replay_decide(self, turn: Turn) -> None:
        """`_decide` between two captured pieces, of which the one before also finished the last layer."""
        self._finish_last()
        self._enter(turn.layer_id, is_prefill=False)
        self._decide(turn)

    def _finish_last(self) -> None:
        """Finish the layer whose last captured piece has been launched."""
        turn = self._turn
        if turn is not None:
            self._finish(turn)
            self._prefetch(turn.foretold)
            self._is_torn = False

    def _decide(self, turn: Turn) -> None:
        """Read what was routed and foretold, and begin to fetch what the layer lacks."""
        layer_id = turn.layer_id
        self._await_device()
        turn.read()
        ids, weights = turn.ids, turn.weights
        if layer_id == self._moe_layers[0]:
            self.predictor.begin_step()
            self.counters.tokens += len(ids)
            self._judge_prefetching()
        known = self.predictor.known(layer_id)  # of a step of as many sequences: a batch may come between a stream's
        turn.foretold.update({later: guessed for later, guessed in known.items() if len(guessed) == len(ids)})
        self.predictor.observe(layer_id, ids)
        if self.policy.execute == "routed":  # else what is foretold is what runs
            self._account(layer_id, ids, weights)
        self._foretold.update(turn.foretold)
        wanted = distinct(ids)
        self._cancel(self.scheduler.refute(layer_id, wanted))
        wanted = self._leave_out(layer_id, ids, weights, wanted, turn.out)
        plan = self.scheduler.plan(layer_id, wanted)
        wave = self._next_wave(layer_id, plan)
        while wave is not None and not plan.is_done:  # the slots do not hold all at once
            self._run_wave(turn.block, wave)
            wave = self._next_wave(layer_id, plan)
        assert plan.is_done, "no slot could be had for an expert that is needed"
        turn.assign(NOTHING if wave is None else wave, self._num_experts)

    def _judge_prefetching(self) -> None:
        """Now and then, by what was counted of steps that the host plans."""
        self._steps += 1
        if self._guard is not None and self._steps % GUARD_STEPS == 0:
            layers, record_bytes = self.counters.layers, self._store.layout.num_bytes
            used, wasted = (
                np.array([getattr(layer, name) for layer in layers], dtype=np.int64) * record_bytes
                for name in ("prefetched_used", "prefetched_wasted")
            )
            self._guard.look(used, wasted)

    def _await_device(self) -> None:
        """Until everything launched so far has run; meanwhile copies go on."""
        if self._weights.embedding.is_cuda:
            event = torch.cuda.Event()
            event.record()
            what = "what was launched on the device"
            await_until(event.query, what, STEP_TIMEOUT_S, self.copies.pump, self.outstanding)

    def _await(self, turn: Turn) -> None:
        """Order what is launched next behind the copies that the layer waits for."""
        if turn.missing:
            self.copies.wait(turn.missing.values())
        later = self._moe_layers.index(turn.layer_id) + 1
        if later < len(self._moe_layers):
            self._note_mapped(self._moe_layers[later])
        self._turn = turn

    def _finish(self, turn: Turn) -> None:
        """The layer's computation is launched."""
        self._turn = None
        if turn.wave is not NOTHING:
            self._release(turn.layer_id, turn.wave)
        if self.hooks.on_layer is not None:
            self.hooks.on_layer(turn.layer_id, False, turn.ids, turn.weights, turn.foretold)

    def _release(self, layer_id: int, wave: Wave) -> None:
        """The wave's slots may be filled again, behind what has been launched."""
        self.copies.release(wave.slots)
        self.scheduler.finish(layer_id, wave)

    def _prefill(self, block: Block) -> None:
        """Compute with the wanted experts, in as many waves as the slots need, half of them being filled meanwhile."""
        layer_id = block.layer_id
        wanted = self._wanted(block.topk_ids)
        self._cancel(self.scheduler.refute(layer_id, wanted))
        is_scan = len(wanted) >= SCAN_SHARE * self._num_experts
        plan = self.scheduler.plan(layer_id, wanted, max(1, self.pool.num_slots // 2), is_scan)
        wave = self._next_wave(layer_id, plan)
        foretold = self._prefill_ahead(layer_id) if is_scan else {}
        while wave is not None:
            following = self._next_wave(layer_id, plan)
            if plan.is_done:
                self._prefetch(foretold)
            self._run_wave(block, wave)
            wave = following if following is not None else self._next_wave(layer_id, plan)
        assert plan.is_done, "no slot could be had for an expert that is needed"
        self.copies.pump()

    def _wanted(self, topk_ids: torch.Tensor) -> list[int]:
        """The different ids in order; they are marked on the device, for a prompt has tens of thousands."""
        marks = torch.zeros(self._num_experts, dtype=torch.uint8, device=topk_ids.device)
        marks.index_fill_(0, topk_ids.flatten().long(), 1)
        if marks.is_cuda:
            landing = torch.empty(marks.shape, dtype=marks.dtype, pin_memory=True)
            marks = landing.copy_(marks, non_blocking=True)
            self._await_device()
        return np.flatnonzero(marks.numpy()).tolist()

    def _next_wave(self, layer_id: int, plan: Plan) -> Wave | None:
        """Plan a wave and enqueue the copies it needs."""
        wave = plan.next_wave()
        if wave is not None:
            for expert, slot, epoch in wave.demand:
                self.copies.submit(self._store.record(layer_id, expert), slot, epoch, Priority.DEMAND)
            self.copies.pump()
        return wave

    def _run_wave(self, block: Block, wave: Wave) -> None:
        """Compute with a wave now, and finish it."""
        missing = wave.missing
        # Before any wait: on a GPU the tables would queue up behind the records.
        ready_ids, missing_ids = (self._slot_ids(block.topk_ids, slots) for slots in (wave.ready, missing))
        if ready_ids is not None:
            self._run_slots(block.layer_id, block.x, ready_ids, self._slots, block.out)
        if missing_ids is not None:
            self.copies.wait(missing.values())
            self._run_slots(block.layer_id, block.x, missing_ids, self._slots, block.out)
        self._release(block.layer_id, wave)

    def _slot_ids(self, topk_ids: torch.Tensor, slots: dict[int, int]) -> torch.Tensor | None:
        """The slot of each id, -1 where it is not among `slots`: [T, K] int32 on the device; None where none is."""
        if not slots:
            return None
        table = torch.from_numpy(slot_table(slots, self._num_experts))
        if topk_ids.is_cuda:
            table = table.pin_memory().to(topk_ids.device, non_blocking=True)
        return table.index_select(0, topk_ids.flatten()).view(topk_ids.shape)

    def _prefetch(self, foretold: dict[int, np.ndarray]) -> None:
        # What will run anyway is no guess: that of the next layer.
        runs_next = self.policy.execute == "speculated"
        guard = self._guard
        for i, later in enumerate(sorted(foretold)):
            priority = Priority.DEMAND if runs_next and i == 0 else Priority.PREFETCH
            if guard is not None and guard.is_off[later]:
                continue
            # Best first: every token's most likely expert, then every token's second.
            for expert, slot, epoch in self.scheduler.prefetch(later, distinct(foretold[later].T)):
                self.copies.submit(self._store.record(later, expert), slot, epoch, priority)
        self.copies.pump()

    def _prefill_ahead(self, layer_id: int) -> dict[int, np.ndarray]:
        """All experts, in order, of the next layer that lacks any: layers that lack none leave the link idle."""
        lacks = np.any((self.pool.slot_of < 0) & self._exists, axis=1)
        later = next((i for i in self._moe_layers if i > layer_id and lacks[i]), None)
        return {} if later is None else {later: np.flatnonzero(self._exists[later])[None]}

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


def owner_name(pool: SlotPool, slot: int) -> str:
    """What the pool has put into a slot, for messages."""
    key = int(pool.key_of[slot]) if slot < pool.num_slots else -1
    return f"slot {slot}" if key < 0 else expert_name(*divmod(key, pool.num_experts))


def slot_table(slots: dict[int, int], num_experts: int) -> np.ndarray:
    """[E] int32: the slot of each expert, -1 of those without."""
    table = np.full(num_experts, -1, dtype=np.int32)
    table[list(slots)] = list(slots.values())
    return table


def distinct(ids: np.ndarray) -> list[int]:
    """The different ids in order of their first appearance."""
    return list(dict.fromkeys(ids.ravel().tolist()))
