"""`plan_demand` and `plan_prefetch` against their references, step after step, with copies that land at any time.

The test plays the fetch kernels: between two calls it publishes some of the copies listed ahead, in order, and before
the next layer's routing what a layer waits for, its demand and all that was foretold for it. After every call the state
of both is equal, bit for bit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from bench import kernel_cases
from kernel_testing import DEVICE, KERNEL_MARKS, poisoned

from tritonmoe_kernels.plan import plan_demand, plan_prefetch
from tritonmoe_kernels.plan_reference import plan_demand_ref, plan_prefetch_ref
from tritonmoe_kernels.planner_state import (
    FORETOLD,
    HALF_LIFE,
    LISTED,
    MASS_UNIT,
    NO_LIMIT,
    REFUTED,
    Counter,
    Header,
    PlannerState,
    check_integrity,
)

pytestmark = KERNEL_MARKS

CPU = torch.device("cpu")
USED = 7  # what a word may hold before a plan


@dataclass(frozen=True)
class Case:
    """A model, a pool and what is random about the steps."""

    slots: int
    tokens: int = 1
    top_k: int = 3
    foretold: int = 4
    experts: int = 8
    layers: tuple[int, ...] = (0, 1, 2)  # those with experts
    num_layers: int = 3
    steps: int = 5
    first_tick: int = 0
    lookaheads: tuple[int, ...] = (1,)
    eviction: str = "lru"
    miss_tolerance: float = 0.0
    limits: tuple[int, ...] = (NO_LIMIT,)
    locality: float = 0.5  # how often an id is that of the step before
    recall: float = 0.7  # how often a foretold id is one that will be routed
    landing: float = 0.6  # how often a foretold copy lands before its layer's routing is known
    from_tables: bool = False


def equal_states(actual: PlannerState, expected: PlannerState) -> None:
    for name, one, other in zip(actual._fields, actual, expected, strict=True):
        if name != "scratch":
            one, other = one.cpu(), other.cpu()
            assert torch.equal(one, other), f"{name}: {(one != other).nonzero().tolist()[:5]}\n{one}\n{other}"


@dataclass
class Session:
    """Both planners over one sequence of calls, and the copies that are under way."""

    case: Case
    seed: int
    has_kernel: bool = True
    in_flight: list[tuple[int, int, int]] = field(default_factory=list)  # foretold: (slot, epoch, tick of its layer)

    def __post_init__(self) -> None:
        case = self.case
        sizes = case.num_layers, case.experts, case.slots, case.tokens, case.top_k, case.foretold
        self.random = random.Random(self.seed)
        self.expected = PlannerState.allocate(*sizes, device=CPU)
        self.actual = PlannerState.allocate(*sizes, device=DEVICE)
        for state in (self.expected, self.actual):
            state.header[Header.TICK] = case.first_tick
        self.routed = [self.draw_ids() for _ in range(case.num_layers)]
        equal_states(self.actual, self.expected)

    def draw_ids(self) -> list[list[int]]:
        return [self.random.sample(range(self.case.experts), self.case.top_k) for _ in range(self.case.tokens)]

    def next_ids(self, layer: int) -> list[list[int]]:
        """[T, K]: like those of the step before, in part."""
        rows = []
        for old, new in zip(self.routed[layer], self.draw_ids(), strict=True):
            kept = [expert for expert in old if self.random.random() < self.case.locality]
            rows.append((kept + [expert for expert in new if expert not in kept])[: self.case.top_k])
        return rows

    def foretell(self, routed: list[list[int]]) -> list[list[int]]:
        """[T, M]: some of the routed ids, some of others."""
        rows = []
        for row in routed:
            right = [expert for expert in row if self.random.random() < self.case.recall]
            others = [expert for expert in range(self.case.experts) if expert not in row]
            wrong = self.random.sample(others, min(len(others), self.case.foretold))
            ids = (right + wrong)[: self.case.foretold]
            self.random.shuffle(ids)
            rows.append(ids + [-1] * (self.case.foretold - len(ids)))
        return rows

    def land_one(self) -> None:
        """The first copy ends. A refuted one is dropped, or was past the last look at its epoch."""
        slot, epoch, _ = self.in_flight.pop(0)
        if self.expected.copy_epoch[slot] == epoch or self.random.random() < 0.2:
            for state in (self.expected, self.actual):
                state.landed[slot] = epoch

    def land(self) -> None:
        """Some of the foretold copies end."""
        while self.in_flight and self.random.random() < self.case.landing:
            self.land_one()

    def demand(self, layer: int, ids: list[list[int]]) -> None:
        case, before = self.case, PlannerState(*(tensor.clone() for tensor in self.expected))
        topk_ids = torch.tensor(ids, dtype=torch.int32)
        weights = torch.rand(topk_ids.shape, generator=torch.Generator().manual_seed(self.random.randrange(1 << 30)))
        results = []
        for plan, state, device in self.planners(plan_demand, plan_demand_ref):
            out = [poisoned(*topk_ids.shape, dtype=torch.int32).to(device) for _ in range(2)]
            given, table = self.given(topk_ids, layer, device)
            state.demand_ready[layer] = state.demand_closing[layer] = USED
            plan(state, layer, given, weights.to(device), *out, case.miss_tolerance, case.eviction, table)
            results.append([slots.cpu() for slots in out])
        for actual, expected in zip(results[0], results[-1], strict=True):
            assert torch.equal(actual, expected)
        self.check()
        self.check_demand(layer, topk_ids, results[-1], before)
        count = int(self.expected.num_demand[layer])
        self.check_written_once(self.expected.demand_slot[layer, :count])
        assert self.expected.demand_ready[layer] == self.expected.demand_closing[layer] == 0

    def land_demand(self, layer: int) -> None:
        """On a branch of its own: all of it, whatever is still foretold for later layers."""
        count = int(self.expected.num_demand[layer])
        slots, epochs = self.expected.demand_slot[layer, :count].long(), self.expected.demand_epoch[layer, :count]
        for state in (self.expected, self.actual):
            state.landed[slots.to(state.landed.device)] = epochs.to(state.landed.device)

    def check_written_once(self, taken: torch.Tensor) -> None:
        """Also a copy that was cancelled may write to its slot until its launch has ended."""
        assert not set(taken.tolist()) & {slot for slot, _, _ in self.in_flight}, "a slot that is written to was taken"

    def prefetch(self, layer: int, ids: list[list[int]], distance: int) -> None:
        case, before = self.case, PlannerState(*(tensor.clone() for tensor in self.expected))
        limit = self.random.choice(case.limits)
        foretold = torch.tensor(ids, dtype=torch.int32)
        for plan, state, device in self.planners(plan_prefetch, plan_prefetch_ref):
            state.limit[layer] = limit
            given, table = self.given(foretold, layer, device)
            state.prefetch_ready[layer] = state.prefetch_closing[layer] = USED
            state.prefetch_listed[layer] = 0
            plan(state, layer, given, distance, case.tokens * case.top_k, table)
        self.check()
        assert self.expected.prefetch_ready[layer] == self.expected.prefetch_closing[layer] == 0
        assert self.expected.prefetch_listed[layer] == LISTED
        count = int(self.expected.num_prefetch[layer])
        assert count <= limit
        slots, epochs = self.expected.prefetch_slot[layer, :count], self.expected.prefetch_epoch[layer, :count]
        self.check_written_once(slots)
        target = int(self.expected.header[Header.TICK]) + distance
        self.in_flight += [(slot, epoch, target) for slot, epoch in zip(slots.tolist(), epochs.tolist(), strict=True)]
        taken = slots.long()
        assert (before.used_at[taken] < before.header[Header.TICK]).all(), "a slot in use was taken"
        assert (before.guess[taken] == 0).all(), "a foretold slot was taken"
        assert int(self.expected.num_guesses.sum()) <= max(
            case.slots - case.tokens * case.top_k, int(before.num_guesses.sum())
        )

    def planners(self, kernel: Any, reference: Any) -> list[tuple[Any, PlannerState, torch.device]]:
        both = [(kernel, self.actual, DEVICE), (reference, self.expected, CPU)]
        return both if self.has_kernel else both[1:]

    def given(self, ids: torch.Tensor, layer: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(ids, table): in one of them what is meant, in the other nothing that is."""
        if not self.case.from_tables:
            return ids.to(device), None
        steps = 3
        table = torch.full((steps, self.case.num_layers, *ids.shape), -1, dtype=torch.int32)
        table[int(self.expected.header[Header.STEP]) % steps, layer] = ids
        return torch.zeros_like(ids).to(device), table.to(device)

    def check(self) -> None:
        if self.has_kernel:
            equal_states(self.actual, self.expected)
        check_integrity(self.expected)

    def check_demand(self, layer: int, ids: torch.Tensor, out: list[torch.Tensor], before: PlannerState) -> None:
        """Everything routed has its slot, nothing that was needed was given away for it, and all of it is counted."""
        state, (hit_ids, miss_ids) = self.expected, out
        all_ids = torch.maximum(hit_ids, miss_ids)
        tick = int(state.header[Header.TICK])
        assert state.header[Header.ERROR] == 0
        is_left = all_ids < 0
        assert self.case.miss_tolerance > 0 or not is_left.any()
        held = all_ids[~is_left].long()
        assert torch.equal(state.key_of[held], (layer * self.case.experts + ids)[~is_left])
        assert (state.used_at[held] == tick).all()
        assert not ((hit_ids >= 0) & (miss_ids >= 0)).any()
        hits = hit_ids[hit_ids >= 0].long()
        assert (before.landed[hits] == before.copy_epoch[hits]).all()
        count = int(state.num_demand[layer])
        taken = state.demand_slot[layer, :count].long()
        own = before.guesses[layer, : before.num_guesses[layer]].long()
        is_own = torch.isin(taken, own)
        assert ((before.guess[taken] == 0) | is_own).all(), "a foretold slot was taken"
        assert not torch.isin(taken, hits).any()
        settled = (before.key_of[taken] < 0) | (before.landed[taken] == before.copy_epoch[taken])
        assert settled.all(), "a slot in flight was taken, or one whose copy was cancelled just now"
        change = (state.counters - before.counters)[layer]
        distinct = len(ids[~is_left].unique())
        assert change[Counter.ROUTED] == distinct
        assert change[[Counter.HITS, Counter.LATE, Counter.DEMAND]].sum() == distinct
        assert change[Counter.DEMAND] == count
        assert change[Counter.LEFT_OUT] == is_left.sum()
        assert change[Counter.LEFT_OUT_MASS] * MASS_UNIT <= self.case.miss_tolerance * is_left.sum()

    def run(self) -> None:
        case, layers = self.case, self.case.layers
        schedule = [(step, layer) for step in range(case.steps) for layer in layers]
        routings = []
        for _, layer in schedule:
            self.routed[layer] = self.next_ids(layer)
            routings.append(self.routed[layer])
        for i, (step, layer) in enumerate(schedule):
            for state in (self.actual, self.expected):
                state.header[Header.STEP] = step
            self.demand(layer, routings[i])
            tick = int(self.expected.header[Header.TICK])
            self.land()
            for lookahead in case.lookaheads if case.foretold else ():
                target = i + lookahead
                if target < len(schedule):
                    self.prefetch(schedule[target][1], self.foretell(routings[target]), lookahead)
            self.land_demand(layer)  # the layer's experts wait for its fetches; the next layer for them
            while any(target <= tick for _, _, target in self.in_flight):
                self.land_one()
            self.land()


CASES = {
    "lru": Case(14),
    "lfu": Case(14, eviction="lfu", layers=(0, 2), first_tick=2 * HALF_LIFE * 3 - 9, steps=8),
    "least pool": Case(3, foretold=2),
    "one slot to spare": Case(4),
    "all fits": Case(40, recall=0.3),
    "two tokens": Case(18, tokens=2, experts=12),
    "four tokens": Case(25, tokens=4, top_k=4, foretold=6, experts=20, steps=4, locality=0.3),
    "narrow pool, four tokens": Case(16, tokens=4, top_k=4, foretold=6, experts=20, steps=4),
    "two layers ahead": Case(16, lookaheads=(2,), layers=(1, 2, 4), num_layers=5),
    "foretold twice": Case(20, lookaheads=(2, 1), steps=4),
    "foretold thrice, least pool": Case(
        12, top_k=2, foretold=4, lookaheads=(1, 2, 3), steps=6, recall=0.4, landing=0.2
    ),
    "a step ahead": Case(12, lookaheads=(3,)),
    "a queue that lasts": Case(60, experts=30, top_k=2, foretold=2, steps=12, locality=0.1, recall=0.3, landing=0.95),
    "one layer": Case(9, layers=(0,), num_layers=1, steps=16, top_k=2),
    "no guesses": Case(7, foretold=0),
    "wrong guesses that never land in time": Case(12, recall=0.1, landing=0.1),
    "limits": Case(14, limits=(0, 1, 2, NO_LIMIT), steps=8),
    "miss tolerance": Case(8, miss_tolerance=0.3, tokens=2, recall=0.4),
    "many slots": Case(90, experts=40, top_k=6, steps=8, locality=0.2),
    "more ids than are compared at a time": Case(60, tokens=4, top_k=9, foretold=10, experts=40, steps=3, locality=0.3),
    "tables": Case(14, from_tables=True, tokens=2),
}


@pytest.mark.parametrize("name", CASES)
def test_sequences(name: str) -> None:
    Session(CASES[name], 0).run()


@pytest.mark.parametrize("name", CASES)
def test_what_is_needed_stays(name: str) -> None:
    """The reference alone, which takes 1 % of the time, through more of the same."""
    for seed in range(1, 16):
        Session(CASES[name], seed, has_kernel=False).run()


def small_state(slots: int = 6, top_k: int = 2, foretold: int = 3) -> PlannerState:
    return PlannerState.allocate(2, 8, slots, 1, top_k, foretold, DEVICE)


def demand(state: PlannerState, layer: int, ids: list[int], **options: Any) -> list[list[int]]:
    """[hit_ids, miss_ids, slots of either] of one token."""
    out = [poisoned(1, len(ids), dtype=torch.int32) for _ in range(2)]
    weights = torch.tensor([options.pop("weights", [1.0] * len(ids))], device=DEVICE)
    topk_ids = torch.tensor([ids], dtype=torch.int32, device=DEVICE)
    plan_demand(state, layer, topk_ids, weights, *out, **options)
    check_integrity(state)
    return [slots[0].tolist() for slots in (*out, torch.maximum(*out))]


def prefetch(state: PlannerState, layer: int, ids: list[int]) -> list[int]:
    """The slots that are to be filled."""
    plan_prefetch(state, layer, torch.tensor([ids], dtype=torch.int32, device=DEVICE), 1, state.demand_key.shape[1])
    check_integrity(state)
    return state.prefetch_slot[layer, : state.num_prefetch[layer]].tolist()


def land_all(state: PlannerState) -> None:
    state.landed.copy_(state.copy_epoch)


def counted(state: PlannerState, layer: int) -> dict[Counter, int]:
    """The counters that are not zero."""
    return {counter: n for counter, n in zip(Counter, state.counters[layer].tolist(), strict=True) if n}


def test_demand_then_late_then_hit() -> None:
    state = small_state()
    assert demand(state, 0, [5, 3]) == [[-1, -1], [0, 1], [0, 1]]
    assert state.demand_key[0].tolist() == [5, 3]
    assert state.demand_epoch[0].tolist() == [2, 2]
    state.landed[1] = 2
    assert demand(state, 0, [3, 5]) == [[1, -1], [-1, 0], [1, 0]]
    assert not state.num_demand[0]
    assert counted(state, 0) == {Counter.ROUTED: 4, Counter.DEMAND: 2, Counter.HITS: 1, Counter.LATE: 1}


def test_a_wrong_guess_in_flight_is_cancelled_and_its_slot_not_taken_at_once() -> None:
    state = small_state()
    demand(state, 0, [0, 1])
    land_all(state)
    assert prefetch(state, 1, [6, 7]) == [2, 3]
    state.landed[2] = state.copy_epoch[2]
    assert demand(state, 1, [6, 4]) == [[2, -1], [-1, 4], [2, 4]]
    assert state.copy_epoch[3] == 0, "the copy of expert 7 is still wanted"
    assert counted(state, 1) == {
        Counter.ROUTED: 2, Counter.HITS: 1, Counter.DEMAND: 1, Counter.PREFETCHED: 2, Counter.PREFETCHED_USED: 1,
        Counter.CANCELLED: 1,
    }  # fmt: skip
    assert prefetch(state, 0, [2]) == [5]  # what is left of expert 7 may be written yet
    assert demand(state, 0, [2, 3])[1] == [5, 3]


def test_a_wasted_record_stays_until_its_slot_is_needed_and_counts_once() -> None:
    state = small_state(slots=8)
    demand(state, 0, [0, 1])
    assert prefetch(state, 1, [5]) == [2]
    land_all(state)
    demand(state, 1, [6, -1])  # not 5; slots are free, but the wrong guess is in front of them
    assert state.slot_of[1, 5] == -1
    assert demand(state, 0, [0, 1])[0] == [0, 1]
    assert prefetch(state, 1, [7]) == [3]
    land_all(state)
    demand(state, 1, [6, -1])
    assert prefetch(state, 1, [7]) == []  # mapped: pinned again, not fetched again
    demand(state, 1, [6, -1])
    assert demand(state, 1, [7, 6])[0] == [3, 2]
    counters = counted(state, 1)
    assert counters[Counter.PREFETCHED] == counters[Counter.PREFETCHED_WASTED] == 2
    assert Counter.PREFETCHED_USED not in counters


def test_too_few_slots_are_an_error() -> None:
    state = small_state(slots=3, top_k=4)
    assert demand(state, 0, [0, 1, 2, 3])[2] == [0, 1, 2, -1]
    assert state.header[Header.ERROR] == 1
    assert state.num_demand[0] == 3


def test_slots_in_flight_are_not_taken() -> None:
    state = small_state(slots=4)
    demand(state, 0, [0, 1])
    demand(state, 1, [0, 1])
    assert demand(state, 0, [2, 3])[2] == [-1, -1]
    state.landed[1] = state.copy_epoch[1]
    assert demand(state, 0, [2, 3])[2] == [1, -1]


def test_repeated_and_absent_ids() -> None:
    state = small_state(top_k=6, slots=9)
    assert demand(state, 0, [4, -1, 4, 8, 2, 4])[2] == [0, -1, 0, -1, 1, 0]
    assert counted(state, 0) == {Counter.ROUTED: 2, Counter.DEMAND: 2}


def test_what_no_token_needs_much_is_left_out() -> None:
    state = small_state(top_k=4, slots=9)
    demand(state, 0, [0, 1, -1, -1])
    land_all(state)
    weights = [0.25, 0.5, 1.0, 0.25]
    assert demand(state, 0, [0, 1, 2, 3], weights=weights, miss_tolerance=0.2)[2] == [0, 1, 2, -1]
    counters = counted(state, 0)
    assert counters[Counter.LEFT_OUT] == 1
    assert counters[Counter.LEFT_OUT_MASS] * MASS_UNIT == 0.125
    assert counters[Counter.ROUTED] == 5
    assert demand(state, 0, [2, 3, 4, 5], weights=weights, miss_tolerance=0.125)[2][1] >= 0  # not below the bound


def random_state(rng: random.Random, layers: int = 3, experts: int = 16, slots: int = 44) -> PlannerState:
    """A state that keeps every rule, but need not come from any sequence of calls: slots of all kinds, also queued."""
    state = PlannerState.allocate(layers, experts, slots, 2, 4, 3, CPU)
    tick = 40
    state.header[Header.TICK] = tick
    refutable = []
    kinds = ["used", "used", "used", "refuted"] + ["foretold"] * rng.randrange(2)
    for slot, key in enumerate(rng.sample(range(layers * experts), rng.randrange(slots // 2, slots))):
        layer, expert = divmod(key, experts)
        kind = rng.choice(kinds)
        has_room = state.num_guesses[layer] < state.guesses.shape[1]
        if kind == "foretold" and not has_room:
            kind = "refuted"
        used_at = rng.randint(1, tick) if kind == "used" else 0
        score = {"used": used_at + layers * rng.randrange(3), "refuted": REFUTED, "foretold": FORETOLD}[kind]
        epoch = 2 * rng.randint(1, tick) + (kind != "used")
        is_landed = kind == "refuted" or rng.random() < 0.7
        state.slot_of[layer, expert], state.key_of[slot] = slot, key
        state.score[slot], state.used_at[slot] = score, used_at
        state.copy_epoch[slot], state.landed[slot] = epoch, epoch if is_landed else epoch - 2
        if kind == "foretold" or (has_room and rng.random() < 0.3):
            state.guesses[layer, state.num_guesses[layer]] = slot
            state.num_guesses[layer] += 1
            state.guess[slot] = tick + 2 + layer  # none of another layer than the next call's will have run
        if kind == "foretold":
            refutable.append(slot)
            state.counters[layer, Counter.PREFETCHED] += 1
    free = (state.key_of < 0).nonzero().flatten().tolist()
    for slot in free[: len(free) // 2]:
        state.used_at[slot] = rng.randint(tick - 1, tick)  # its copy was cancelled then
    queued = [slot for slot in rng.sample(range(slots), slots) if slot not in refutable]
    if rng.random() < 0.3:
        del queued[rng.randrange(4) :]
    head = rng.randrange(4)
    state.header[Header.QUEUE_HEAD], state.header[Header.QUEUE_END] = head, head + len(queued)
    for place, slot in enumerate(queued, start=head):
        is_stale = rng.random() < 0.4
        state.queue_slot[place], state.queue_score[place] = slot, int(state.score[slot]) - 3 * is_stale
    check_integrity(state)
    return state


@pytest.mark.parametrize("seed", range(40))
def test_one_call_on_any_state(seed: int) -> None:
    rng = random.Random(seed)
    expected = random_state(rng)
    before = PlannerState(*(tensor.clone() for tensor in expected))
    actual = PlannerState(*(tensor.clone().to(DEVICE) for tensor in expected))
    layer, tokens = rng.randrange(3), rng.choice((1, 2))
    if seed % 4 == 0:
        ids = torch.tensor([rng.sample(range(16), 3) for _ in range(tokens)], dtype=torch.int32)
        expected.limit[layer] = actual.limit[layer] = rng.choice((1, 3, NO_LIMIT))
        num_routed = rng.choice((4, 8))
        plan_prefetch(actual, layer, ids.to(DEVICE), 1, num_routed)
        plan_prefetch_ref(expected, layer, ids, 1, num_routed)
    else:
        ids = torch.tensor([rng.sample(range(16), 4) for _ in range(tokens)], dtype=torch.int32)
        out, expected_out = (
            [poisoned(tokens, 4, dtype=torch.int32).to(device) for _ in range(2)] for device in (DEVICE, CPU)
        )
        plan_demand(actual, layer, ids.to(DEVICE), None, *out)
        plan_demand_ref(expected, layer, ids, None, *expected_out)
        assert all(torch.equal(slots.cpu(), same) for slots, same in zip(out, expected_out, strict=True))
        taken = expected.demand_slot[layer, : expected.num_demand[layer]].long()
        assert ((before.guess[taken] == 0) | (before.key_of[taken] // 16 == layer)).all()
    equal_states(actual, expected)
    check_integrity(expected)


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_a_refill_finds_the_least_of_many(eviction: str) -> None:
    """Scores from few to many, all equal, and far apart; some slots may not go."""
    num_slots, rng = 700, random.Random(5)
    for scores in ([7], range(1, 40), range(1, 10**6), [1, 2, 10**10], [10**6] * 690 + [1]):
        state = PlannerState.allocate(4, 256, num_slots, 1, 4, 4, CPU)
        keys = torch.tensor(rng.sample(range(1024), num_slots), dtype=torch.int32)
        state.key_of.copy_(keys)
        state.slot_of.view(-1)[keys.long()] = torch.arange(num_slots, dtype=torch.int32)
        state.used_at.copy_(torch.tensor([rng.choice(scores) for _ in range(num_slots)]))
        uses = torch.randint(9, (num_slots,), generator=torch.Generator().manual_seed(1))
        state.score.copy_(state.used_at + 4 * uses * (eviction == "lfu"))
        state.copy_epoch.copy_(2 * state.used_at)
        state.landed.copy_(state.copy_epoch * (torch.arange(num_slots) % 7 != 0))
        state.header[Header.TICK] = max(scores)
        check_integrity(state)
        copy = PlannerState(*(tensor.clone().to(DEVICE) for tensor in state))
        plan_prefetch_ref(state, 0, torch.zeros(1, 4, dtype=torch.int32), 1, 4)
        plan_prefetch(copy, 0, torch.zeros(1, 4, dtype=torch.int32, device=DEVICE), 1, 4)
        equal_states(copy, state)
        check_integrity(state)


def test_integrity_says_what_is_wrong() -> None:
    for name, value, message in (
        ("key_of", 3, "owner is not mapped"),
        ("score", 1, "not one of a use"),
        ("guess", 9, "guesses are not what is pinned"),
        ("used_at", 5, "lies in the future"),
    ):
        state = small_state()
        demand(state, 0, [5, 3])
        demand(state, 1, [5, 3])
        getattr(state, name)[0] = value if name != "score" else 2
        with pytest.raises(AssertionError, match=message):
            check_integrity(state)


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("layer is 2", {"layer": 2}),
        ("topk_ids has shape", {"topk_ids": torch.zeros(2, dtype=torch.int32)}),
        ("topk_ids is torch.int64", {"topk_ids": torch.zeros(1, 2, dtype=torch.int64)}),
        ("allocated for 2 ids", {"topk_ids": torch.zeros(2, 2, dtype=torch.int32)}),
        ("topk_ids is empty", {"topk_ids": torch.zeros(0, 2, dtype=torch.int32)}),
        ("hit_ids has shape", {"hit_ids": torch.zeros(1, 3, dtype=torch.int32)}),
        ("miss_ids is torch.int64", {"miss_ids": torch.zeros(1, 2, dtype=torch.int64)}),
        ("without topk_weights", {"topk_weights": None, "miss_tolerance": 0.5}),
        ("miss_tolerance is 1.0", {"miss_tolerance": 1.0}),
        ("eviction is 'fifo'", {"eviction": "fifo"}),
        ("routing_table has shape", {"routing_table": torch.zeros(1, 2, 2, 2, dtype=torch.int32)}),
        ("routing_table has no step", {"routing_table": torch.zeros(0, 2, 1, 2, dtype=torch.int32)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(message: str, wrong: dict[str, Any]) -> None:
    ids = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    given = {"layer": 0, "topk_ids": ids, "topk_weights": ids.float(), "hit_ids": ids, "miss_ids": ids}
    wrong = {name: value.to(DEVICE) if torch.is_tensor(value) else value for name, value in wrong.items()}
    for plan in (plan_demand, plan_demand_ref):
        with pytest.raises(ValueError, match=message):
            plan(small_state(), **(given | wrong))


def test_refused_prefetches_and_states() -> None:
    ids = torch.zeros(1, 3, dtype=torch.int32, device=DEVICE)
    for plan in (plan_prefetch, plan_prefetch_ref):
        for message, arguments in (
            ("layer is -1", (-1, ids, 1, 2)),
            ("ids is empty", (0, ids[:, :0], 1, 2)),
            ("distance is 0", (0, ids, 0, 2)),
            ("num_routed is 0", (0, ids, 1, 0)),
        ):
            with pytest.raises(ValueError, match=message):
                plan(small_state(), *arguments)
    with pytest.raises(ValueError, match="num_slots is 0"):
        small_state(slots=0)
    with pytest.raises(ValueError, match="num_slots is 1048577"):
        small_state(slots=2**20 + 1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "slots", "eviction"),
    [
        (1, 6144, "lru"),
        (1, 600, "lfu"),
        (1, 12, "lru"),
        (2, 80, "lfu"),
        (4, 6144, "lfu"),
        (8, 600, "lru"),
        (16, 300, "lru"),
    ],
)
def test_model_shapes(tokens: int, slots: int, eviction: str) -> None:
    case = Case(
        slots, tokens=tokens, top_k=8, foretold=10, experts=128, layers=tuple(range(48)), num_layers=48, steps=3,
        eviction=eviction, locality=0.3, landing=0.95, miss_tolerance=0.02 if tokens == 2 else 0.0,
    )  # fmt: skip
    Session(case, 0).run()


@pytest.mark.parametrize("kind", ["demand", "prefetch", "recall"])
def test_what_is_timed_runs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "DEVICE", DEVICE)
    for launch in kernel_cases.planning(kind, 3, 16, 4).launches:
        launch()
