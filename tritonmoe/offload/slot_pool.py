"""Which expert is in which slot: the one owner of residency.

A slot is a record-sized buffer on the device that computes, shared by all layers. It is FREE, IN_FLIGHT (a copy into it
was planned and is not known to be complete) or RESIDENT. Nothing here moves a byte, and nothing else decides what a
slot holds.

The state is arrays of integers and every rule is one line over them, for a kernel has to decide the same:

* `take` gives the slot with the least rank, the lowest slot where ranks are equal. The rank of a FREE slot is -1, of a
  RESIDENT slot that nobody pinned its score, of any other slot NEVER.
* The score of a slot is 0 until it is used: a guess that nobody confirmed is the first victim, so that wrong guesses
  drive each other out and not what was used. A use at tick t sets it
      lru:  score = t
      lfu:  score = t + num_layers * uses
  where `uses` counts the uses of that expert, this one included, over all its stays in slots, and is halved (rounded
  down) for all experts every HALF_LIFE steps. So one more use of late keeps an expert one step longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tritonmoe_kernels.planner_state import EVICTIONS, HALF_LIFE

FREE, IN_FLIGHT, RESIDENT = 0, 1, 2
NEVER = np.iinfo(np.int64).max  # the rank of what must not be taken


class Fetch(NamedTuple):
    """A copy to make: the expert's record into the slot, to be reported with the epoch."""

    expert: int
    slot: int
    epoch: int


class SlotPool:
    """The map between experts and slots, with recency, frequency and pins. Ids out of range are IndexErrors."""

    def __init__(self, num_slots: int, num_layers: int, num_experts: int, eviction: str = "lru") -> None:
        """A step is `num_layers` ticks; `eviction` is one of EVICTIONS."""
        assert eviction in EVICTIONS, f"eviction {eviction!r} is none of {EVICTIONS}"
        assert num_layers >= 1, "no layers"
        assert num_experts >= 1, "no experts"
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.eviction = eviction
        self.last_epoch = 0  # never starts again: a copy planned before a resize must stay unknown after it
        self.resize(num_slots)

    def resize(self, num_slots: int) -> None:
        """Forget everything and have `num_slots` free slots; for between generations."""
        assert num_slots >= 1, f"{num_slots} slots; at least 1 is needed"
        num_keys = self.num_layers * self.num_experts
        self.num_slots = num_slots
        self.clock = 0
        self.num_takeable = num_slots  # FREE, or RESIDENT and not pinned
        self.num_pinned = 0
        self.slot_of = np.full((self.num_layers, self.num_experts), -1, dtype=np.int64)
        self.uses = np.zeros((self.num_layers, self.num_experts), dtype=np.int64)
        self.key_of = np.full(num_slots, -1, dtype=np.int64)  # layer * num_experts + expert
        self.state = np.full(num_slots, FREE, dtype=np.int64)
        self.score = np.zeros(num_slots, dtype=np.int64)
        self.rank = np.full(num_slots, -1, dtype=np.int64)
        self.pins = np.zeros(num_slots, dtype=np.int64)
        self.epoch = np.zeros(num_slots, dtype=np.int64)
        # The same memory, to read and write single entries at two thirds of the price of indexing an array.
        self._slot_of, self._uses = self.slot_of.reshape(num_keys).data, self.uses.reshape(num_keys).data
        self._key_of, self._state, self._score = self.key_of.data, self.state.data, self.score.data
        self._rank, self._pins, self._epoch = self.rank.data, self.pins.data, self.epoch.data

    def adopt(self, key_of: np.ndarray, score: np.ndarray, uses: np.ndarray, clock: int) -> None:
        """Take over what somebody else has put into the slots, none pinned: of each slot the key, -1 where it is free,
        and the score; the uses [L, E]; the clock."""
        mapped = np.flatnonzero(key_of >= 0)
        self.resize(self.num_slots)
        self.clock = clock
        self.uses[...] = uses
        self.key_of[...] = key_of
        self.slot_of.ravel()[key_of[mapped]] = mapped
        self.state[mapped] = RESIDENT
        self.score[mapped] = self.rank[mapped] = score[mapped]

    def lookup(self, layer: int, expert: int) -> int:
        """The slot, in flight or resident, or -1."""
        return self._slot_of[self._keys(layer, (expert,))[0]]

    def lookup_all(self, layer: int, experts: Sequence[int]) -> list[int]:
        """`lookup` of each."""
        slot_of = self._slot_of
        return [slot_of[key] for key in self._keys(layer, experts)]

    def resident(self, layer: int) -> np.ndarray:
        """[E]: the slots of the layer's experts, -1 where one is not resident."""
        slots = self.slot_of[layer]
        return np.where((slots >= 0) & (self.state[slots] == RESIDENT), slots, -1)

    def is_resident(self, slot: int) -> bool:
        """Whether the last byte of the slot's record has landed."""
        return self._state[slot] == RESIDENT

    def is_in_flight(self, slot: int) -> bool:
        """Whether a copy into the slot was planned and neither landed nor was aborted."""
        return self._state[slot] == IN_FLIGHT

    def is_pinned(self, slot: int) -> bool:
        """Whether the slot must not be taken for another expert."""
        return self._pins[slot] > 0

    def epoch_of(self, slot: int) -> int:
        """The epoch of the last copy into the slot."""
        return self._epoch[slot]

    def in_flight(self) -> list[tuple[int, int]]:
        """(slot, epoch) of every copy that is awaited, by slot."""
        slots = np.flatnonzero(self.state == IN_FLIGHT)
        return list(zip(slots.tolist(), self.epoch[slots].tolist(), strict=True))

    def take(self, layer: int, experts: Sequence[int]) -> list[Fetch]:
        """One expert after the other: map it to the slot of least rank and set that IN_FLIGHT; the slot's former owner
        is unmapped at once.

        Ends early where no slot may be taken. The experts must not be mapped already.
        """
        fetches: list[Fetch] = []
        slot_of = self._slot_of
        for expert, key in zip(experts, self._keys(layer, experts), strict=True):
            assert slot_of[key] < 0, f"layer {layer}, expert {expert} has a slot already"
            if self.num_takeable == 0:
                break
            slot = int(self.rank.argmin())  # the first of equals
            former = self._key_of[slot]
            if former >= 0:
                slot_of[former] = -1
            self.last_epoch = epoch = self.last_epoch + 1
            self.num_takeable -= 1
            slot_of[key] = slot
            self._key_of[slot] = key
            self._state[slot] = IN_FLIGHT
            self._score[slot] = 0
            self._rank[slot] = NEVER
            self._epoch[slot] = epoch
            fetches.append(Fetch(expert, slot, epoch))
        return fetches

    def landed(self, slot: int, epoch: int) -> bool:
        """The copy is complete: the slot becomes RESIDENT. False, and no change, for a copy that is not awaited."""
        if not self._is_awaited(slot, epoch):
            return False
        self._state[slot] = RESIDENT
        if self._pins[slot] == 0:
            self._rank[slot] = self._score[slot]
            self.num_takeable += 1
        return True

    def abort(self, slot: int, epoch: int) -> bool:
        """The copy was taken back: the slot becomes FREE. False, and no change, for a copy that is not awaited.

        The slot must not be pinned: somebody counts on its expert.
        """
        if not self._is_awaited(slot, epoch):
            return False
        assert self._pins[slot] == 0, f"slot {slot} is pinned; its copy cannot be taken back"
        self._slot_of[self._key_of[slot]] = -1
        self._key_of[slot] = -1
        self._state[slot] = FREE
        self._rank[slot] = -1
        self.num_takeable += 1
        return True

    def touch(self, slots: Iterable[int]) -> None:
        """The slots' experts are used now, at the clock's tick."""
        is_lfu, ranks, scores = self.eviction == "lfu", self._rank, self._score
        for slot in slots:
            score = self.clock
            if is_lfu:
                key = self._key_of[slot]
                uses = self._uses[key] = self._uses[key] + 1
                score += self.num_layers * uses
            scores[slot] = score
            if ranks[slot] != NEVER:
                ranks[slot] = score

    def pin(self, slots: Iterable[int]) -> None:
        """Keep the slots' experts until as many `unpin`s."""
        all_pins, states = self._pins, self._state
        for slot in slots:
            pins = all_pins[slot]
            if pins == 0:
                state = states[slot]
                assert state != FREE, f"slot {slot} is free; there is nothing to pin"
                self.num_pinned += 1
                if state == RESIDENT:
                    self._rank[slot] = NEVER
                    self.num_takeable -= 1
            all_pins[slot] = pins + 1

    def unpin(self, slots: Iterable[int]) -> None:
        """Undo one `pin` of each."""
        all_pins, states = self._pins, self._state
        for slot in slots:
            pins = all_pins[slot] - 1
            assert pins >= 0, f"slot {slot} is not pinned"
            all_pins[slot] = pins
            if pins == 0:
                self.num_pinned -= 1
                if states[slot] == RESIDENT:
                    self._rank[slot] = self._score[slot]
                    self.num_takeable += 1

    def tick(self) -> None:
        """Advance the clock: once per layer of a step."""
        self.clock += 1
        if self.eviction == "lfu" and self.clock % (HALF_LIFE * self.num_layers) == 0:
            self.uses >>= 1

    def check_integrity(self) -> None:
        """Raise an AssertionError that says what is wrong, if anything is."""
        mapped = np.flatnonzero(self.slot_of.ravel() >= 0)
        slots = self.slot_of.ravel()[mapped]
        assert (slots < self.num_slots).all(), "slot pool: an expert is mapped to a slot that does not exist"
        is_free, is_pinned = self.state == FREE, self.pins > 0
        is_takeable = is_free | ((self.state == RESIDENT) & ~is_pinned)
        in_flight = self.epoch[self.state == IN_FLIGHT]
        rank = np.where(is_takeable, np.where(is_free, -1, self.score), NEVER)
        rules = {
            "a slot has an unknown state": np.isin(self.state, (FREE, IN_FLIGHT, RESIDENT)).all(),
            "two experts are mapped to one slot": len(np.unique(slots)) == len(slots),
            "a slot's owner is not mapped to it": (self.key_of[slots] == mapped).all(),
            "a slot without an expert is not free, or a free one has an expert": ((self.key_of < 0) == is_free).all(),
            "there are more or fewer owners than experts mapped": (self.key_of >= 0).sum() == len(mapped),
            "a slot has fewer than 0 pins": (self.pins >= 0).all(),
            "a free slot is pinned": not (is_free & is_pinned).any(),
            "a rank is not what state, pins and score make it": (self.rank == rank).all(),
            "a score lies in the future": self.eviction == "lfu" or (self.score <= self.clock).all(),
            "the count of takeable slots is wrong": self.num_takeable == is_takeable.sum(),
            "the count of pinned slots is wrong": self.num_pinned == is_pinned.sum(),
            "two copies in flight have one epoch": len(np.unique(in_flight)) == len(in_flight),
            "an epoch was never given": (self.epoch <= self.last_epoch).all(),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        assert not broken, "slot pool: " + "; ".join(broken)

    def _keys(self, layer: int, experts: Sequence[int]) -> list[int]:
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} of {self.num_layers}")
        first, num_experts = layer * self.num_experts, self.num_experts
        keys = [first + expert for expert in experts if 0 <= expert < num_experts]
        if len(keys) != len(experts):
            raise IndexError(f"an expert of {list(experts)} is not one of {num_experts}")
        return keys

    def _is_awaited(self, slot: int, epoch: int) -> bool:
        """A copy planned before a resize may name a slot that there is no more."""
        return slot < self.num_slots and self._state[slot] == IN_FLIGHT and self._epoch[slot] == epoch
