"""How anything that decodes step by step is timed: by the clock as a user sees it, and on the device alone."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

PREFILL_REPEATS = 3
PREFILL_SECONDS = 2.0  # no further repeat once the runs so far took this long


class Stepper(Protocol):
    """Decodes a fixed batch from fixed prompts, as often as asked."""

    device: torch.device
    batch: int

    def warm_up(self) -> None:
        """Run what compiles or allocates on first use, on a part of the prompts."""
        ...

    def prefill(self) -> torch.Tensor:
        """Process all prompts from nothing; float32 logits [B, V] after the last token of each."""
        ...

    def restart(self) -> None:
        """Go back to the end of the prompts, as `prefill` left them."""
        ...

    def launch(self) -> None:
        """Enqueue one step, whose sampled tokens are the input of the next."""
        ...

    def tokens(self) -> list[int]:
        """Wait for the earliest launched step whose tokens were not taken; its tokens, one per row."""
        ...


@dataclass(frozen=True)
class Pass:
    """One run through the decode steps of a row of the table."""

    step_ms: list[float]  # by the clock, from launch to the tokens on the host, step by step
    pipelined_ms: float  # by the clock, per step, with one step in flight while the last one's tokens are read
    device_ms: float | None  # the same between two events of the device; None on a CPU
    tokens: list[list[int]]  # [steps][B]


def phase(name: str, device: torch.device) -> AbstractContextManager[Any]:
    """An NVTX range, so that nsys and ncu show what a kernel was for."""
    return torch.cuda.nvtx.range(name) if device.type == "cuda" else nullcontext()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_prefill(stepper: Stepper) -> tuple[list[float], torch.Tensor]:
    """Milliseconds from the prompts to the first token of every row, run by run, and the logits [B, V]."""
    stepper.warm_up()
    runs: list[float] = []
    while True:
        synchronize(stepper.device)
        with phase("prefill", stepper.device):
            began = time.perf_counter()
            logits = stepper.prefill()
            logits.argmax(-1).tolist()
            runs.append(1e3 * (time.perf_counter() - began))
        if len(runs) == PREFILL_REPEATS or sum(runs) > 1e3 * PREFILL_SECONDS:
            return runs, logits


def run_steps(stepper: Stepper, steps: int) -> None:
    """Decode without timing, for what the first steps compile, capture or page in."""
    stepper.restart()
    for _ in range(steps):
        stepper.launch()
        stepper.tokens()


def time_steps(stepper: Stepper, steps: int) -> Pass:
    """Decode `steps` tokens twice: waiting for each before the next is launched, and with one always in flight."""
    stepper.restart()
    synchronize(stepper.device)
    step_ms, tokens = [], []
    for _ in range(steps):
        with phase("decode step", stepper.device):
            began = time.perf_counter()
            stepper.launch()
            tokens.append(stepper.tokens())
            step_ms.append(1e3 * (time.perf_counter() - began))
    stepper.restart()
    synchronize(stepper.device)
    is_cuda = stepper.device.type == "cuda"
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if is_cuda else []
    began = time.perf_counter()
    if events:
        events[0].record()
    for i in range(steps):
        with phase("decode step", stepper.device):
            stepper.launch()
        if i > 0:
            stepper.tokens()  # one step behind, as a user's stream is
    if events:
        events[1].record()
    stepper.tokens()
    pipelined_ms = 1e3 * (time.perf_counter() - began) / steps
    synchronize(stepper.device)
    device_ms = events[0].elapsed_time(events[1]) / steps if events else None
    return Pass(step_ms, pipelined_ms, device_ms, tokens)


def spread(times: Sequence[float] | np.ndarray) -> dict[str, float]:
    """The median of times, with the 10th and the 90th percentile."""
    p10, median, p90 = (float(value) for value in np.percentile(times, [10, 50, 90]))
    return {"median": median, "p10": p10, "p90": p90}


def summarise(runs_ms: Sequence[float], passes: Sequence[Pass], batch: int) -> dict[str, Any]:
    """The figures of one system: TTFT and TPOT in ms, tokens/s of all rows together."""
    steps = [ms for part in passes for ms in part.step_ms]
    device = [part.device_ms for part in passes if part.device_ms is not None]
    return {
        "ttft_ms": float(np.median(runs_ms)),
        "ttft_runs_ms": list(runs_ms),
        "tpot_ms": spread(steps),
        "tpot_median_of_pass_ms": [float(np.median(part.step_ms)) for part in passes],
        "tpot_pipelined_ms": float(np.mean([part.pipelined_ms for part in passes])),
        "tpot_device_ms": float(np.mean(device)) if device else None,
        "tokens_per_s": 1e3 * batch * len(steps) / sum(steps),
    }


def host_peak_bytes() -> int:
    """The most main memory this process has held since it began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
