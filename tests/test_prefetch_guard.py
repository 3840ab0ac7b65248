"""When fetching ahead is stopped."""

from __future__ import annotations

import numpy as np

from tritonmoe.offload.prefetch_guard import LEAST_RECORDS, PrefetchGuard

RECORD = 100
LEAST = LEAST_RECORDS * RECORD


def guard(layers: int = 3) -> PrefetchGuard:
    nothing = np.zeros(layers, dtype=np.int64)
    return PrefetchGuard(RECORD, nothing, nothing)


def test_stops_layers_that_waste_as_much_as_they_use() -> None:
    one = guard()
    assert one.look(np.array([LEAST, LEAST // 2, LEAST // 2 - RECORD]), np.array([0, LEAST // 2, LEAST // 2]))
    assert one.is_off.tolist() == [False, True, False]  # the last has not fetched enough to be judged
    line = one.line()
    assert line is not None
    assert "stopped for layer 1;" in line


def test_judges_what_is_new() -> None:
    """A layer that was good for long is stopped soon after it becomes bad."""
    one = guard(1)
    assert not one.look(np.array([100 * LEAST]), np.array([0]))
    assert not one.look(np.array([100 * LEAST]), np.array([LEAST - 1]))
    assert one.look(np.array([100 * LEAST]), np.array([LEAST]))
    assert one.is_off.all()


def test_says_once_that_it_stopped_and_counts_from_what_was_before() -> None:
    before = np.array([7 * LEAST])
    one = PrefetchGuard(RECORD, before, before)
    assert not one.look(before, before)
    assert one.line() is None
    assert one.look(before, before + LEAST)
    assert not one.look(before, before + 2 * LEAST)


def test_many_layers_are_not_all_listed() -> None:
    one = guard(40)
    one.look(np.zeros(40, dtype=np.int64), np.full(40, LEAST))
    assert "layers 0, 1, 2, 3, 4, 5, 6, 7, … (40);" in str(one.line())
