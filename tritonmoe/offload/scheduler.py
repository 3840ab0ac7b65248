"""What to fetch for a layer, what ahead of it, and what must stay meanwhile.

A layer of a step, in the order of calls:

    refute(layer, routed)      its routing is known: what was foretold wrongly is let go
    plan(layer, routed)        its experts, in waves that fit the slots; per wave `next_wave`, then `finish`
    prefetch(later, ids)       at any time: what later layers are expected to want

The experts of a wave are pinned from `next_wave` until `finish`; what is foretold for a layer is pinned until the
layer's first wave, which pins what it wants of it. So whatever is needed is never evicted, and a demand fetch always
finds a slot: prefetching leaves `reserve` of them alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from tritonmoe.offload.counters import Counters
from tritonmoe.offload.slot_pool import Fetch, SlotPool


class Wave(NamedTuple):
    """Experts to compute with together. An expert is in one wave of its layer, with all of its tokens."""

    ready: dict[int, int]  # expert -> slot, resident
    late: dict[int, int]  # expert -> slot, in flight: awaited, not fetched again
    demand: list[Fetch]

    @property
    def missing(self) -> dict[int, int]:
        """expert -> slot of what a copy is awaited for."""
        return {**self.late, **{expert: slot for expert, slot, _ in self.demand}}

    @property
    def slots(self) -> list[int]:
        return [*self.ready.values(), *self.late.values(), *(fetch.slot for fetch in self.demand)]


class _Purpose(IntEnum):
    """Why a slot was last filled, as the counters have it; only a guess means anything once the copy has landed."""

    NOTHING = 0
    DEMAND = 1
    GUESS = 2  # prefetched, its layer has not run yet
    LATE = 3  # prefetched, and used
    WRONG = 4  # prefetched, and counted as wasted


class Scheduler:
    """Plans over one pool. `counters` may be exchanged while no wave is open and nothing is foretold."""

    def __init__(self, pool: SlotPool, counters: Counters, reserve: int = 1) -> None:
        """`reserve`: slots that prefetching never holds, so that the next layer's demand finds as many at once."""
        assert reserve >= 1, "without a slot for demand fetches a layer could wait for ever"
        self.pool = pool
        self.counters = counters
        self._reserve = reserve
        self._forget()

    def plan(self, layer: int, routed: Iterable[int], most: int | None = None, is_scan: bool = False) -> Plan:
        """The layer's waves over the distinct routed ids: one, where the slots suffice.

        A wave fetches until it has `most` experts; what is mapped already is in the first wave however much it is.
        `is_scan`: the layer wants most of its experts, as all layers do in turn. Then what it uses is no more recent
        for that, and what it fetches goes first: else each layer would evict what the same scan, or the next, needs.
        """
        assert most is None or most >= 1, "a wave has at least one expert"
        self.pool.tick()
        most = self.pool.num_slots if most is None else most
        return Plan(self, layer, list(dict.fromkeys(routed)), most, is_scan)

    def finish(self, layer: int, wave: Wave) -> None:
        """The wave's computation is enqueued, behind its copies: its slots may be taken again.

        Its copies count as landed. They may still be on their way, but whatever is ordered behind that computation,
        which the copy engine makes later copies into these slots be, finds them complete.
        """
        self._open.remove((layer, wave))
        pool = self.pool
        for slot in wave.late.values():
            pool.landed(slot, pool.epoch_of(slot))
        for _, slot, epoch in wave.demand:
            pool.landed(slot, epoch)
        pool.unpin(wave.slots)

    def prefetch(self, layer: int, speculated: Iterable[int], limit: int | None = None) -> list[Fetch]:
        """What to copy ahead of the layer, best first, at most `limit` records.

        Takes slots that nobody pinned, while more than `reserve` are left to demand once the open waves are finished.
        What is foretold and already mapped is pinned first, that it does not make room for the rest.
        """
        pool, guesses = self.pool, self._guesses[layer]
        # Held by guesses, or by copies that nobody wants any more: not to be had for demand. All else is.
        spare = pool.num_takeable + pool.num_pinned - self._num_guesses - self._reserve
        experts = [expert for expert in dict.fromkeys(speculated) if expert not in guesses]
        missing: list[int] = []
        kept: dict[int, int] = {}
        for expert, slot in zip(experts, pool.lookup_all(layer, experts), strict=True):
            if slot < 0:
                missing.append(expert)
            elif pool.is_in_flight(slot) and not pool.is_pinned(slot):
                kept[expert] = slot  # held already
            elif spare > 0:
                kept[expert] = slot
                spare -= 1
        self._guess(layer, kept)
        room = max(0, spare if limit is None else min(spare, limit))
        fetches = pool.take(layer, missing[:room])
        self._guess(layer, {fetch.expert: fetch.slot for fetch in fetches})
        for fetch in fetches:
            self._purpose[fetch.slot] = _Purpose.GUESS
        self.counters.layers[layer].prefetched += len(fetches)
        return fetches

    def refute(self, layer: int, routed: Iterable[int]) -> list[tuple[int, int]]:
        """Let go what was foretold for the layer and is not routed.

        Returns (slot, epoch) of what is still in flight of it: to be cancelled where that is possible, each then
        reported with `abort`, and else left to land.
        """
        guesses = self._guesses[layer]
        if not guesses:
            return []
        wanted = set(routed)
        wrong = [expert for expert in guesses if expert not in wanted]
        return [copy for expert in wrong if (copy := self._let_go(layer, expert)) is not None]

    def abort(self, slot: int, epoch: int) -> bool:
        """A copy was taken back before a byte of it moved: free its slot and count it. False if it is not awaited."""
        key = self.pool.key_of[slot] if slot < self.pool.num_slots else -1
        if not self.pool.abort(slot, epoch):
            return False
        counters = self.counters.layers[int(key) // self.pool.num_experts]
        purpose = self._purpose[slot]
        counters.cancelled += purpose is not _Purpose.DEMAND
        if purpose is _Purpose.WRONG:
            counters.prefetched_wasted -= 1
        elif purpose is _Purpose.DEMAND:  # of a step that was interrupted, as the next
            counters.demand -= 1
            counters.routed -= 1
        elif purpose is _Purpose.LATE:
            counters.prefetched_used -= 1
            counters.late -= 1
            counters.routed -= 1
        return True

    def abandon(self) -> list[tuple[int, int]]:
        """End a generation, or an interrupted step: no wave is open and nothing foretold any more.

        Returns (slot, epoch) of everything in flight, to be treated as `refute`'s.
        """
        for _, wave in self._open:
            self.pool.unpin(wave.slots)
        self._open.clear()
        for layer in range(self.pool.num_layers):
            self.refute(layer, ())
        return self.pool.in_flight()

    def resize(self, num_slots: int) -> None:
        """Another number of slots, all free; nothing may be in flight. For between generations."""
        copies = self.abandon()
        assert not copies, f"{len(copies)} copies are in flight; wait for them before the slots change"
        self.pool.resize(num_slots)
        self._forget()

    def check_integrity(self) -> None:
        """Raise an AssertionError that says what is wrong with the pool or the pins, if anything is."""
        self.pool.check_integrity()
        pins = [0] * self.pool.num_slots
        for _, wave in self._open:
            for slot in wave.slots:
                pins[slot] += 1
        for layer, guesses in enumerate(self._guesses):
            for expert, slot in guesses.items():
                assert self.pool.lookup(layer, expert) == slot, f"layer {layer}, expert {expert}: a guess lost its slot"
                pins[slot] += 1
        assert pins == self.pool.pins.tolist(), "a slot's pins are not those of open waves and guesses"
        assert self._num_guesses == sum(map(len, self._guesses)), "the count of guesses is wrong"

    def _next_wave(self, layer: int, pending: list[int], most: int, is_first: bool, is_scan: bool) -> Wave | None:
        """Pin and take for as many of `pending` as fit, and drop them from it."""
        pool, counters, purpose = self.pool, self.counters.layers[layer], self._purpose
        ready: dict[int, int] = {}
        late: dict[int, int] = {}
        missing: list[int] = []
        for expert, slot in zip(pending, pool.lookup_all(layer, pending), strict=True):
            if slot < 0:
                missing.append(expert)
                continue
            if pool.is_resident(slot):
                ready[expert] = slot
            else:
                late[expert] = slot
            if purpose[slot] is not _Purpose.NOTHING:
                self._confirm(layer, slot)
        present = [*ready.values(), *late.values()]
        pool.pin(present)
        if is_first:  # later ones are guesses about the layer's next step
            self._end_guessing(layer)
        demand = pool.take(layer, missing[: max(0, most - len(present))])
        fetched = [fetch.slot for fetch in demand]
        pool.pin(fetched)
        if not is_scan:
            pool.touch([*present, *fetched])
        for slot in fetched:
            purpose[slot] = _Purpose.DEMAND
        pending[:] = missing[len(demand) :]
        counters.hits += len(ready)
        counters.late += len(late)
        counters.demand += len(demand)
        counters.routed += len(present) + len(demand)
        if not present and not demand:
            assert self._open, f"none of {pool.num_slots} slots can be taken: all are pinned or in flight"
            return None
        wave = Wave(ready, late, demand)
        self._open.append((layer, wave))
        return wave

    def _forget(self) -> None:
        self._open: list[tuple[int, Wave]] = []  # waves planned and not finished
        self._guesses: list[dict[int, int]] = [{} for _ in range(self.pool.num_layers)]  # expert -> slot, pinned once
        self._num_guesses = 0
        self._purpose = [_Purpose.NOTHING] * self.pool.num_slots

    def _guess(self, layer: int, slots: dict[int, int]) -> None:
        self.pool.pin(slots.values())
        self._guesses[layer].update(slots)
        self._num_guesses += len(slots)

    def _let_go(self, layer: int, expert: int) -> tuple[int, int] | None:
        """Drop a wrong guess; its copy, if that is in flight."""
        slot = self._guesses[layer].pop(expert)
        self._num_guesses -= 1
        self.pool.unpin((slot,))
        if self._purpose[slot] is _Purpose.GUESS:
            self.counters.layers[layer].prefetched_wasted += 1
            self._purpose[slot] = _Purpose.WRONG
        if self.pool.is_in_flight(slot):
            return slot, self.pool.epoch_of(slot)
        return None

    def _confirm(self, layer: int, slot: int) -> None:
        """The layer uses the slot: if that was prefetched, count it so."""
        counters, purpose = self.counters.layers[layer], self._purpose[slot]
        is_in_flight = self.pool.is_in_flight(slot)
        if purpose is _Purpose.GUESS:
            counters.prefetched_used += 1
        elif purpose is _Purpose.WRONG and is_in_flight:  # right after all, a step later
            counters.prefetched_wasted -= 1
            counters.prefetched_used += 1
        elif is_in_flight:
            return
        self._purpose[slot] = _Purpose.LATE if is_in_flight else _Purpose.NOTHING

    def _end_guessing(self, layer: int) -> None:
        """The layer's first wave has pinned what it wants of what was foretold; the rest, if `refute` was not called,
        is wrong."""
        guesses = self._guesses[layer]
        for expert in [expert for expert, slot in guesses.items() if self._purpose[slot] is _Purpose.GUESS]:
            self._let_go(layer, expert)
        self.pool.unpin(guesses.values())
        self._num_guesses -= len(guesses)
        guesses.clear()


class Plan:
    """A layer's experts that are still to be put into waves."""

    def __init__(self, scheduler: Scheduler, layer: int, pending: list[int], most: int, is_scan: bool) -> None:
        self._scheduler = scheduler
        self._layer = layer
        self._pending = pending
        self._most = most
        self._is_scan = is_scan
        self._is_first = True

    @property
    def is_done(self) -> bool:
        """Whether every expert has its wave."""
        return not self._pending

    def next_wave(self) -> Wave | None:
        """The next experts, now pinned. The first wave has all that are mapped already.

        May be called before the previous wave is finished. None when all have their wave, or when no slot can be had
        before an open wave is finished.
        """
        if not self._pending:
            return None
        is_first, self._is_first = self._is_first, False
        return self._scheduler._next_wave(self._layer, self._pending, self._most, is_first, self._is_scan)
