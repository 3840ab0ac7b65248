"""What is fetched, kept and counted: rule by rule, then in generations with simulated copies and random guesses."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonmoe.offload.counters import Counters
from tritonmoe.offload.scheduler import Scheduler, Wave
from tritonmoe.offload.slot_pool import Fetch, SlotPool

RECORD_BYTES = 1000


def scheduler(num_slots: int, num_layers: int = 4, num_experts: int = 16, reserve: int = 1) -> Scheduler:
    return Scheduler(SlotPool(num_slots, num_layers, num_experts), Counters(num_layers, RECORD_BYTES), reserve)


def run_layer(plans: Scheduler, layer: int, routed: list[int]) -> list[Wave]:
    """All waves of a layer, each finished before the next is planned."""
    plan, waves = plans.plan(layer, routed), []
    while (wave := plan.next_wave()) is not None:
        waves.append(wave)
        plans.finish(layer, wave)
    assert plan.is_done
    plans.check_integrity()
    return waves


def land(plans: Scheduler, fetches: list[Fetch]) -> None:
    for _, slot, epoch in fetches:
        assert plans.pool.landed(slot, epoch)


def experts_of(wave: Wave) -> list[int]:
    return [*wave.ready, *wave.late, *(fetch.expert for fetch in wave.demand)]


def test_what_fits_is_one_wave_in_the_order_of_first_appearance() -> None:
    plans = scheduler(8)
    (wave,) = run_layer(plans, 0, [5, 3, 5, 9, 3])
    assert wave == Wave({}, {}, [Fetch(5, 0, 1), Fetch(3, 1, 2), Fetch(9, 2, 3)])
    (wave,) = run_layer(plans, 0, [9, 1, 5])
    assert wave == Wave({9: 2, 5: 0}, {}, [Fetch(1, 3, 4)])
    assert plans.counters.layers[0].hits == 2
    assert plans.counters.layers[0].demand == 4
    assert plans.counters.layers[0].routed == 6


def test_no_expert_is_no_wave() -> None:
    plans = scheduler(2)
    assert run_layer(plans, 0, []) == []


def test_the_first_wave_has_all_that_is_there() -> None:
    plans = scheduler(3)
    run_layer(plans, 0, [7, 8])
    waves = run_layer(plans, 0, [1, 2, 7, 3, 8, 4])
    assert [experts_of(wave) for wave in waves] == [[7, 8, 1], [2, 3, 4]]


def test_one_slot_is_enough() -> None:
    plans = scheduler(1)
    assert [experts_of(wave) for wave in run_layer(plans, 0, [4, 2, 6])] == [[4], [2], [6]]
    assert [experts_of(wave) for wave in run_layer(plans, 0, [4, 6])] == [[6], [4]]
    assert plans.prefetch(1, [0, 1]) == []  # it would leave none for demand


def test_half_of_the_slots_can_be_filled_while_the_other_is_computed_with() -> None:
    plans = scheduler(4)
    plan = plans.plan(0, range(5), most=2)
    first, second = plan.next_wave(), plan.next_wave()
    assert first is not None
    assert second is not None
    assert [experts_of(first), experts_of(second)] == [[0, 1], [2, 3]]
    assert plan.next_wave() is None
    assert not plan.is_done
    plans.finish(0, first)
    third = plan.next_wave()
    assert third is not None
    assert [fetch.slot for fetch in third.demand] == [0]
    assert plan.is_done
    plans.check_integrity()


def test_nothing_is_silently_left_out_when_no_slot_can_be_had() -> None:
    plans = scheduler(2)
    plans.pool.take(3, [0, 1])
    with pytest.raises(AssertionError, match="none of 2 slots"):
        plans.plan(0, [1]).next_wave()


def test_an_expert_in_flight_is_awaited_and_not_fetched_again() -> None:
    plans = scheduler(8)
    (fetch,) = plans.prefetch(1, [5])
    assert plans.prefetch(1, [5]) == []
    (wave,) = run_layer(plans, 1, [5])
    assert wave == Wave({}, {5: fetch.slot}, [])
    assert plans.pool.is_resident(fetch.slot)  # what comes after the wave finds it complete
    assert not plans.pool.landed(fetch.slot, fetch.epoch)  # a report that comes later changes nothing
    counters = plans.counters.layers[1]
    assert (counters.late, counters.hits, counters.prefetched_used) == (1, 0, 1)


def test_prefetch_is_best_first_within_its_limit_and_leaves_the_reserve() -> None:
    plans = scheduler(8, reserve=3)
    assert [fetch.expert for fetch in plans.prefetch(1, [5, 2, 5, 7], limit=2)] == [5, 2]
    assert plans.prefetch(1, [8], limit=0) == []
    assert [fetch.expert for fetch in plans.prefetch(2, [1, 2, 3, 4])] == [1, 2, 3]
    assert plans.pool.num_takeable == 3
    assert len(run_layer(plans, 0, [0, 1, 2])) == 1


def test_prefetch_leaves_alone_what_is_computed_with() -> None:
    plans = scheduler(4)
    plan = plans.plan(0, [0, 1, 2])
    wave = plan.next_wave()
    assert wave is not None
    assert [fetch.slot for fetch in plans.prefetch(1, [0, 1, 2])] == [3]
    plans.finish(0, wave)
    assert [fetch.slot for fetch in plans.prefetch(1, [0, 1, 2])] == [0, 1]  # one slot stays for demand
    plans.check_integrity()


def test_what_is_foretold_and_there_does_not_make_room_for_the_rest() -> None:
    plans = scheduler(4)
    run_layer(plans, 1, [0])  # the oldest: the first victim otherwise
    run_layer(plans, 0, [0, 1, 2])
    fetches = plans.prefetch(1, [7, 8, 0])
    assert [fetch.slot for fetch in fetches] == [1, 2]
    land(plans, fetches)
    run_layer(plans, 0, [5])  # takes the only slot that is left
    (wave,) = run_layer(plans, 1, [0, 7, 8])
    assert wave.ready == {0: 0, 7: 1, 8: 2}


def test_wrong_guesses_are_let_go_and_their_copies_can_be_taken_back() -> None:
    plans = scheduler(8)
    fetches = plans.prefetch(1, [1, 2, 3, 4])
    land(plans, fetches[:2])
    copies = plans.refute(1, [1, 3])
    assert copies == [(fetches[3].slot, fetches[3].epoch)]
    assert plans.counters.layers[1].prefetched_wasted == 2
    assert plans.abort(*copies[0])
    assert not plans.abort(*copies[0])
    assert plans.pool.lookup(1, 4) == -1
    run_layer(plans, 1, [1, 3])
    counters = plans.counters.layers[1]
    assert (counters.prefetched, counters.prefetched_used, counters.prefetched_wasted) == (4, 2, 1)
    assert (counters.cancelled, counters.hits, counters.late) == (1, 1, 1)
    assert plans.counters.moved_records() == 3
    assert plans.refute(1, [0]) == []


def test_wrong_guesses_are_the_first_victims() -> None:
    plans = scheduler(4)
    run_layer(plans, 0, [0, 1])
    fetches = plans.prefetch(1, [5])
    land(plans, fetches)
    plans.refute(1, [6])
    run_layer(plans, 1, [6])
    run_layer(plans, 2, [0])
    assert plans.pool.lookup(1, 5) == -1
    assert plans.pool.lookup(0, 0) >= 0


def test_a_plan_without_refutation_lets_go_too() -> None:
    plans = scheduler(8)
    plans.prefetch(1, [1, 2])
    run_layer(plans, 1, [1])
    assert plans.pool.num_pinned == 0
    assert plans.counters.layers[1].prefetched_wasted == 1


def test_a_refuted_copy_that_is_wanted_after_all_was_not_wasted() -> None:
    plans = scheduler(8)
    plans.prefetch(1, [1])
    assert len(plans.refute(1, [2])) == 1
    run_layer(plans, 1, [2])
    (wave,) = run_layer(plans, 1, [1])
    assert 1 in wave.late
    counters = plans.counters.layers[1]
    assert (counters.prefetched_used, counters.prefetched_wasted) == (1, 0)


def test_an_interrupted_step_leaves_nothing_behind() -> None:
    plans = scheduler(8)
    plans.prefetch(0, [1])
    plan = plans.plan(0, [1, 2])
    assert plan.next_wave() is not None
    plans.prefetch(1, [3])
    copies = plans.abandon()
    assert len(copies) == 3
    with pytest.raises(AssertionError, match="3 copies are in flight"):
        plans.resize(4)
    assert all(plans.abort(*copy) for copy in copies)
    plans.check_integrity()
    total = plans.counters.total()
    assert plans.pool.num_pinned == plans.counters.moved_records() == total.routed == total.prefetched_wasted == 0
    plans.resize(4)
    assert len(run_layer(plans, 0, [1, 2])) == 1


@dataclass
class Copies:
    """Copies that end in any order; `content` is what the slots hold, None while a copy is writing."""

    plans: Scheduler
    rng: random.Random
    content: list[tuple[int, int] | None]
    moved: int = 0

    def __post_init__(self) -> None:
        self.queued: dict[int, tuple[tuple[int, int], int]] = {}  # slot -> key, epoch
        self.unreported: list[tuple[int, int]] = []

    def submit(self, layer: int, fetches: list[Fetch], needed: set[int]) -> None:
        for expert, slot, epoch in fetches:
            key = (layer, expert)
            assert slot not in needed, "a slot that is needed was given away"
            assert slot not in self.queued, "a slot was given away while a copy writes it"
            assert all(other != key for other, _ in self.queued.values()), "fetched twice"
            self.content[slot] = None
            self.queued[slot] = key, epoch

    def complete(self, slot: int, is_reported: bool) -> None:
        if slot in self.queued:
            self.content[slot], epoch = self.queued.pop(slot)
            self.moved += 1
            if is_reported:
                assert self.plans.pool.landed(slot, epoch)
            else:
                self.unreported.append((slot, epoch))

    def some_time_passes(self) -> None:
        for slot in self.rng.sample(sorted(self.queued), self.rng.randint(0, len(self.queued))):
            self.complete(slot, is_reported=True)
        if self.rng.random() < 0.5:
            for slot, epoch in self.unreported:
                assert not self.plans.pool.landed(slot, epoch), "`finish` had said so"
            self.unreported.clear()
        self.plans.check_integrity()

    def cancel(self, copies: list[tuple[int, int]]) -> None:
        for slot, epoch in copies:
            if self.rng.random() < 0.6:
                assert self.queued.pop(slot)[1] == epoch
                assert self.plans.abort(slot, epoch)
            self.plans.check_integrity()

    def drain(self) -> None:
        for slot in list(self.queued):
            self.complete(slot, is_reported=True)


@dataclass(frozen=True)
class Case:
    seed: int
    num_layers: int
    num_experts: int
    top_k: int
    batch: int
    slots: str
    eviction: str
    lookahead: int
    candidates: int
    recall: float
    reserve: int
    wraps: bool  # whether the next step's layers are foretold in this one

    @property
    def num_slots(self) -> int:
        distinct = min(self.num_experts, self.top_k * self.batch)
        everything = self.num_layers * self.num_experts
        sizes = {"one": 1, "U-1": distinct - 1, "U": distinct, "2U+m": 2 * distinct + self.candidates}
        return max(1, min(everything, sizes.get(self.slots, everything)))


CASES = st.builds(
    Case,
    seed=st.integers(0, 2**32),
    num_layers=st.integers(1, 4),
    num_experts=st.integers(3, 8),
    top_k=st.integers(1, 3),
    batch=st.integers(1, 4),
    slots=st.sampled_from(["one", "U-1", "U", "2U+m", "all"]),
    eviction=st.sampled_from(["lru", "lfu"]),
    lookahead=st.integers(1, 3),
    candidates=st.integers(0, 2),
    recall=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    reserve=st.integers(1, 3),
    wraps=st.booleans(),
)


class Interruption(Exception):
    pass


class Generation:
    """Steps of random routing over a scheduler, as the engine drives it; every rule checked on the way."""

    def __init__(self, case: Case) -> None:
        self.case, self.rng = case, random.Random(case.seed)
        pool = SlotPool(case.num_slots, case.num_layers, case.num_experts, case.eviction)
        self.plans = Scheduler(pool, Counters(case.num_layers, RECORD_BYTES), case.reserve)
        self.copies = Copies(self.plans, self.rng, [None] * case.num_slots)
        self.foretold: dict[int, set[int]] = {layer: set() for layer in range(case.num_layers)}  # slots it pins
        self.computing: set[int] = set()
        self.log: list[object] = []
        self.routing = self.draw_routing(case.batch)  # of the next step

    def step(self, is_prefill: bool) -> None:
        routing, case = self.routing, self.case
        self.routing = self.draw_routing(case.batch)
        if is_prefill:
            routing = self.draw_routing(6)
        for layer, routed in enumerate(routing):
            self.copies.some_time_passes()
            wrong = self.plans.refute(layer, routed)
            self.copies.cancel(wrong)
            self.log.append(wrong)
            later = routing[layer + 1 :] + (self.routing if case.wraps else [])
            self.run_layer(layer, routed, [] if is_prefill else later[: case.lookahead], is_prefill)
        if not case.wraps:
            assert self.plans.pool.num_pinned == 0, "a pin outlived its step"

    def draw_routing(self, tokens: int) -> list[list[int]]:
        case, experts = self.case, range(self.case.num_experts)
        return [
            [e for _ in range(tokens) for e in self.rng.sample(experts, case.top_k)] for _ in range(case.num_layers)
        ]

    def run_layer(self, layer: int, routed: list[int], later: list[list[int]], is_prefill: bool) -> None:
        plans, wanted = self.plans, list(dict.fromkeys(routed))
        slots = {expert: plans.pool.lookup(layer, expert) for expert in wanted}
        mapped = {expert: slot for expert, slot in slots.items() if slot >= 0}
        most = max(1, plans.pool.num_slots // 2) if is_prefill else None
        plan, computed = plans.plan(layer, routed, most), []
        self.foretold[layer] = set()
        wave = self.next_wave(layer, plan)
        if wave is not None:
            assert {**wave.ready, **wave.late} == mapped, "the first wave has not all that is there"
            if most is None:
                assert plan.is_done or plans.pool.num_takeable == 0, "there was room for more"
                assert plan.is_done or self.case.slots != "all", "a slot for every expert, and more than one wave"
        while wave is not None:
            following = self.next_wave(layer, plan) if is_prefill else None
            for ahead, guess in enumerate(later, layer + 1):
                self.prefetch(ahead % self.case.num_layers, guess)
            self.copies.some_time_passes()
            self.compute(layer, wave)
            computed += experts_of(wave)
            wave = following or self.next_wave(layer, plan)
        assert plan.is_done
        assert sorted(computed) == sorted(wanted), "an expert was left out or computed twice"

    def next_wave(self, layer: int, plan) -> Wave | None:
        wave = plan.next_wave()
        self.plans.check_integrity()
        self.log.append(wave)
        if wave is not None:
            self.copies.submit(layer, wave.demand, self.needed())
            self.computing |= set(wave.slots)
        return wave

    def needed(self) -> set[int]:
        return self.computing.union(*self.foretold.values())

    def prefetch(self, layer: int, routed: list[int]) -> None:
        case, rng, pool = self.case, self.rng, self.plans.pool
        guess = [e if rng.random() < case.recall else rng.randrange(case.num_experts) for e in routed]
        guess += [rng.randrange(case.num_experts) for _ in range(case.candidates)]
        limit = rng.choice((None, None, 1, 2))
        there = {expert for expert in guess if pool.lookup(layer, expert) >= 0}
        fetches = self.plans.prefetch(layer, guess, limit)
        self.plans.check_integrity()
        self.log.append(fetches)
        self.copies.submit(layer, fetches, self.needed())
        fetched = [fetch.expert for fetch in fetches]
        assert not there & set(fetched), "prefetched what was there"
        assert fetched == [e for e in dict.fromkeys(guess) if e not in there][: len(fetched)], "not best first"
        assert limit is None or len(fetched) <= limit
        slots = [pool.lookup(layer, expert) for expert in guess]
        self.foretold[layer] |= {s for s in slots if s >= 0 and pool.pins[s] > (s in self.computing)}

    def compute(self, layer: int, wave: Wave) -> None:
        for expert, slot in wave.ready.items():
            assert self.copies.content[slot] == (layer, expert), "computed with another expert's weights"
        for slot in [*wave.late.values(), *(fetch.slot for fetch in wave.demand)]:
            # The device orders its work behind the copy; the host may not have been told yet.
            self.copies.complete(slot, is_reported=self.rng.random() < 0.5)
        for expert, slot in [*wave.late.items(), *(fetch[:2] for fetch in wave.demand)]:
            assert self.copies.content[slot] == (layer, expert), "computed with another expert's weights"
        self.plans.finish(layer, wave)
        self.computing -= set(wave.slots)
        self.plans.check_integrity()

    def end(self) -> None:
        """Everything lands or is taken back; then every byte counted has moved, and every move is counted."""
        self.copies.cancel(self.plans.abandon())
        self.copies.drain()
        self.plans.check_integrity()
        assert self.plans.pool.num_pinned == 0
        self.foretold = {layer: set() for layer in self.foretold}
        self.computing = set()
        counters = self.plans.counters
        for layer in counters.layers:
            assert layer.routed == layer.hits + layer.late + layer.demand
            assert layer.prefetched == layer.prefetched_used + layer.prefetched_wasted + layer.cancelled
            assert min(vars(layer).values()) >= 0
        total = counters.total()
        assert total.demand + total.prefetched_used + total.prefetched_wasted == self.copies.moved
        assert counters.moved_records() == self.copies.moved


def generate(case: Case) -> Generation:
    generation = Generation(case)
    generation.step(is_prefill=True)
    for _ in range(6):
        generation.step(is_prefill=False)
    generation.end()
    return generation


@given(CASES)
@settings(max_examples=300, deadline=None)
def test_generations_keep_every_rule(case: Case) -> None:
    generate(case)


@given(CASES)
@settings(max_examples=50, deadline=None)
def test_the_same_inputs_give_the_same_plans(case: Case) -> None:
    first, second = generate(case), generate(case)
    assert first.log == second.log
    assert first.plans.counters.summary() == second.plans.counters.summary()


@given(CASES, st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_a_resize_between_generations_forgets_everything(case: Case, num_slots: int) -> None:
    generation = generate(case)
    generation.plans.resize(num_slots)
    generation.case = replace(case, slots="resized")
    generation.copies.content = [None] * num_slots
    generation.plans.check_integrity()
    assert generation.plans.pool.num_takeable == num_slots
    generation.step(is_prefill=True)
    generation.step(is_prefill=False)
    generation.end()


@given(CASES)
@settings(max_examples=50, deadline=None)
def test_an_interruption_anywhere_leaves_the_scheduler_usable(case: Case) -> None:
    generation = Generation(case)
    countdown = generation.rng.randint(1, 6 * case.num_layers)
    compute = generation.compute

    def interrupted_compute(layer: int, wave: Wave) -> None:
        nonlocal countdown
        countdown -= 1
        if countdown == 0:
            raise Interruption
        compute(layer, wave)

    generation.compute = interrupted_compute  # type: ignore[method-assign]
    for _ in range(4):
        try:
            generation.step(is_prefill=generation.rng.random() < 0.3)
        except Interruption:
            generation.end()
    generation.end()


def test_slots_for_everything_are_filled_once() -> None:
    rng, plans = random.Random(0), scheduler(4 * 16)
    for layer in range(4):
        run_layer(plans, layer, list(range(16)))
    for _ in range(20):
        for layer in range(4):
            (wave,) = run_layer(plans, layer, rng.sample(range(16), 4))
            assert len(wave.ready) == 4
            assert plans.prefetch((layer + 1) % 4, rng.sample(range(16), 4)) == []
    assert plans.counters.total().demand == 64


class LeastRecentlyUsed:
    """Which records are fetched, by the textbook: a dictionary of the tick of each resident record's last use."""

    def __init__(self, num_slots: int) -> None:
        self.used: dict[tuple[int, int], tuple[int, int]] = {}  # key -> tick, slot
        self.num_slots, self.clock = num_slots, 0

    def layer(self, layer: int, routed: list[int]) -> list[int]:
        self.clock += 1
        keys = [(layer, expert) for expert in routed]
        self.used.update({key: (self.clock, self.used[key][1]) for key in keys if key in self.used})
        fetched = [key for key in keys if key not in self.used]
        for key in fetched:
            is_full = len(self.used) == self.num_slots
            slot = self.used.pop(min(self.used, key=self.used.__getitem__))[1] if is_full else len(self.used)
            self.used[key] = self.clock, slot
        return [expert for _, expert in fetched]


@given(st.integers(0, 2**32), st.integers(4, 40))
@settings(max_examples=50, deadline=None)
def test_least_recently_used_is_what_the_textbook_says(seed: int, num_slots: int) -> None:
    rng, plans, model = random.Random(seed), scheduler(num_slots), LeastRecentlyUsed(num_slots)
    for _ in range(40):
        for layer in range(4):
            routed = rng.sample(range(rng.choice((6, 16))), 4)
            (wave,) = run_layer(plans, layer, routed)
            assert [fetch.expert for fetch in wave.demand] == model.layer(layer, routed)


def test_recall_is_counted_by_ids_and_by_gate_mass() -> None:
    counters = Counters(3, RECORD_BYTES)
    routed, weights = np.array([[1, 2], [3, 4]]), np.array([[0.75, 0.25], [0.5, 0.5]])
    counters.foretell(1, np.array([[1, 9, 8], [4, 3, 0]]), routed, weights)
    counters.foretell(2, np.array([[1], [3]]), routed, weights)
    assert (counters.layers[1].recall, counters.layers[1].gate_mass_recall) == (0.75, 0.875)
    assert (counters.layers[1].speculated, counters.layers[0].recall) == (6, None)
    summary = counters.summary()
    assert summary["recall"] == {"all": 0.625, "mean": 0.625, "worst": 0.5, "worst_layer": 2}
    with pytest.raises(AssertionError, match="different tokens"):
        counters.foretell(1, np.array([[1]]), routed, weights)


def test_summary_and_table() -> None:
    plans = scheduler(12, num_layers=2)
    run_layer(plans, 0, [0, 1, 2, 3])
    land(plans, plans.prefetch(1, [0, 1, 2]))
    plans.refute(1, [0, 1, 5])
    run_layer(plans, 1, [0, 1, 5])
    counters = plans.counters
    counters.foretell(1, np.array([[0, 1, 2]]), np.array([[0, 1, 5]]), np.array([[0.5, 0.25, 0.25]]))
    counters.tokens, counters.wait_s = 2, 0.003
    counters.layers[0].left_out, counters.layers[0].left_out_mass = 1, 0.02
    summary = counters.summary()
    assert summary["bytes_per_token"] == {"demand": 2500.0, "used": 1000.0, "wasted": 500.0, "total": 4000.0}
    assert summary["hit_rate"] == {"all": 2 / 7, "mean": 1 / 3, "worst": 0.0, "worst_layer": 0}
    assert summary["wasted_share"] == 1 / 3
    assert summary["wait_ms_per_token"] == 1.5
    assert summary["left_out_share"] == 0.005
    assert json.loads(json.dumps(summary)) == summary
    counters.record_bytes = 9_437_184
    assert counters.lines() == [
        "experts                       all  layer mean        worst layer",
        "slot hit rate              28.6 %      33.3 %  0.0 % (layer   0)",
        "late prefetches             0.0 %       0.0 %  0.0 % (layer   0)",
        "speculation recall         66.7 %      66.7 % 66.7 % (layer   1)",
        "gate-mass recall           75.0 %      75.0 % 75.0 % (layer   1)",
        "fetched                    demand        used      wasted       total",
        "MB per token                23.59        9.44        4.72       37.75",
        "exposed transfer time        1.50 ms per token",
        "left out                        1 experts, 0.5 % of gate mass",
    ]


def test_a_table_of_nothing_is_its_head() -> None:
    counters = Counters(2, RECORD_BYTES)
    assert len(counters.lines()) == 1
    assert counters.summary()["bytes_per_token"]["total"] is None
