"""Replay a trace (--trace of the command line) through slots of any number and policy, without the model.

Slots, scheduler and copy queue are the engine's own. Without a clock a copy is complete when the engine next looks.
With --link-gbps and --compute-us copies follow each other at the link's rate, demand before prefetch, while every layer
computes for so long; what it then waits for is the exposed transfer time, an estimate. "best" is the cache of the same
size that knows the future (Belady): nothing moves fewer bytes. All figures are of decode steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command_line import Parser, run_command
from provenance import provenance

from tritonmoe.errors import InputError
from tritonmoe.offload.copy_engine import DEPTH, Copy, CopyEngine, Priority
from tritonmoe.offload.counters import Counters, LayerCounters
from tritonmoe.offload.experts import SCAN_DEPTH, SCAN_SHARE
from tritonmoe.offload.policy import MAX_LOOKAHEAD
from tritonmoe.offload.scheduler import Plan, Scheduler, Wave
from tritonmoe.offload.slot_pool import EVICTIONS, SlotPool
from tritonmoe.offload.trace import LayerRun, Step, Trace, TraceHeader, read_trace
from tritonmoe.placement.memory_plan import read_slots

PREDICTORS = ("none", "recorded", "previous-token", "oracle")
NO_RECORD = torch.empty(0)  # the queue carries records; here nothing is copied
NEVER = float("inf")


@dataclass(frozen=True)
class Setting:
    """What is replayed: the slots and how they are filled."""

    num_slots: int
    eviction: str = "lru"
    predict: str = "none"
    lookahead: int = 1
    candidates: int | None = None  # None: as many as were recorded
    miss_tolerance: float = 0.0


@dataclass(frozen=True)
class Clock:
    """Seconds of a record's copy and of a layer's computation; both 0: no clock."""

    record_s: float = 0.0
    compute_s: float = 0.0


@dataclass(frozen=True)
class Result:
    """What came of a replay."""

    setting: Setting
    tokens: int
    total: LayerCounters  # of decode steps, all layers
    wait_s: float  # exposed, of decode steps
    counters: Counters  # as the engine has them at the end: of the last generation's decode steps
    prefill_counters: Counters  # likewise, of its prompt
    found: list[tuple[int, int, int]]  # hits, late, demand of every run of the trace
    best_fetches: int | None  # the fewest, in decode steps; None where experts are left out

    @property
    def moved(self) -> int:
        """Records copied for decode steps."""
        return self.total.demand + self.total.prefetched - self.total.cancelled


class SimulatedCopies(CopyEngine):
    """The engine's queue over a link that takes one record at a time, by a clock of its own."""

    def __init__(self, landed: Callable[[int, int], object], clock: Clock) -> None:
        super().__init__(NO_RECORD, landed)
        self.now = 0.0
        self.wait_s = 0.0
        self._record_s = clock.record_s
        self._link_free = 0.0
        self._done_at: dict[int, float] = {}

    def advance(self, until: float) -> None:
        """Let time pass; the host looks after its copies meanwhile."""
        if until <= self.now:
            return
        while self._started:
            done = min(self._done_at[slot] for slot in self._started)
            if done > until:
                break
            self.now = max(self.now, done)
            self.pump()
        self.now = until
        self.pump()

    def _start(self, copy: Copy) -> None:
        self._link_free = max(self.now, self._link_free) + self._record_s
        self._done_at[copy.slot] = self._link_free

    def _is_done(self, copy: Copy) -> bool:
        return self._done_at[copy.slot] <= self.now

    def _await(self, copy: Copy) -> None:
        done = self._done_at[copy.slot]
        self.wait_s += max(0.0, done - self.now)
        self.advance(done)

    def _finish(self, copy: Copy) -> None:
        self.now = max(self.now, self._done_at[copy.slot])


class Foreteller:
    """What a layer foretells: ids [T, M] by later layer."""

    def __init__(self, header: TraceHeader, setting: Setting) -> None:
        self._setting = setting
        self._moe_layers = header.moe_layers
        extra = setting.candidates
        self._most = None if extra is None else header.num_experts_per_tok + extra
        self._last: dict[int, np.ndarray] = {}

    def begin(self) -> None:
        """A generation begins."""
        self._last.clear()

    def foretell(self, run: LayerRun, step: Step) -> dict[int, np.ndarray]:
        if run.is_prefill or self._setting.predict == "none":
            return {}
        layers = [layer for layer in self._moe_layers if layer > run.layer][: self._setting.lookahead]
        if self._setting.predict == "recorded":
            return {later: ids[:, : self._most] for later, ids in run.foretold.items() if later in layers}
        if self._setting.predict == "oracle":
            return {other.layer: other.ids for other in step if other.layer in layers}
        found = {layer: self._last[layer] for layer in layers if layer in self._last}
        self._last[run.layer] = run.ids
        return found


class Replay:
    """Calls scheduler and copies as `OffloadedExperts` does, with the trace in place of routers and predictor."""

    def __init__(self, trace: Trace, setting: Setting, clock: Clock) -> None:
        self._trace, self._header, self._setting, self._clock = trace, trace.header, setting, clock
        header = trace.header
        self.pool = SlotPool(setting.num_slots, header.num_layers, header.num_experts, setting.eviction)
        self.counters = Counters(header.num_layers, header.record_bytes)
        self.prefill_counters = Counters(header.num_layers, header.record_bytes)
        self.scheduler = Scheduler(self.pool, self.counters)
        self.copies = SimulatedCopies(self.pool.landed, clock)
        self._foreteller = Foreteller(header, setting)
        self._foretold: dict[int, np.ndarray] = {}
        is_executed = header.policy.execute == "speculated" and setting.predict == "recorded"  # so no guess at all
        self._compares = not is_executed
        self._priority = Priority.DEMAND if is_executed else Priority.PREFETCH
        self._found: list[tuple[int, int, int]] = []

    def run(self) -> Result:
        wait_s, total, generation = 0.0, LayerCounters(), self._trace.steps[0][0].generation
        for step in self._trace.steps:
            if step[0].generation != generation:
                generation = step[0].generation
                self._begin_generation()
                total = _sum(total, self.counters.total())
                self._reset_counters()
            waited = self.copies.wait_s
            self._step(step)
            if not step[0].is_prefill:
                wait_s += self.copies.wait_s - waited
        total = _sum(total, self.counters.total())
        tokens = sum(step[0].num_tokens for step in self._trace.steps if not step[0].is_prefill)
        self.scheduler.check_integrity()
        best = None if self._setting.miss_tolerance else best_fetches(self._trace, self._setting.num_slots)
        return Result(self._setting, tokens, total, wait_s, self.counters, self.prefill_counters, self._found, best)

    def _begin_generation(self) -> None:
        self._foretold.clear()
        for slot, epoch in self.scheduler.abandon():
            if self.copies.cancel(slot, epoch):
                self.scheduler.abort(slot, epoch)
        self.copies.drain()
        self._foreteller.begin()

    def _reset_counters(self) -> None:
        layers, record_bytes = self._header.num_layers, self._header.record_bytes
        self.counters, self.prefill_counters = Counters(layers, record_bytes), Counters(layers, record_bytes)
        self.scheduler.counters = self.counters

    def _step(self, step: Step) -> None:
        is_prefill, runs = step[0].is_prefill, {run.layer: run for run in step}
        if not is_prefill:
            self.counters.tokens += step[0].num_tokens
        for layer in range(self._header.num_layers):
            if layer == step[0].layer:
                self.scheduler.counters = self.prefill_counters if is_prefill else self.counters
            self.copies.pump()
            if layer not in runs:
                continue
            run, counters = runs[layer], self.scheduler.counters.layers[layer]
            before = counters.hits, counters.late, counters.demand
            self._layer(run, step)
            now = counters.hits, counters.late, counters.demand
            self._found.append((now[0] - before[0], now[1] - before[1], now[2] - before[2]))
            self.copies.advance(self.copies.now + self._clock.compute_s)

    def _layer(self, run: LayerRun, step: Step) -> None:
        foretold = self._foreteller.foretell(run, step)
        guess = None if run.is_prefill else self._foretold.pop(run.layer, None)
        if guess is not None and self._compares:
            self.counters.foretell(run.layer, guess, run.ids, run.weights)
        self._foretold.update(foretold)
        wanted = run.wanted
        for slot, epoch in self.scheduler.refute(run.layer, wanted):
            if self.copies.cancel(slot, epoch):
                self.scheduler.abort(slot, epoch)
        if not run.is_prefill:
            wanted = self._leave_out(run, wanted)
        self._waves(run, wanted, foretold)

    def _leave_out(self, run: LayerRun, wanted: list[int]) -> list[int]:
        tolerance = self._setting.miss_tolerance
        if tolerance <= 0.0:
            return wanted
        share = run.weights / run.weights.sum(-1, keepdims=True)
        return [
            expert
            for expert in wanted
            if self.pool.lookup(run.layer, expert) >= 0 or share[run.ids == expert].max() >= tolerance
        ]

    def _waves(self, run: LayerRun, wanted: list[int], foretold: dict[int, np.ndarray]) -> None:
        slots = self.pool.num_slots
        self.copies.depth = SCAN_DEPTH if run.is_prefill else DEPTH
        is_scan = run.is_prefill and len(wanted) >= SCAN_SHARE * self.pool.num_experts
        plan = self.scheduler.plan(run.layer, wanted, max(1, slots // 2) if run.is_prefill else slots, is_scan)
        wave = self._next_wave(plan)
        if run.is_prefill:
            foretold = self._ahead(run.layer, len(wanted))
        while wave is not None:
            following = self._next_wave(plan) if run.is_prefill else None
            if plan.is_done:
                self._prefetch(foretold)
            missing = [*wave.late.values(), *(fetch.slot for fetch in wave.demand)]
            if missing:
                self.copies.wait(missing)
            self.scheduler.finish(run.layer, wave)
            wave = following if following is not None else self._next_wave(plan)
        assert plan.is_done, "no slot could be had for an expert that is needed"
        self.copies.pump()

    def _next_wave(self, plan: Plan) -> Wave | None:
        wave = plan.next_wave()
        if wave is not None:
            for _, slot, epoch in wave.demand:
                self.copies.submit(NO_RECORD, slot, epoch, Priority.DEMAND)
            self.copies.pump()
        return wave

    def _prefetch(self, foretold: dict[int, np.ndarray]) -> None:
        for later in sorted(foretold):
            for _, slot, epoch in self.scheduler.prefetch(later, foretold[later].T.ravel().tolist()):
                self.copies.submit(NO_RECORD, slot, epoch, self._priority)
        self.copies.pump()

    def _ahead(self, layer: int, num_wanted: int) -> dict[int, np.ndarray]:
        later = _next_layer(self._header, layer)
        if later is None or num_wanted < SCAN_SHARE * self._header.num_experts:
            return {}
        return {later: np.arange(self._header.num_experts)[None]}


def replay(trace: Trace, setting: Setting, clock: Clock | None = None) -> Result:
    """Run the whole trace, which has a step, from empty slots."""
    return Replay(trace, setting, clock or Clock()).run()


def best_fetches(trace: Trace, num_slots: int) -> int:
    """The fewest records that any cache of so many slots fetches in the decode steps.

    It gives up what is used furthest in the future (Belady 1966), and may pass a record through without keeping it.
    What the prompt's pieces fetched, or may have fetched ahead, it has for nothing.
    """
    uses: dict[tuple[int, int], deque[int]] = defaultdict(deque)  # by expert, the decode runs that use it
    runs = [(run, run.wanted) for run in trace.runs]
    for at, (run, wanted) in enumerate(runs):
        if not run.is_prefill:
            for expert in wanted:
                uses[run.layer, expert].append(at)
    cached: dict[tuple[int, int], float] = {}  # expert -> its next use
    furthest: list[tuple[float, tuple[int, int]]] = []  # a heap of (-next use, expert), also of what is not so any more
    fetches = 0
    ahead: int | None = None
    for run, wanted in runs:
        keys = [(run.layer, expert) for expert in wanted]
        if run.is_prefill:
            if run.layer == ahead:
                keys = [(run.layer, expert) for expert in range(trace.header.num_experts)]
            is_most = len(wanted) >= SCAN_SHARE * trace.header.num_experts
            ahead = _next_layer(trace.header, run.layer) if is_most else None
        for key in keys:
            if not run.is_prefill:
                fetches += key not in cached
                uses[key].popleft()
            cached[key] = uses[key][0] if uses[key] else NEVER
            heapq.heappush(furthest, (-cached[key], key))
        while len(cached) > num_slots:
            next_use, key = heapq.heappop(furthest)
            if cached.get(key) == -next_use:
                del cached[key]
    return fetches


def _next_layer(header: TraceHeader, layer: int) -> int | None:
    return next((i for i in header.moe_layers if i > layer), None)


def _sum(one: LayerCounters, other: LayerCounters) -> LayerCounters:
    rows = dataclasses.asdict(one), dataclasses.asdict(other)
    return LayerCounters(**{name: rows[0][name] + rows[1][name] for name in rows[0]})


def summary(result: Result, header: TraceHeader, clock: Clock) -> dict[str, Any]:
    """Everything as plain numbers, shares from 0 to 1."""
    total, tokens = result.total, result.tokens
    wasted = total.prefetched_wasted
    moved = {"demand": total.demand, "used": total.prefetched_used, "wasted": wasted, "total": result.moved}
    best = result.best_fetches
    row: dict[str, Any] = {
        **dataclasses.asdict(result.setting),
        "slots_share": result.setting.num_slots / sum(header.experts),
        "tokens": tokens,
        "total": dataclasses.asdict(total),
        "hit_rate": total.hit_rate,
        "late_rate": total.late_rate,
        "recall": total.recall,
        "gate_mass_recall": total.gate_mass_recall,
        "bytes_per_token": {what: count * header.record_bytes / tokens for what, count in moved.items()},
        "best": None,
        "exposed_ms_per_token": None,
    }
    if best is not None:
        row["best"] = {
            "hit_rate": 1.0 - best / total.routed,
            "fetches": best,
            "bytes_per_token": best * header.record_bytes / tokens,
        }
    if clock != Clock():
        row["exposed_ms_per_token"] = 1e3 * result.wait_s / tokens
    return row


HEADING = (
    f"{'slots':>6} {'share':>6} {'evict':>5} {'predict':<14} {'hits':>6} {'late':>6} {'used':>7} {'wasted':>7} "
    f"{'MB/token':>9} {'recall':>6} {'best hits':>9} {'best MB':>8} {'exposed ms':>10}"
)


def line(row: dict[str, Any]) -> str:
    """A row of the table; used and wasted are prefetches."""

    def percent(share: float | None) -> str:
        return "-" if share is None else f"{100 * share:.1f}%"

    best, exposed = row["best"], row["exposed_ms_per_token"]
    total = row["total"]
    return (
        f"{row['num_slots']:>6} {percent(row['slots_share']):>6} {row['eviction']:>5} {row['predict']:<14} "
        f"{percent(row['hit_rate']):>6} {percent(row['late_rate']):>6} {total['prefetched_used']:>7} "
        f"{total['prefetched_wasted']:>7} {row['bytes_per_token']['total'] / 1e6:>9.2f} {percent(row['recall']):>6} "
        f"{percent(best and best['hit_rate']):>9} {format(best['bytes_per_token'] / 1e6, '.2f') if best else '-':>8} "
        f"{'-' if exposed is None else format(exposed, '.3f'):>10}"
    )


def build_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="written by --trace")
    parser.add_argument("--slots", nargs="+", metavar="N|P%", help="several: one row each (default: as recorded)")
    parser.add_argument("--eviction", nargs="+", choices=EVICTIONS, help="default: as recorded")
    parser.add_argument("--predict", nargs="+", choices=PREDICTORS, help="default: recorded, or none where nothing was")
    parser.add_argument("--lookahead", type=int, metavar="L", help="layers to foretell (default: as recorded)")
    parser.add_argument("--candidates", type=int, metavar="M", help="of what was recorded, K + M (default: all)")
    parser.add_argument("--link-gbps", type=float, metavar="R", help="10^9 bytes per second from host to device")
    parser.add_argument("--compute-us", type=float, metavar="T", help="of a layer, when nothing is waited for")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the rows as JSON, with their provenance")
    return parser


def settings(trace: Trace, options: argparse.Namespace) -> list[Setting]:
    """Every combination that was asked for; InputError for what the trace cannot give."""
    header, policy = trace.header, trace.header.policy
    has_guesses = any(run.foretold for run in trace.runs)
    predictors = options.predict or (["recorded"] if has_guesses else ["none"])
    lookahead = policy.lookahead if options.lookahead is None else options.lookahead
    if not 1 <= lookahead <= MAX_LOOKAHEAD:
        raise InputError(f"--lookahead must be an integer from 1 to {MAX_LOOKAHEAD}, not {lookahead}")
    if "recorded" in predictors:
        if not has_guesses:
            raise InputError("--predict recorded: nothing was foretold when this trace was recorded; use another")
        if lookahead > policy.lookahead:
            raise InputError(f"--lookahead {lookahead} is more than the {policy.lookahead} that were recorded")
    if options.candidates is not None:
        _check_candidates(trace, options.candidates, predictors)
    slots = [_read_slots(text, sum(header.experts)) for text in options.slots or [str(header.num_slots)]]
    return [
        Setting(count, eviction, predict, lookahead, options.candidates, policy.miss_tolerance)
        for count in slots
        for eviction in options.eviction or [policy.eviction]
        for predict in predictors
    ]


def _check_candidates(trace: Trace, candidates: int, predictors: Sequence[str]) -> None:
    if "recorded" not in predictors:
        raise InputError("--candidates has no effect without --predict recorded; leave it out")
    per_tok = trace.header.num_experts_per_tok
    most = max(ids.shape[1] for run in trace.runs for ids in run.foretold.values()) - per_tok
    if not 0 <= candidates <= most:
        raise InputError(f"--candidates must be from 0 to the {most} that were recorded, not {candidates}")


def _read_slots(text: str, num_experts: int) -> int:
    if text == "0":
        raise InputError("give --slots: 0 hold no expert, and a trace of resident experts has no number of its own")
    try:
        slots = read_slots(text, num_experts)
    except InputError as error:
        raise InputError(str(error).replace("--expert-slots", "--slots")) from None
    if slots < 1:
        raise InputError(f"--slots {text} is less than one; use at least 1")
    return slots


def read_clock(header: TraceHeader, options: argparse.Namespace) -> Clock:
    """InputError unless both of its options are given, or none."""
    if options.link_gbps is None and options.compute_us is None:
        return Clock()
    if options.link_gbps is None or options.compute_us is None:
        raise InputError("an estimate of exposed time needs both --link-gbps and --compute-us")
    if not 0 < options.link_gbps < NEVER or not 0 <= options.compute_us < NEVER:
        raise InputError("--link-gbps must be above 0 and --compute-us at least 0")
    return Clock(header.record_bytes / (1e9 * options.link_gbps), 1e-6 * options.compute_us)


def run(options: argparse.Namespace) -> None:
    trace = read_trace(options.trace)
    header, steps = trace.header, sum(not step[0].is_prefill for step in trace.steps)
    if steps == 0:
        raise InputError(f"{options.trace} holds no decode step; generate more tokens")
    clock = read_clock(header, options)
    wanted = settings(trace, options)
    if options.output is not None and not options.output.parent.is_dir():
        raise InputError(f"--output {options.output}: there is no such folder")
    slots = f"{header.num_slots} slots" if header.num_slots else "no slots"
    print(f"{header.model_type}, {sum(header.experts)} experts, {steps} decode steps with {slots}, {header.policy}")
    if not header.began_empty or header.dropped_steps:
        print("recorded with slots in use, or interrupted: a replay, from empty slots, may differ from what happened")
    print(HEADING)
    rows = []
    for setting in wanted:
        rows.append(summary(replay(trace, setting, clock), header, clock))
        print(line(rows[-1]), flush=True)
    if options.output is not None:
        facts = {
            "provenance": provenance(),
            "trace": {**dataclasses.asdict(header), "decode_steps": steps},
            "clock": dataclasses.asdict(clock),
            "rows": rows,
        }
        try:
            options.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"--output {options.output}: {error.strerror}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(run, build_parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
