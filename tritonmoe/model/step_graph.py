"""A decode step as CUDA graphs, with what the host decides between them."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator

import torch

_CAPTURING = threading.Lock()


class StepGraph:
    """Pieces of one step, captured in order and replayed in order; between two pieces the host may act.

    The pieces share one pool of memory: what a later piece overwrites, an earlier one has finished with, since both
    always run in this order. A tensor that the host's part touches must be kept by that part.
    """

    def __init__(self) -> None:
        self._parts: list[Callable[[], object]] = []
        self._last: list[Callable[[], object]] = []
        self._pool = torch.cuda.graph_pool_handle()
        self._piece: torch.cuda.CUDAGraph | None = None

    def capture(self, step: Callable[[], object], abandon: Callable[[], object]) -> None:
        """Record what `step` launches. It must have run before, so that nothing is compiled or allocated first now.

        If it fails, `abandon` joins what it forked to other streams, without which a capture cannot end.
        """
        torch.cuda.synchronize()
        with without_collection(), torch.cuda.stream(torch.cuda.Stream()):
            try:
                self._begin()
                step()
                self._end()
            except BaseException:  # a capture that goes on would make every later call fail
                with contextlib.suppress(RuntimeError):
                    abandon()
                with contextlib.suppress(RuntimeError):
                    self._end()
                raise
        self._parts += self._last

    def pause(self, act: Callable[[], object]) -> None:
        """While capturing: `act` runs here, on the host, once all before it has been launched."""
        self._end()
        self._parts.append(act)
        self._begin()

    def at_end(self, act: Callable[[], object]) -> None:
        """While capturing: `act` runs once the whole step has been launched."""
        self._last.append(act)

    def replay(self) -> None:
        for part in self._parts:
            part()

    def _begin(self) -> None:
        piece = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile: the one that feeds a progress bar, a second engine's.
        piece.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._piece = piece

    def _end(self) -> None:
        piece, self._piece = self._piece, None
        if piece is not None:
            piece.capture_end()
            self._parts.append(piece.replay)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """No garbage is collected meanwhile, and no other thread is in here: a collection may end what holds pinned memory,
    and CUDA ends a capture whose thread unregisters some."""
    with _CAPTURING:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
