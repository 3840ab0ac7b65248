"""Moves expert records from host memory into slots: the one owner of copy streams, events and their order.

A copy is `submit`ted with a priority and can be cancelled until it starts: on demand at the next `pump`, ahead when
fewer than `depth` copies are under way, so that few are in front of what is demanded next. What computes calls `wait`
before it reads slots and `release` after it has enqueued the last read of them; a copy into a released slot waits for
that read. On a GPU both are events between streams, so the host never waits; on a CPU a thread copies beside the one
that computes. Where the host does wait it is for `timeout_s` at most: then, and when a copy fails, TransferError names
what was copied.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from queue import SimpleQueue

import torch

from tritonmoe.errors import TransferError
from tritonmoe.waiting import COPY_TIMEOUT_S, await_until

ALIVE_S = 0.2  # between two looks whether the thread that is waited for still runs
DEPTH = 3  # copies under way that leave room for a prefetch: the link is busy until the host looks again
Task = tuple[Future[object], Callable[..., object], tuple[object, ...]]


class Priority(IntEnum):
    DEMAND = 0
    PREFETCH = 1


@dataclass(frozen=True, eq=False)
class Copy:
    """A record on its way into a slot."""

    record: torch.Tensor  # [N] on the host
    slot: int
    epoch: int


class CopyEngine:
    """The queue; how a copy is made is a subclass's."""

    def __init__(self, slots: torch.Tensor, landed: Callable[[int, int], object]) -> None:
        """`slots` [S, N] on the device that computes; `landed(slot, epoch)` is told of each copy that is complete."""
        self._slots = slots
        self.landed = landed
        self.depth = DEPTH
        self._queues: dict[Priority, deque[Copy]] = {priority: deque() for priority in Priority}
        self._started: dict[int, Copy] = {}  # by slot, in the order of their start
        self.num_copies = 0
        self.timeout_s = COPY_TIMEOUT_S
        self.name: Callable[[int], str] = "slot {}".format  # what is copied into a slot, for errors

    def submit(self, record: torch.Tensor, slot: int, epoch: int, priority: Priority) -> None:
        """Queue a copy; `pump` starts it."""
        self._queues[priority].append(Copy(record, slot, epoch))

    def cancel(self, slot: int, epoch: int) -> bool:
        """Take a copy back that has not started; False where it is too late."""
        for queue in self._queues.values():
            for copy in queue:
                if copy.slot == slot and copy.epoch == epoch:
                    queue.remove(copy)
                    return True
        return False

    def pump(self) -> None:
        """Report what has landed, start what may start. Cheap: to be called whenever the host has nothing to do."""
        for slot in [slot for slot, copy in self._started.items() if self._is_done(copy)]:
            copy = self._started.pop(slot)
            self.landed(copy.slot, copy.epoch)
        demand, ahead = self._queues[Priority.DEMAND], self._queues[Priority.PREFETCH]
        while demand:
            self._begin(demand.popleft())
        while ahead and len(self._started) < self.depth:
            self._begin(ahead.popleft())

    def wait(self, slots: Iterable[int]) -> None:
        """Make what is computed from now on wait for the copies into these slots, starting them if need be."""
        for slot in slots:
            for queue in self._queues.values():
                queued = next((copy for copy in queue if copy.slot == slot), None)
                if queued is not None:
                    queue.remove(queued)
                    self._begin(queued)
            copy = self._started.get(slot)
            if copy is not None:
                self._await(copy)

    def release(self, slots: Iterable[int]) -> None:
        """Everything enqueued so far may read these slots; later copies into them come after it."""

    def drain(self) -> None:
        """Wait until nothing is queued or under way."""
        while self._started or any(self._queues.values()):
            self.pump()
            for copy in list(self._started.values()):
                self._finish(copy)

    def close(self) -> None:
        """Drop what is queued and wait for what is under way."""
        self.reset()

    def reset(self) -> None:
        """Forget every copy, once none is under way; whatever an exception left of the bookkeeping."""
        for queue in self._queues.values():
            queue.clear()
        self._quiesce()
        self._started.clear()

    def under_way(self) -> list[str]:
        """The names of what is being copied."""
        return [self.name(slot) for slot in self._started]

    def waited_s(self) -> float:
        """Seconds that the computation has waited for copies since the last call, the exposed transfer time."""
        raise NotImplementedError

    def _quiesce(self) -> None:
        """Wait, on the host, until no copy is under way."""
        raise NotImplementedError

    def _begin(self, copy: Copy) -> None:
        self.num_copies += 1
        self._started[copy.slot] = copy
        self._start(copy)

    def _start(self, copy: Copy) -> None:
        raise NotImplementedError

    def _is_done(self, copy: Copy) -> bool:
        """Whether the record is in its slot; raises where it never will be."""
        raise NotImplementedError

    def _await(self, copy: Copy) -> None:
        """Order the computation after the copy."""
        raise NotImplementedError

    def _finish(self, copy: Copy) -> None:
        """Wait, on the host, until the copy is complete."""
        raise NotImplementedError


class StreamCopies(CopyEngine):
    """Copies on a CUDA stream of their own, ordered against the current stream by events."""

    def __init__(self, slots: torch.Tensor, landed: Callable[[int, int], object]) -> None:
        super().__init__(slots, landed)
        self._stream = torch.cuda.Stream(slots.device)
        self._events: dict[int, torch.cuda.Event] = {}  # of the last copy into a slot
        self._reads: dict[int, torch.cuda.Event] = {}  # after the last read of a slot
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # before and after each wait
        self._waited_s = 0.0  # of waits that are over

    def wait(self, slots: Iterable[int]) -> None:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        super().wait(slots)
        after.record()
        self._waits.append((before, after))
        self._sum_waits()

    def waited_s(self) -> float:
        if self._waits:
            self._until(self._waits[-1][1].query, "the computation that waits for copies")
        self._sum_waits()
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def _sum_waits(self) -> None:
        """Add up the waits that are over, so that few events are ever alive."""
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._waited_s += before.elapsed_time(after) / 1e3

    def _quiesce(self) -> None:
        self._until(self._stream.query, f"the copies under way ({', '.join(self.under_way()) or 'none is known'})")
        self._until(torch.cuda.current_stream().query, "the computation on the device")
        self._reads.clear()
        self._waits.clear()
        self._waited_s = 0.0

    def release(self, slots: Iterable[int]) -> None:
        event = torch.cuda.Event()
        event.record()
        self._reads.update((slot, event) for slot in slots)

    def _start(self, copy: Copy) -> None:
        read = self._reads.pop(copy.slot, None)
        if read is not None:
            self._stream.wait_event(read)
        with torch.cuda.stream(self._stream):
            self._slots[copy.slot].copy_(copy.record, non_blocking=True)
            event = self._events[copy.slot] = torch.cuda.Event()
            event.record()

    def _is_done(self, copy: Copy) -> bool:
        return self._events[copy.slot].query()

    def _await(self, copy: Copy) -> None:
        torch.cuda.current_stream().wait_event(self._events[copy.slot])

    def _finish(self, copy: Copy) -> None:
        self._until(self._events[copy.slot].query, f"the copy of {self.name(copy.slot)}")

    def _until(self, is_done: Callable[[], bool], what: str) -> None:
        await_until(is_done, what, self.timeout_s)


class ThreadCopies(CopyEngine):
    """Copies within main memory by another thread; the computation is the host's own, so waiting is waiting."""

    def __init__(self, slots: torch.Tensor, landed: Callable[[int, int], object]) -> None:
        super().__init__(slots, landed)
        self._thread = _CopyThread()
        weakref.finalize(self, self._thread.stop)
        self._done: dict[int, Future[object]] = {}
        self._waited_s = 0.0

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._thread.stop()

    def wait(self, slots: Iterable[int]) -> None:
        began = time.perf_counter()
        super().wait(slots)
        self._waited_s += time.perf_counter() - began

    def waited_s(self) -> float:
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def _quiesce(self) -> None:
        if self._thread.is_alive:  # it is one thread: this comes after all that was submitted
            self._result(self._thread.submit(bool), "whatever is under way")
        else:
            self._thread.restart()
        self._done.clear()
        self._waited_s = 0.0

    def _copy(self, copy: Copy) -> None:
        self._slots[copy.slot].copy_(copy.record)

    def _start(self, copy: Copy) -> None:
        self._done[copy.slot] = self._thread.submit(self._copy, copy)

    def _is_done(self, copy: Copy) -> bool:
        is_done = self._done[copy.slot].done()
        if is_done:
            self._finish(copy)
        return is_done

    def _await(self, copy: Copy) -> None:
        self._finish(copy)

    def _finish(self, copy: Copy) -> None:
        self._result(self._done[copy.slot], self.name(copy.slot))

    def _result(self, future: Future[object], what: str) -> None:
        """Wait until it is there; TransferError where it failed, takes too long, or nobody works on it any more."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                problem = future.exception(min(ALIVE_S, self.timeout_s))
            except TimeoutError:
                if not self._thread.is_alive and not future.done():
                    raise TransferError(f"copying {what}: the thread that copies has ended; generate again") from None
                if time.monotonic() > deadline:
                    raise TransferError(f"copying {what} did not end within {self.timeout_s:g} s") from None
                continue
            if problem is not None:
                raise TransferError(f"copying {what} failed: {problem}") from problem
            return


class _CopyThread:
    """A thread, begun when it is needed, that does what it is given in order.

    Not an executor: those keep a process alive until the last task has ended, and do not say when their thread died.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Have another thread for what is submitted from now on; what was given to one that died is nobody's."""
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._tasks,), name="expert-copies", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, function: Callable[..., object], *arguments: object) -> Future[object]:
        future: Future[object] = Future()
        if self._thread.ident is None:
            self._thread.start()
        self._tasks.put((future, function, arguments))
        return future

    def stop(self) -> None:
        """Let the thread end once it has nothing to do."""
        self._tasks.put(None)


def _work(tasks: SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        future, function, arguments = task
        try:
            future.set_result(function(*arguments))
        except BaseException as problem:  # whoever waits for it must hear of it
            future.set_exception(problem)
        del task, future, function, arguments  # they hold what owns this thread


def copy_engine(slots: torch.Tensor, landed: Callable[[int, int], object]) -> CopyEngine:
    """The engine for slots on this device."""
    return (StreamCopies if slots.is_cuda else ThreadCopies)(slots, landed)
