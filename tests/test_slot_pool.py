"""The owner of residency: each rule by itself, then all of them against a naive model on random operations."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonmoe.offload.slot_pool import FREE, HALF_LIFE, IN_FLIGHT, RESIDENT, Fetch, SlotPool


def filled(num_slots: int, eviction: str = "lru") -> SlotPool:
    """Experts 0, 1, … of layer 0 in slots 0, 1, …, used at ticks 1, 2, …"""
    pool = SlotPool(num_slots, 2, 16, eviction)
    for expert in range(num_slots):
        pool.tick()
        (fetch,) = pool.take(0, [expert])
        assert pool.landed(fetch.slot, fetch.epoch)
        pool.touch([fetch.slot])
    return pool


def test_free_slots_are_taken_lowest_first() -> None:
    pool = SlotPool(3, 1, 8)
    assert pool.take(0, [5, 2]) == [Fetch(5, 0, 1), Fetch(2, 1, 2)]
    assert pool.abort(0, 1)
    assert pool.take(0, [7, 6, 4]) == [Fetch(7, 0, 3), Fetch(6, 2, 4)]  # and no more: all are in flight
    pool.check_integrity()


def test_a_slot_is_mapped_before_it_is_resident() -> None:
    pool = SlotPool(2, 1, 4)
    (fetch,) = pool.take(0, [3])
    assert pool.lookup(0, 3) == fetch.slot
    assert pool.lookup_all(0, [0, 3]) == [-1, fetch.slot]
    assert not pool.is_resident(fetch.slot)
    assert pool.in_flight() == [(fetch.slot, fetch.epoch)]
    assert pool.landed(fetch.slot, fetch.epoch)
    assert pool.is_resident(fetch.slot)
    assert not pool.in_flight()


def test_the_least_recently_used_is_the_victim_and_unmapped_at_once() -> None:
    pool = filled(3)
    pool.tick()
    pool.touch([0])
    (fetch,) = pool.take(1, [9])
    assert fetch.slot == 1
    assert pool.lookup(0, 1) == -1
    assert pool.lookup(1, 9) == 1
    pool.check_integrity()


def test_of_equals_the_lowest_slot_is_the_victim() -> None:
    pool = filled(4)
    pool.tick()
    pool.touch([3, 1, 0, 2])
    assert [fetch.slot for fetch in pool.take(1, [0, 1, 2, 3])] == [0, 1, 2, 3]


def test_what_was_never_used_is_the_first_victim() -> None:
    pool = filled(3)
    (guess,) = pool.take(1, [0])
    pool.landed(guess.slot, guess.epoch)
    assert guess.slot == 0
    assert pool.take(1, [1])[0].slot == 0  # though it is the youngest


def test_a_pinned_slot_is_never_a_victim() -> None:
    pool = filled(2)
    pool.pin([0, 1, 0])
    assert pool.num_takeable == 0
    assert pool.take(1, [0]) == []
    pool.unpin([0])
    assert pool.take(1, [0]) == []
    pool.unpin([0])
    assert pool.take(1, [0])[0].slot == 0
    pool.check_integrity()


def test_a_stale_epoch_changes_nothing() -> None:
    pool = SlotPool(1, 1, 4)
    (first,) = pool.take(0, [0])
    assert pool.abort(0, first.epoch)
    (second,) = pool.take(0, [1])
    assert not pool.landed(0, first.epoch)
    assert not pool.abort(0, first.epoch)
    assert not pool.is_resident(0)
    assert pool.landed(0, second.epoch)
    assert not pool.landed(0, second.epoch)
    assert not pool.abort(0, second.epoch)
    assert pool.is_resident(0)
    pool.check_integrity()


def test_a_copy_from_before_a_resize_is_unknown_after_it() -> None:
    pool = SlotPool(4, 1, 8)
    old = pool.take(0, [0, 1, 2, 3])
    pool.resize(2)
    assert pool.lookup(0, 0) == -1
    new = pool.take(0, [4, 5])
    assert not any(pool.landed(fetch.slot, fetch.epoch) for fetch in old)
    assert not any(pool.is_resident(fetch.slot) for fetch in new)
    pool.check_integrity()


def test_frequency_keeps_an_expert_a_step_for_each_use() -> None:
    pool = filled(2, "lfu")  # both used once, the second later
    pool.touch([0])
    pool.tick()
    pool.tick()
    pool.touch([1])
    assert pool.score.tolist() == [2 + 2 * 2, 4 + 2 * 2]
    pool.touch([0])
    assert pool.take(1, [0])[0].slot == 1


def test_uses_are_forgotten_by_halves_and_outlive_the_stay_in_a_slot() -> None:
    pool = filled(1, "lfu")
    pool.touch([0] * 6)
    (fetch,) = pool.take(1, [0])
    pool.landed(fetch.slot, fetch.epoch)
    assert pool.uses[0, 0] == 7
    while pool.clock < HALF_LIFE * pool.num_layers:
        pool.tick()
    assert pool.uses[0, 0] == 3


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda pool: pool.take(0, [0]), "has a slot already"),
        (lambda pool: pool.unpin([0]), "is not pinned"),
        (lambda pool: pool.pin([2]), "is free"),
        (lambda pool: (pool.pin([1]), pool.abort(1, pool.epoch_of(1))), "cannot be taken back"),
        (lambda pool: pool.resize(0), "at least 1"),
        (lambda pool: SlotPool(1, 1, 1, "fifo"), "fifo"),
    ],
)
def test_misuse_is_told(misuse, message: str) -> None:
    pool = SlotPool(3, 1, 4)
    pool.take(0, [0, 1])
    with pytest.raises(AssertionError, match=message):
        misuse(pool)


@pytest.mark.parametrize(("layer", "expert"), [(-1, 0), (2, 0), (0, -1), (0, 4)])
def test_ids_out_of_range_are_told(layer: int, expert: int) -> None:
    pool = SlotPool(1, 2, 4)
    with pytest.raises(IndexError):
        pool.lookup(layer, expert)
    with pytest.raises(IndexError):
        pool.take(layer, [expert])


@pytest.mark.parametrize(
    ("array", "index", "value"),
    [
        ("state", 0, FREE),
        ("state", 0, IN_FLIGHT),
        ("state", 2, RESIDENT),
        ("state", 0, 7),
        ("key_of", 0, 5),
        ("key_of", 0, -1),
        ("slot_of", (0, 0), 1),
        ("slot_of", (0, 0), -1),
        ("slot_of", (1, 3), 0),
        ("slot_of", (1, 3), 99),
        ("pins", 0, 1),
        ("pins", 0, -1),
        ("pins", 2, 1),
        ("score", 0, 5),
        ("rank", 0, 5),
        ("epoch", 0, 99),
        ("epoch", 3, 4),
    ],
)
def test_damage_is_found(array: str, index, value: int) -> None:
    pool = filled(2)
    pool.resize(5)
    for slot, epoch in [(f.slot, f.epoch) for f in pool.take(0, [0, 1])]:
        pool.landed(slot, epoch)
    pool.take(1, [0, 1, 2])
    pool.abort(2, pool.epoch_of(2))
    pool.check_integrity()
    if (array, index) == ("epoch", 3):
        value = pool.epoch_of(4)
    getattr(pool, array)[index] = value
    with pytest.raises(AssertionError, match="slot pool: "):
        pool.check_integrity()


class NaivePool:
    """The rules once more, with a record per slot and a search through all of them."""

    def __init__(self, num_slots: int, num_layers: int, eviction: str) -> None:
        self.slots = [{"key": None, "state": FREE, "pins": 0, "score": 0, "epoch": 0} for _ in range(num_slots)]
        self.uses: dict[tuple[int, int], int] = {}
        self.clock = self.epoch = 0
        self.num_layers, self.eviction = num_layers, eviction

    def take(self, key: tuple[int, int]) -> int | None:
        free = [i for i, slot in enumerate(self.slots) if slot["state"] == FREE]
        victims = [i for i, s in enumerate(self.slots) if s["state"] == RESIDENT and not s["pins"]]
        if not free and not victims:
            return None
        i = free[0] if free else min(victims, key=lambda i: (self.slots[i]["score"], i))
        self.epoch += 1
        self.slots[i] = {"key": key, "state": IN_FLIGHT, "pins": 0, "score": 0, "epoch": self.epoch}
        return i

    def touch(self, i: int) -> None:
        slot = self.slots[i]
        self.uses[slot["key"]] = self.uses.get(slot["key"], 0) + 1
        slot["score"] = self.clock + (self.num_layers * self.uses[slot["key"]] if self.eviction == "lfu" else 0)

    def tick(self) -> None:
        self.clock += 1
        if self.clock % (HALF_LIFE * self.num_layers) == 0:
            self.uses = {key: uses // 2 for key, uses in self.uses.items()}


@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 3), st.integers(1, 6), st.sampled_from(["lru", "lfu"]))
@settings(max_examples=100, deadline=None)
def test_random_operations_do_what_the_naive_pool_does(
    seed: int, num_slots: int, num_layers: int, num_experts: int, eviction: str
) -> None:
    rng = random.Random(seed)
    pool, naive = SlotPool(num_slots, num_layers, num_experts, eviction), NaivePool(num_slots, num_layers, eviction)
    for _ in range(200):
        operation = rng.choice(("take", "take", "land", "land", "abort", "touch", "touch", "pin", "unpin", "tick"))
        slot = rng.randrange(num_slots)
        model = naive.slots[slot]
        key = rng.randrange(num_layers), rng.randrange(num_experts)
        epoch = model["epoch"] if rng.random() < 0.8 else rng.randrange(naive.epoch + 1)
        is_awaited = model["state"] == IN_FLIGHT and model["epoch"] == epoch
        if operation == "take" and all(s["key"] != key for s in naive.slots):
            expected = naive.take(key)
            fetches = pool.take(key[0], [key[1]])
            assert fetches == ([] if expected is None else [Fetch(key[1], expected, naive.epoch)])
        elif operation == "land":
            assert pool.landed(slot, epoch) == is_awaited
            if is_awaited:
                model["state"] = RESIDENT
        elif operation == "abort" and not (is_awaited and model["pins"]):
            assert pool.abort(slot, epoch) == is_awaited
            if is_awaited:
                model.update(state=FREE, key=None)
        elif operation == "touch" and model["state"] != FREE:
            pool.touch([slot])
            naive.touch(slot)
        elif operation == "pin" and model["state"] != FREE:
            pool.pin([slot])
            model["pins"] += 1
        elif operation == "unpin" and model["pins"]:
            pool.unpin([slot])
            model["pins"] -= 1
        elif operation == "tick":
            for _ in range(rng.choice((1, 1, 40))):
                pool.tick()
                naive.tick()
        pool.check_integrity()
        assert pool.state.tolist() == [s["state"] for s in naive.slots]
        assert pool.pins.tolist() == [s["pins"] for s in naive.slots]
        for s, (i, owner) in zip(naive.slots, enumerate(pool.key_of.tolist()), strict=True):
            assert (owner < 0) == (s["key"] is None)
            assert s["key"] is None or pool.lookup(*s["key"]) == i
            assert s["state"] == FREE or pool.score[i] == s["score"]


def test_single_entries_and_arrays_are_one_memory() -> None:
    """Entries are written through views; an array that was replaced by another would no longer change."""
    pool = filled(3)
    assert pool.key_of.tolist() == [0, 1, 2]
    assert np.array_equal(pool.slot_of[0, :4], [0, 1, 2, -1])
    assert pool.score.tolist() == [1, 2, 3] == pool.rank.tolist()
