"""Captures and what else happens in the process meanwhile."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from tritonmoe.model.pinned_memory import mapped_tensor
from tritonmoe.model.step_graph import StepGraph, without_collection


class Cycle:
    """What only a collection ends."""

    def __init__(self, held: object) -> None:
        self.held, self.itself = held, self


def make_garbage() -> None:
    """Enough of it that a collection would begin."""
    for _ in range(20_000):
        Cycle(None)


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_meanwhile_and_all_is_as_it_was_afterwards(enabled: bool) -> None:
    was_enabled, collections = gc.isenabled(), []

    def failing() -> None:
        with without_collection():
            for _ in range(2):
                collections.append(gc.get_stats()[0]["collections"])
                make_garbage()
            raise KeyError

    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError):
            failing()
        assert collections[0] == collections[1]
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_two_captures_take_turns() -> None:
    inside, overlaps = [], []

    def capture() -> None:
        for _ in range(200):
            with without_collection():
                inside.append(1)
                overlaps.append(len(inside) > 1 or gc.isenabled())
                inside.pop()

    threads = [threading.Thread(target=capture) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(overlaps) == 600
    assert not any(overlaps)
    assert gc.isenabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_memory_that_is_garbage_does_not_end_a_capture() -> None:
    device = torch.device("cuda")
    x = torch.zeros(4, device=device)
    gc.collect()
    Cycle(mapped_tensor((1024,), torch.float32, device))

    def step() -> None:
        x.add_(1.0)
        make_garbage()

    graph = StepGraph()
    graph.capture(step, lambda: None)
    graph.replay()
    assert x.tolist() == [1.0] * 4
    gc.collect()
