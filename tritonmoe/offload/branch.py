"""Launches beside the current stream, as the branches of a captured step."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

SET_DEPENDENCIES = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES


class Branch:
    """On a CPU, where nothing runs beside: in place."""

    done: object = None  # when what was launched last is complete

    @contextlib.contextmanager
    def fork(self, *done: object) -> Iterator[None]:
        """What is launched inside runs behind the current stream's launches so far or, if given, behind what branches
        had launched when they were `done`; and behind nothing else, where a graph is captured: what the branch launched
        before must be complete then, or need not be. What allocates memory inside must come behind the branch's last
        `join`, or that of a branch behind it: it may be given what was freed there."""
        yield

    @contextlib.contextmanager
    def go_on(self, *done: object) -> Iterator[None]:
        """What is launched inside runs behind what the branch launched before, and what others had when `done`."""
        yield

    def join(self) -> None:
        """What is launched from here on runs behind the branch."""

    def abandon(self) -> None:
        """`join`, in whatever state a failure left the branch."""

    def reset(self) -> None:
        """Nothing launched before is awaited any more."""


class StreamBranch(Branch):
    """On a stream of its own."""

    def __init__(self, device: torch.device, priority: int) -> None:
        self._stream = torch.cuda.Stream(device, priority=priority)
        self._is_forked = False

    @contextlib.contextmanager
    def fork(self, *done: object) -> Iterator[None]:
        assert not done or any(isinstance(event, torch.cuda.Event) for event in done), "behind nothing at all"
        self._is_forked = True
        forget_launches(self._stream)
        if not done:
            self._stream.wait_stream(torch.cuda.current_stream())
        with self.go_on(*done):
            yield

    @contextlib.contextmanager
    def go_on(self, *done: object) -> Iterator[None]:
        for event in done:
            if isinstance(event, torch.cuda.Event):
                self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield
            self.done = done_so_far(self._stream.device)

    def join(self) -> None:
        if isinstance(self.done, torch.cuda.Event):
            torch.cuda.current_stream().wait_event(self.done)
        self.reset()

    def abandon(self) -> None:
        if self._is_forked:
            torch.cuda.current_stream().wait_stream(self._stream)
        self.reset()

    def reset(self) -> None:
        self.done, self._is_forked = None, False


def make_branch(device: torch.device, priority: int = 0) -> Branch:
    return StreamBranch(device, priority) if device.type == "cuda" else Branch()


def done_so_far(device: torch.device) -> object:
    """When what the current stream has launched is complete, as a branch's `done`."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def forget_launches(stream: torch.cuda.Stream) -> None:
    """Take the edges away that the stream's next launch would have in the graph that is being captured, if one is.

    An edge that others imply is not free: behind several launches the next one begins later (tools/probe_edges.py).
    """
    with torch.cuda.stream(stream):
        is_captured = torch.cuda.is_current_stream_capturing()
    if torch.version.hip or not is_captured:
        return
    code = ctypes.CDLL("libcuda.so.1").cuStreamUpdateCaptureDependencies(
        ctypes.c_void_p(stream.cuda_stream), None, ctypes.c_size_t(0), ctypes.c_uint(SET_DEPENDENCIES)
    )
    if code:
        raise RuntimeError(f"the launches of a captured stream could not be forgotten: CUDA error {code}")
