"""The device decides which experts a decode step fetches, and fetches them: nothing of a step needs the host.

Five branches of one captured step, T tokens; behind what is in brackets:

    main      router(l) -> plan_demand(l) -> experts that are there -> [late(l), side] -> combine -> …
    side      [router(l)] -> guess for l + 1 -> [plan_demand(l)] -> plan_prefetch
    demand    [plan_demand(l)] -> what is missing and not on its way
    prefetch  [plan_prefetch] -> what is foretold for l + 1
    late      [demand(l), prefetches for l] -> experts that were missing

A branch begins anew in each layer, behind nothing else: behind one launch the next one surely begins before that has
ended, behind several maybe before one of them has (tools/probe_edges.py). Nothing relies on which. Guesses, demand and
prefetches come behind one launch each. late(l) begins before its prefetch has ended (one of them, where it has
several), or where nothing is prefetched its demand: its gate_up runs while the last record's down is copied. A prefetch
is there before its list, waits for that, then lets the layer's demand and the prefetch before it ask for their last
bytes.

Where more layers are foretold, each further one is guessed on one more branch of its own, and planned on the side
branch behind the plan before it. So whatever comes behind the side branch comes behind every guess.

Where nothing is missing, the launches of demand and late have nothing to do and end beside the experts that are there:
of all this only the plan is on the way of the step.

router(l + 1) comes after the side branch of layer l: whatever reads or changes the planner's state is one chain. What
plan_demand(l) gives away is in nobody's use, for main has computed layer l - 1, and nobody writes to it: late(l - 1),
which main has joined, came behind every fetch for that layer, those of cancelled copies included. The plan is on the
main branch although experts that are there could begin without it: beside them it would take three times as long to see
what is missing (docs/log.md).

The two copies of the pool's state, the host's `SlotPool` and this one, take turns: `load` before a generation's decode
steps, `store` before anything else uses the slots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tritonmoe.errors import TransferError
from tritonmoe.model.expert_store import ExpertStore, expert_name, not_arrived
from tritonmoe.model.operations import Operations
from tritonmoe.model.pinned_memory import device_address
from tritonmoe.model.spec import ModelSpec
from tritonmoe.offload.branch import done_so_far, make_branch
from tritonmoe.offload.counters import Counters
from tritonmoe.offload.policy import TRAINED_PREDICTORS, Policy
from tritonmoe.offload.prefetch_guard import PrefetchGuard
from tritonmoe.offload.slot_pool import SlotPool
from tritonmoe.waiting import STEP_TIMEOUT_S, await_until
from tritonmoe_kernels.planner_state import FREE, HALF_LIFE, MASS_UNIT, NO_LIMIT, Counter, Header, PlannerState
from tritonmoe_kernels.routing import NormRouterOutput

SOON = -1  # the priority of what others wait for, before main and what comes late, which have many programs
GUARD_STEPS = 32  # between two looks of the guard
COUNTED_ALIKE = (  # by `LayerCounters`
    Counter.ROUTED, Counter.HITS, Counter.LATE, Counter.DEMAND, Counter.PREFETCHED, Counter.PREFETCHED_USED,
    Counter.PREFETCHED_WASTED, Counter.CANCELLED, Counter.LEFT_OUT,
)  # fmt: skip
GLIMPSE_S = 5.0  # for a few kilobytes from a device that may be stuck


class RoutingTables(NamedTuple):
    """Ids that take the place of what routers say, step by step; for measurements. int32, ids from 0 to E - 1."""

    routed: torch.Tensor  # [steps, layers, T, K]
    foretold: Sequence[torch.Tensor]  # for the next layer, for that after it …: [steps, layers, T, M] each


class SlotIds(NamedTuple):
    """The slots of a layer's routed experts, [T, K] int32 each, -1 elsewhere."""

    hits: torch.Tensor
    misses: torch.Tensor


class DeviceScheduler:
    """Plans and fetches for batches of one size."""

    def __init__(
        self,
        ops: Operations,
        spec: ModelSpec,
        store: ExpertStore,
        buffer: torch.Tensor,
        addresses: dict[int, int],
        policy: Policy,
        batch: int,
        tables: RoutingTables | None = None,
    ) -> None:
        """`buffer` [S, N] are the slots; `addresses` says where a layer's records begin for the device."""
        if tables is not None and policy.predictor != "none" and len(tables.foretold) < policy.lookahead:
            raise ValueError(f"tables foretell {len(tables.foretold)} layers ahead, the policy {policy.lookahead}")
        self._ops, self._buffer, self._policy, self._tables = ops, buffer, policy, tables
        self._num_experts = max(moe.num_experts for moe in spec.moe_layers.values())
        self._record_bytes, self._first_bytes = store.layout.num_bytes, store.layout.first_bytes
        self._top_k = max(moe.num_experts_per_tok for moe in spec.moe_layers.values())
        self.batch, self._moe_layers = batch, list(spec.moe_layers)
        most = 0 if policy.predictor == "none" else min(self._num_experts, self._top_k + policy.candidates)
        device, num_layers = buffer.device, len(spec.layers)
        with torch.inference_mode(False):  # the state outlives the mode of whoever runs the first step
            state = PlannerState.allocate(
                num_layers, self._num_experts, len(buffer), batch, self._top_k, most * policy.lookahead, device
            )
            # Whether first parts are there: of what a layer demands, of what the layer before foretold for it, the one
            # before that … It is foretold once at every distance, each into a list of its own: the last may still be
            # copied.
            self._ready = torch.zeros(1 + policy.lookahead, num_layers, dtype=torch.int32, device=device)
            self._states_ahead = [self._with_list(state, ready) for ready in self._ready[1:]]
            self.state = self._states_ahead[0]
            bases = [addresses.get(layer, 0) for layer in range(num_layers)]
            self._bases = torch.tensor(bases, dtype=torch.int64, device=device)
            self._slot_ids = torch.full((num_layers, 2, batch, self._top_k), -1, dtype=torch.int32, device=device)
            # Of the step before, for the predictor of that name.
            self._last_ids = torch.full((num_layers, batch, self._top_k), -1, dtype=torch.int32, device=device)
            self._recall = torch.zeros(num_layers, 8, dtype=torch.int64, device=device)  # 5 used: rows of 64 bytes
            # To look at the state beside a step that does not end, when nothing can be allocated any more.
            if device.type == "cuda":
                watched = (self.state.key_of, self.state.copy_epoch, self.state.landed)
                self._landing = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in watched]
                self._watch = torch.cuda.Stream(device)
        self._foretold: dict[int, torch.Tensor] = {}  # by layer, what was foretold for it last
        self._guess_branches = [make_branch(device, SOON) for _ in range(policy.lookahead)]
        self._side = self._guess_branches[0]
        self._demand, self._prefetch = make_branch(device, SOON), make_branch(device, SOON)
        self._late = make_branch(device)
        self._branches = *self._guess_branches, self._demand, self._prefetch, self._late
        self._has_guesses = policy.predictor not in ("none", "previous-token")  # on those branches
        self._has_slow_guesses = self._has_guesses and (policy.lookahead > 1 or policy.predictor in TRAINED_PREDICTORS)
        self._counted_tick = 0  # whose counts `collect` has added
        self._collected = np.zeros(self.state.counters.shape, dtype=np.int64)
        self._guard = self._new_guard() if policy.guards_prefetch else None
        self._steps = 0
        self._look: tuple[torch.Tensor, torch.cuda.Event | None] | None = None  # counters on their way to the guard
        self._fetched_ahead: dict[int, list[object]] = {}  # by layer, when what was fetched ahead for it is complete
        self._planned: object = None  # when the plan of the layer's demand is complete
        self._closing: dict[str, torch.Tensor] = {}  # by kind, the word of what a step fetches last
        self._uncounted: tuple[int, NormRouterOutput, torch.Tensor | None] | None = None  # of the layer, until `join`
        self._kept: list[object] = []  # what the side branch reads, and those of further guesses, until it is joined

    def load(self, pool: SlotPool) -> None:
        """Take over the pool's slots, of which none may be in flight or pinned."""
        state, clock = self.state, max(1, pool.clock)
        is_mapped = torch.from_numpy(pool.key_of >= 0)
        score = torch.from_numpy(pool.score)
        # A score is that of a use at some tick, and with lfu num_layers more for every use: by then, not by now.
        later = (score - clock).clamp(min=0)
        used_at = score - pool.num_layers * -(-later // pool.num_layers)
        if pool.eviction == "lfu":
            state.uses.copy_(torch.from_numpy(pool.uses))
            state.uses_period.fill_(clock // (HALF_LIFE * pool.num_layers))
        state.slot_of.copy_(torch.from_numpy(pool.slot_of))
        state.key_of.copy_(torch.from_numpy(pool.key_of))
        # A guess that nobody used has no layer to wait for any more: it goes first, as one that was wrong.
        state.score.copy_(torch.where(is_mapped, torch.where(score > 0, score, 1), FREE))
        state.used_at.copy_(torch.where(is_mapped, used_at.clamp(min=1), 0))
        epoch = torch.where(is_mapped, 2 * clock, 0)
        state.copy_epoch.copy_(epoch)
        state.landed.copy_(epoch)
        state.guess.zero_()
        state.num_guesses.zero_()
        for ahead in self._states_ahead:
            ahead.prefetch_listed.zero_()  # what was interrupted may have left a list that nobody fetched
        header = torch.zeros(len(state.header), dtype=torch.int64)
        header[Header.TICK] = clock
        header[Header.QUEUE_HEAD : Header.QUEUE_END + 1] = state.queue_capacity  # nothing queued: the first plan looks
        state.header.copy_(header)
        self._last_ids.fill_(-1)
        self._foretold.clear()
        for branch in self._branches:
            branch.reset()
        self._fetched_ahead.clear()
        self._closing.clear()
        self._uncounted = None
        self._kept.clear()
        self._counted_tick = clock
        if self._guard is not None:
            self._guard, self._look = self._new_guard(), None
            state.limit.fill_(NO_LIMIT)

    def store(self, pool: SlotPool) -> None:
        """Hand the slots back; waits for what is under way."""
        self.settle()
        header = self.state.header.tolist()
        key_of = self.state.key_of.cpu().numpy().astype(np.int64)
        is_resident = (self.state.landed == self.state.copy_epoch).cpu().numpy()
        score = np.maximum(self.state.score.cpu().numpy(), 0)
        uses = self.state.uses.cpu().numpy() >> (
            header[Header.TICK] // (HALF_LIFE * pool.num_layers) - self.state.uses_period.cpu().numpy()
        )
        pool.adopt(np.where(is_resident, key_of, -1), score, uses, header[Header.TICK])

    def settle(self) -> None:
        """Wait for whatever was launched; TransferError that names what has not arrived, where that takes too long."""
        if not self._buffer.is_cuda:
            return
        self.abandon()  # an interrupted step may have left launches that nobody waits for
        event = torch.cuda.Event()
        event.record()
        await_until(event.query, "a decode step", STEP_TIMEOUT_S, details=lambda: not_arrived(self.outstanding()))
        torch.cuda.synchronize(self._buffer.device)

    def outstanding(self) -> list[str]:
        """The experts whose copy was planned and has not landed, as far as the device still tells."""
        found = [self.state.key_of, self.state.copy_epoch, self.state.landed]
        if self._buffer.is_cuda:
            with torch.cuda.stream(self._watch):  # beside whatever is stuck
                for landing, tensor in zip(self._landing, found, strict=True):
                    landing.copy_(tensor, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            try:
                await_until(event.query, "a look at the planner's state", GLIMPSE_S)
            except TransferError:
                return ["the device does not say what"]
            found = self._landing
        key_of, planned, landed = (tensor.numpy() for tensor in found)
        keys = key_of[(key_of >= 0) & (planned != landed)].tolist()
        return [expert_name(*divmod(key, self._num_experts)) for key in keys]

    def resident(self, layer_id: int) -> np.ndarray:
        """[E]: the slots of the layer's experts, -1 where one is not resident; waits for the device."""
        slots = self.state.slot_of[layer_id].cpu().numpy()
        is_resident = (self.state.landed == self.state.copy_epoch).cpu().numpy()
        return np.where((slots >= 0) & is_resident[slots], slots, -1)

    def collect(self, counters: Counters) -> None:
        """Add what was counted since the last call."""
        header = self.state.header.tolist()
        if header[Header.ERROR]:
            raise RuntimeError("no slot could be had for an expert that is needed: the last outputs are wrong")
        tick = header[Header.TICK]
        ticks, self._counted_tick = tick - self._counted_tick, tick
        steps = -(-ticks // len(self._moe_layers))  # an interrupted one as well
        if steps:
            counters.tokens += steps * self.batch
            counters.wait_s = None
        total, recall = self.state.counters.cpu().numpy().copy(), self._recall.tolist()
        counts, self._collected = (total - self._collected).tolist(), total
        for layer, row, foretold in zip(counters.layers, counts, recall, strict=True):
            for counter in COUNTED_ALIKE:
                name = counter.name.lower()
                setattr(layer, name, getattr(layer, name) + row[counter])
            layer.left_out_mass += row[Counter.LEFT_OUT_MASS] * MASS_UNIT
            moved = row[Counter.DEMAND_BYTES] + row[Counter.PREFETCH_BYTES]
            whole = row[Counter.DEMAND] + row[Counter.PREFETCHED] - row[Counter.CANCELLED]
            layer.cancelled_bytes += moved - whole * self._record_bytes
            layer.speculated += foretold[0]
            layer.speculated_right += foretold[1]
            layer.speculated_routed += foretold[2]
            layer.gate_mass_right += foretold[3] * MASS_UNIT
            layer.gate_mass += foretold[4] * MASS_UNIT
        self._recall.zero_()

    def step_launched(self) -> None:
        """Now and then have the guard look at what the device has counted, without waiting for it."""
        if self._guard is None:
            return
        if self._look is not None and (self._look[1] is None or self._look[1].query()):
            if self._guard.look(*self._prefetched(self._look[0].numpy())):
                limits = torch.from_numpy(np.where(self._guard.is_off, 0, NO_LIMIT).astype(np.int32))
                self.state.limit.copy_(limits.pin_memory() if self._buffer.is_cuda else limits, non_blocking=True)
            self._look = None
        self._steps += 1
        if self._look is None and self._steps % GUARD_STEPS == 0:
            self._look = self._to_host(self.state.counters)

    def guard_line(self) -> str | None:
        """What to print if fetching ahead was stopped anywhere."""
        return None if self._guard is None else self._guard.line()

    def _new_guard(self) -> PrefetchGuard:
        return PrefetchGuard(self._record_bytes, *self._prefetched(self.state.counters.cpu().numpy()))

    def _prefetched(self, counters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bytes fetched ahead for each layer so far that were used, and that were not."""
        whole = counters[:, Counter.PREFETCHED] - counters[:, Counter.CANCELLED]
        partly = counters[:, Counter.PREFETCH_BYTES] - whole * self._record_bytes  # below 0 while copies are under way
        used = counters[:, Counter.PREFETCHED_USED] * self._record_bytes
        return used, counters[:, Counter.PREFETCHED_WASTED] * self._record_bytes + np.maximum(partly, 0)

    @staticmethod
    def _to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """A copy on the host, complete once the event is."""
        if not tensor.is_cuda:
            return tensor.clone(), None
        landing = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        landing.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return landing, event

    def plan(self, layer_id: int, routed: NormRouterOutput) -> SlotIds:
        """Give every routed expert a slot, and fetch what is missing beside what is launched next.

        `hits` of the result can be computed with at once, the others `behind_copies`.
        """
        state, policy, ids = self.state, self._policy, SlotIds(*self._slot_ids[layer_id])
        table = None if self._tables is None else self._tables.routed
        self._ops.plan_demand(
            state, layer_id, routed.topk_ids, routed.topk_weights, *ids, policy.miss_tolerance, policy.eviction, table
        )
        self._planned = done_so_far(self._buffer.device)
        with self._demand.fork(self._planned):
            self._copy(state, layer_id, "demand", Counter.DEMAND_BYTES)
        return ids

    @contextlib.contextmanager
    def behind_copies(self, layer_id: int) -> Iterator[torch.Tensor]:
        """What is launched inside finds the layer's experts in their slots, and all that was launched before its `plan`
        done; what follows finds it done, and mostly what was launched `beside` it. The first launch may begin when the
        words that are yielded are READY, as `expert_gemm` does."""
        copies = [*self._fetched_ahead.pop(layer_id, []), self._demand.done]
        lists = 0 if self._policy.predictor == "none" else self._policy.lookahead
        assert len(copies) == 1 + min(lists, self._moe_layers.index(layer_id)), "a list is awaited that nobody fetches"
        try:
            with self._late.fork(*copies):
                yield self._ready[: len(copies), layer_id]
        except BaseException:
            self._late.abandon()  # before anything that it writes to is freed
            raise
        self._late.join()
        if not self._has_slow_guesses:  # else where the next layer is routed, whose launch then begins after others
            self.join()

    @contextlib.contextmanager
    def beside(self, routed: NormRouterOutput, i: int) -> Iterator[None]:
        """What is launched inside runs beside what follows, until the next `join`: it guesses the i-th layer behind
        this one, for `look_ahead`. `routed` is held until then."""
        self._kept.append(routed)
        with self._guess_branches[i].fork():
            yield

    @contextlib.contextmanager
    def behind_guesses(self) -> Iterator[None]:
        """The same, behind what was launched there for the layer, plans of prefetches included."""
        with self._side.go_on():
            yield

    def look_ahead(self, layer_id: int, routed: NormRouterOutput, guesses: dict[int, torch.Tensor]) -> None:
        """Fetch ahead what is foretold, ids [T, M] by later layer; after the layer's `plan`, and best after the experts
        that are there are launched: what comes behind both then begins before the end of these."""
        later = [layer for layer in self._moe_layers if layer > layer_id]
        if self._policy.predictor == "previous-token":
            guesses = {layer: self._last_ids[layer] for layer in later[: self._policy.lookahead]}
        num_routed = min(self._num_experts, self.batch * self._top_k)
        for i, (target, ids) in enumerate(guesses.items()):
            assert target == later[i], "guesses are of the next layers, the nearest first"
            state, table = self._states_ahead[i], None if self._tables is None else self._tables.foretold[i]
            with self._behind_guess(i):
                self._ops.plan_prefetch(state, target, ids, i + 1, num_routed, table)
            with self._prefetch.fork(self._side.done):
                self._copy(state, target, "prefetch", Counter.PREFETCH_BYTES)
            self._fetched_ahead.setdefault(target, []).append(self._prefetch.done)
        if not guesses:  # the last layer's, whose recall is counted behind its router all the same
            with self._side.fork(self._planned):
                pass
        self._uncounted = layer_id, routed, self._foretold.pop(layer_id, None)
        self._foretold.update(guesses)

    def _behind_guess(self, i: int) -> contextlib.AbstractContextManager[None]:
        """What is launched inside is behind the layer's plan and the i-th guess; the plans of two guesses in turn."""
        if i > 0:
            return self._side.go_on(self._guess_branches[i].done)
        return self._side.go_on(self._planned) if self._has_guesses else self._side.fork(self._planned)

    def join(self) -> None:
        """Order what is launched from here on behind the side branch, and so behind every guess: that of a further
        layer is read by a plan on the side branch.

        What the layer chose is looked at last: the next router, where it is what comes behind, may begin beside the
        attention's last launch if that of the side branch was captured after it.
        """
        if self._uncounted is not None:
            with self._side.go_on():
                self._look_back(*self._uncounted)
            self._uncounted = None
        for branch in self._guess_branches[1:]:
            branch.reset()
        self._side.join()
        self._kept.clear()

    def _look_back(self, layer_id: int, routed: NormRouterOutput, foretold: torch.Tensor | None) -> None:
        self._kept += routed, foretold
        if foretold is not None and self._policy.execute == "routed":
            self._ops.count_recall(foretold, routed.topk_ids, routed.topk_weights, self._recall[layer_id, :5])
        if self._policy.predictor == "previous-token":
            self._last_ids[layer_id].copy_(routed.topk_ids)

    def end(self) -> None:
        """The last layer's computation is launched: every branch ends here."""
        self.join()
        self._demand.join()
        self._prefetch.join()
        self._closing.clear()
        self._fetched_ahead.clear()
        if self._tables is not None:
            self.state.header[Header.STEP].add_(1)

    def abandon(self) -> None:
        """Have every branch end here, whatever it was doing: a capture failed."""
        self._closing.clear()
        self._fetched_ahead.clear()
        self._uncounted = None
        with contextlib.ExitStack() as last_first:  # all of them, also if one fails
            last_first.callback(self._kept.clear)
            for branch in self._branches:
                last_first.callback(branch.abandon)

    def _with_list(self, state: PlannerState, ready: torch.Tensor) -> PlannerState:
        """The same state, with a prefetch list of its own, whose words are these, and the demand's that all share."""
        names = [name for name in PlannerState._fields if "prefetch" in name]
        lists = {name: torch.zeros_like(getattr(state, name)) for name in names}
        return state._replace(**(lists | {"prefetch_ready": ready, "demand_ready": self._ready[0]}))

    def _copy(self, state: PlannerState, layer_id: int, kind: str, column: Counter) -> None:
        lists = [getattr(state, f"{kind}_{name}")[layer_id] for name in ("key", "slot", "epoch")]
        counted = slice(layer_id, layer_id + 1)
        options: dict[str, Any] = {}
        if kind == "prefetch":  # it begins beside its plan, its bytes behind others'
            options = {"listed": state.prefetch_listed[counted], "goes_first": tuple(self._closing.values())}
        self._closing[kind] = getattr(state, f"{kind}_closing")[counted]
        self._ops.fetch(
            *lists,
            getattr(state, f"num_{kind}")[counted],
            getattr(state, f"{kind}_arrivals")[layer_id],
            self._bases,
            self._num_experts,
            self._record_bytes,
            self._buffer,
            state.copy_epoch,
            state.landed,
            state.counters[layer_id, column : column + 1],
            is_speculative=kind == "prefetch",
            ready=getattr(state, f"{kind}_ready")[counted],
            first_bytes=self._first_bytes,
            closing=self._closing[kind],
            **options,
        )


def device_addresses(store: ExpertStore, device: torch.device) -> dict[int, int] | str:
    """Where each layer's records begin for kernels of the device, or why they cannot read them."""
    if device.type != "cuda":
        return store.addresses()
    if not store.is_pinned:
        return "the experts are not in pinned memory"
    found = {}
    for layer, address in store.addresses().items():
        mapped = device_address(address)
        if isinstance(mapped, str):
            return mapped
        found[layer] = mapped
    return found
