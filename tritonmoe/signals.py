"""What SIGINT and SIGTERM do to a command: an exception in the main thread, so that files half written go.

Python raises it between any two instructions, also in those of a finalizer (`__del__`, the callback of a weak
reference, at the end of a garbage collection), out of which no exception comes: there it hands what was raised to
`sys.unraisablehook` and goes on, and the signal would be lost. The hook here sends it once more, a moment later.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from tritonmoe.errors import EXIT_TERMINATED

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

RETRY_S = 0.01


class Terminated(SystemExit):
    """SIGTERM, raised where the main thread was."""


@contextmanager
def raised() -> Iterator[None]:
    """SIGTERM raises `Terminated`, as SIGINT raises KeyboardInterrupt, and neither is lost in a finalizer. For the
    main thread; has SIGALRM and its timer for itself. Afterwards the handlers are as before, and a signal that was to
    be sent again is."""
    show, pending = sys.unraisablehook, 0

    def raise_again(unraisable: UnraisableHookArgs) -> None:
        nonlocal pending
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            pending = signal.SIGINT
        elif issubclass(unraisable.exc_type, Terminated):
            pending = signal.SIGTERM
        else:
            show(unraisable)
            return
        # By a timer, not by a thread: the finalizer may run in the middle of what starts threads, and hold its locks.
        signal.setitimer(signal.ITIMER_REAL, RETRY_S)

    def send_again(*_: object) -> None:
        nonlocal pending
        number, pending = pending, 0
        if number:
            signal.raise_signal(number)

    previous = {number: _handler(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    sys.unraisablehook = raise_again
    signal.signal(signal.SIGALRM, send_again)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        unsent, pending = pending, 0  # first, so that nothing is raised in the middle of what follows
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = show
        for number, handler in previous.items():
            signal.signal(number, handler)
        if unsent:
            signal.raise_signal(unsent)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Both signals end the process on the spot, as they must while compiled modules are imported: these make whatever
    error they like of an exception. One that is ignored stays so, as for what a shell started in the background."""

    def leave(number: int, _frame: object) -> None:
        os._exit(128 + number)

    previous = {number: _handler(number) for number in _heeded()}
    for number in previous:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def leave_to_system() -> None:
    """From here on both signals end the process without a word, as they do a process of any other language: all that
    is left are finalizers, and an exception in one of them would only be shown."""
    for number in _heeded():
        signal.signal(number, signal.SIG_DFL)


def _heeded() -> list[signal.Signals]:
    return [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]


def _handler(number: signal.Signals) -> Any:
    """What `signal.signal` takes again; one that was not set by Python cannot be told, and is the system's."""
    return signal.getsignal(number) or signal.SIG_DFL


def _terminate(*_: object) -> NoReturn:
    raise Terminated(EXIT_TERMINATED)
