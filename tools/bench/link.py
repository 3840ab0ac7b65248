"""The link over which expert records come: how fast it is, and slower ones emulated by waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bench.measure import synchronize
from tritonmoe.errors import InputError
from tritonmoe.offload.copy_engine import Copy, CopyEngine, Priority, StreamCopies, ThreadCopies, copy_engine

MakeCopies = Callable[[torch.Tensor, Callable[[int, int], object]], CopyEngine]
SLEEP_CYCLES = 20_000_000  # about 10 ms of a GPU


@dataclass(frozen=True)
class Link:
    """`bytes_per_s` is measured; `emulated_gbps` is what was asked for, None for the machine's own link."""

    bytes_per_s: float
    emulated_gbps: float | None = None
    make_copies: MakeCopies = copy_engine

    @property
    def name(self) -> str:
        return "own link" if self.emulated_gbps is None else f"emulated {self.emulated_gbps:g} GB/s"


def own_link(records: Sequence[torch.Tensor], device: torch.device) -> Link:
    """The machine's link, by copies of host records [N] to the device, one after the other."""
    slots = _slots(records, device)
    times = []
    for _ in range(3):
        synchronize(device)
        began = time.perf_counter()
        for i, record in enumerate(records):
            slots[i].copy_(record, non_blocking=True)
        synchronize(device)
        times.append(time.perf_counter() - began)
    return Link(sum(record.nbytes for record in records) / min(times))


def emulated_link(records: Sequence[torch.Tensor], device: torch.device, gbps: float, own: Link) -> Link:
    """A link that brings no record sooner than `gbps` would. InputError where the machine's own is no faster."""
    num_bytes = records[0].nbytes
    period_s, own_s = num_bytes / (1e9 * gbps), num_bytes / own.bytes_per_s
    if own_s >= period_s:
        raise InputError(
            f"--link-gbps {gbps:g} cannot be emulated on a link of {own.bytes_per_s / 1e9:.3g} GB/s; use a lower one"
        )
    if device.type != "cuda":
        make: MakeCopies = partial(SlowThread, period_s)
        return Link(_engine_rate(make, records, device), gbps, make)
    per_second = _cycles_per_second(device)
    cycles = per_second * (period_s - own_s)
    # Once more with what the first try took: launching the waits costs time as well.
    taken_s = num_bytes / _engine_rate(partial(SlowStream, round(cycles)), records, device)
    make = partial(SlowStream, max(0, round(cycles + per_second * (period_s - taken_s))))
    return Link(_engine_rate(make, records, device), gbps, make)


class SlowStream(StreamCopies):
    """A GPU's copies with a wait after each on the stream that copies, before it counts as complete."""

    def __init__(self, cycles: int, slots: torch.Tensor, landed: Callable[[int, int], object]) -> None:
        super().__init__(slots, landed)
        self._cycles = cycles

    def _start(self, copy: Copy) -> None:
        super()._start(copy)
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(self._cycles)
        self._events[copy.slot].record(self._stream)  # nobody has seen it yet: it now comes after the wait


class SlowThread(ThreadCopies):
    """Copies within main memory, each of which takes at least `period_s`."""

    def __init__(self, period_s: float, slots: torch.Tensor, landed: Callable[[int, int], object]) -> None:
        super().__init__(slots, landed)
        self._period_s = period_s

    def _copy(self, copy: Copy) -> None:
        began = time.perf_counter()
        super()._copy(copy)
        time.sleep(max(0.0, self._period_s - (time.perf_counter() - began)))


def _engine_rate(make_copies: MakeCopies, records: Sequence[torch.Tensor], device: torch.device) -> float:
    """Bytes per second of records that a copy engine moves one after the other."""
    landed: list[int] = []
    copies = make_copies(_slots(records, device), lambda slot, _epoch: landed.append(slot))
    times = []
    for _ in range(2):
        synchronize(device)
        landed.clear()
        began = time.perf_counter()
        for i, record in enumerate(records):
            copies.submit(record, i, i, Priority.DEMAND)
        while len(landed) < len(records):
            copies.pump()
            time.sleep(0)  # lets a thread that copies go on
        times.append(time.perf_counter() - began)
    copies.close()
    return sum(record.nbytes for record in records) / min(times)


def _cycles_per_second(device: torch.device) -> float:
    """How fast the clock of `torch.cuda._sleep` goes."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first wakes the clock up
        synchronize(device)
        before.record()
        torch.cuda._sleep(SLEEP_CYCLES)
        after.record()
    synchronize(device)
    return 1e3 * SLEEP_CYCLES / before.elapsed_time(after)


def _slots(records: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.empty(len(records), records[0].numel(), dtype=records[0].dtype, device=device)
