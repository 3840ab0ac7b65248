"""Waits of the host that end: whatever is waited for is polled, and given up with an error that names it."""

from __future__ import annotations

import time
from collections.abc import Callable

from tritonmoe.errors import TransferError

COPY_TIMEOUT_S = 60.0  # for a record of at most some hundred megabytes, and what it is queued behind
STEP_TIMEOUT_S = 600.0  # for all that was launched: the chunks of a prompt may be queued, each of several seconds
SPIN_S = 0.05  # the processor is not given away for longer before that: a decode step takes milliseconds
NAP_S = 0.001


def await_until(
    is_done: Callable[[], bool],
    what: str,
    timeout_s: float,
    meanwhile: Callable[[], object] | None = None,
    details: Callable[[], str] = str,
) -> None:
    """Return once `is_done`, calling `meanwhile` between two looks; TransferError that names `what`, with `details`,
    after `timeout_s` seconds.

    A driver's own wait has no timeout, so it is polled here. Between two looks other threads may run.
    """
    if is_done():
        return
    began = time.monotonic()
    while not is_done():
        if meanwhile is not None:
            meanwhile()
        waited = time.monotonic() - began
        if waited > timeout_s:
            raise TransferError(f"{what} did not end within {timeout_s:g} s{details()}; does the device still answer?")
        time.sleep(0.0 if waited < SPIN_S else NAP_S)
