"""Feed damaged and hostile files to the engine: only documented errors may come out, in bounded time and memory.

A case is made from its kind, its number and the seed alone, so every finding can be run again (--case KIND:NUMBER).
Cases run in processes with an address space of --memory-mib beyond what they start with, and are ended after
--case-seconds, even in the middle of native code. A finding is an error that is no TritonMoeError, a message that is
not one printable line, a process that died, or a case that did not end.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import json
import logging
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
from fuzz_base import Base
from fuzz_kinds import KINDS
from provenance import provenance

from tritonmoe.errors import EXIT_BAD_INPUT, MAX_MESSAGE, TritonMoeError

ACCEPTED = "accepted"
FINDING = "finding: "


@dataclass
class Tally:
    """What came of the cases of one kind."""

    cases: int = 0
    accepted: int = 0
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    findings: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    grown_mib: float = 0.0  # the most that a case had in memory beyond what was there before

    def add(self, number: int, outcome: str, seconds: float, grown_mib: float) -> None:
        self.cases += 1
        self.longest_s, self.grown_mib = max(self.longest_s, seconds), max(self.grown_mib, grown_mib)
        if outcome == ACCEPTED:
            self.accepted += 1
        elif outcome.startswith(FINDING):
            self.findings.append(f"{number}: {outcome.removeprefix(FINDING)}")
        else:
            self.refused[outcome] += 1


Case = tuple[str, int]  # kind and number
RunCase = Callable[[Base, str, int, int], str]


def run_case(base: Base, kind: str, number: int, seed: int) -> str:
    """Make one case and use it; returns ACCEPTED, the class of the error that refused it, or a finding."""
    chance = random.Random(f"{seed} {kind} {number}")
    with tempfile.TemporaryDirectory(prefix="case-") as name:
        folder = Path(name)
        KINDS[kind].make(base, folder, number, chance)
        try:
            KINDS[kind].use(base, folder, chance)
        except TritonMoeError as error:
            text = str(error)
            if not text.isprintable() or not 0 < len(text) <= MAX_MESSAGE:
                return f"{FINDING}{type(error).__name__} is not one printable line: {text[:200]!r}"
            return type(error).__name__
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            return f"{FINDING}{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {str(error)[:200]}"
    return ACCEPTED


def work(results: Connection, run: RunCase, cases: Sequence[Case], options: argparse.Namespace, log: str) -> None:
    """Run cases in this process, and send what came of each."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_TRUNC), 2)  # panics of native code write their own traces
    logging.disable()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="base-") as name:
        base = Base.make(Path(name))
        for kind in {kind for kind, _ in cases}:
            run(base, kind, -1, options.seed)  # imports what is imported late
        limit_memory(options.memory_mib << 20)
        for kind, number in cases:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is that of this case
            before, began = memory_mib("VmRSS"), time.perf_counter()
            faulthandler.dump_traceback_later(options.case_seconds, exit=True)
            outcome = run(base, kind, number, options.seed)
            faulthandler.cancel_dump_traceback_later()
            results.send((outcome, time.perf_counter() - began, memory_mib("VmHWM") - before))
    results.close()


def limit_memory(num_bytes: int) -> None:
    """Let this process map no more than `num_bytes` beyond what it has mapped."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_mib("VmSize") * (1 << 20)) + num_bytes, hard))


def memory_mib(name: str) -> float:
    """A line of /proc/self/status, which counts in KiB."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) / 1024


@dataclass
class Worker:
    """A process, and the cases it was given."""

    process: SpawnProcess
    results: Connection
    log: Path
    cases: Sequence[Case]
    done: int = 0

    @classmethod
    def start(cls, cases: Sequence[Case], options: argparse.Namespace, run: RunCase, log: Path) -> Worker:
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        log.touch()
        process = context.Process(target=work, args=(sender, run, cases, options, str(log)))
        process.start()
        sender.close()
        return cls(process, receiver, log, cases)


def fuzz(cases: Sequence[Case], options: argparse.Namespace, run: RunCase = run_case) -> dict[str, Tally]:
    """Run the cases, divided among processes; one that dies is a finding, and another goes on behind it."""
    tallies = {kind: Tally() for kind, _ in cases}
    with tempfile.TemporaryDirectory(prefix="log-") as logs:
        parts = [part for i in range(options.processes) if (part := cases[i :: options.processes])]
        workers = [Worker.start(part, options, run, Path(logs) / str(i)) for i, part in enumerate(parts)]
        while workers:
            ready = wait([worker.results for worker in workers])
            for worker in [worker for worker in workers if worker.results in ready]:
                try:
                    result = worker.results.recv()
                except EOFError:
                    workers.remove(worker)
                    if rest := after_death(worker, tallies, options):
                        workers.append(Worker.start(rest, options, run, worker.log))
                    continue
                kind, number = worker.cases[worker.done]
                tallies[kind].add(number, *result)
                worker.done += 1
    return tallies


def after_death(worker: Worker, tallies: dict[str, Tally], options: argparse.Namespace) -> Sequence[Case]:
    """What is left to do behind the case that a process died of, which is counted; nothing if it was at its end."""
    worker.process.join()
    if worker.done == len(worker.cases):
        return ()
    kind, number = worker.cases[worker.done]
    end = f"the process ended with {worker.process.exitcode}: {worker.log.read_text(errors='replace')[:600]}"
    tallies[kind].add(number, FINDING + " | ".join(end.splitlines()), options.case_seconds, 0.0)
    return worker.cases[worker.done + 1 :]


def summary(tallies: dict[str, Tally], options: argparse.Namespace, source: dict[str, Any]) -> dict[str, Any]:
    return {
        "provenance": source,
        "seed": options.seed,
        "case_seconds": options.case_seconds,
        "memory_mib": options.memory_mib,
        "cases": sum(tally.cases for tally in tallies.values()),
        "findings": sum(len(tally.findings) for tally in tallies.values()),
        "kinds": {
            name: {
                "cases": tally.cases,
                "directed": min(-(-tally.cases // 2), len(KINDS[name].directed)),
                "accepted": tally.accepted,
                "refused": dict(sorted(tally.refused.items())),
                "findings": tally.findings,
                "longest_s": round(tally.longest_s, 3),
                "grown_mib": round(tally.grown_mib, 1),
            }
            for name, tally in tallies.items()
        },
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=500, metavar="N", help="of all kinds together (default 500)")
    parser.add_argument("--seed", type=int, default=0, help="other cases, apart from the directed ones")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this kind; repeatable")
    parser.add_argument("--case", metavar="KIND:NUMBER", help="run this case alone, here, with its traceback")
    parser.add_argument("--processes", type=int, default=1, metavar="N")
    parser.add_argument("--case-seconds", type=float, default=20.0, metavar="S", help="the most a case may take")
    parser.add_argument("--memory-mib", type=int, default=2048, metavar="MIB", help="the most it may map")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write a JSON summary")
    return parser


def show_case(text: str, seed: int) -> int:
    kind, _, number = text.partition(":")
    with tempfile.TemporaryDirectory() as base_name, tempfile.TemporaryDirectory() as name:
        base, chance = Base.make(Path(base_name)), random.Random(f"{seed} {kind} {int(number)}")
        KINDS[kind].make(base, Path(name), int(number), chance)
        KINDS[kind].use(base, Path(name), chance)
    print(ACCEPTED)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    if options.case is not None:
        return show_case(options.case, options.seed)
    source = provenance()  # of what runs, whatever becomes of the files meanwhile
    kinds = options.kind or list(KINDS)
    counts = [options.cases * (i + 1) // len(kinds) - options.cases * i // len(kinds) for i in range(len(kinds))]
    cases = [(kind, number) for kind, count in zip(kinds, counts, strict=True) for number in range(count)]
    tallies = fuzz(cases, options)
    for kind, tally in tallies.items():
        refused = ", ".join(f"{count} {name}" for name, count in sorted(tally.refused.items()))
        print(
            f"{kind:<12}{tally.cases:>6} cases, {tally.accepted} accepted, {refused or 'none refused'}; at most "
            f"{tally.longest_s:.1f} s and {tally.grown_mib:.0f} MiB"
        )
        for finding in tally.findings:
            print(f"  {kind}:{finding}")
    facts = summary(tallies, options, source)
    if options.output is not None:
        options.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"{facts['cases']} cases, {facts['findings']} findings")
    return EXIT_BAD_INPUT if facts["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
