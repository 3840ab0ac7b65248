"""Break things on purpose, many times each, and see that every fault ends in one clear line and leaves nothing broken.

Each scenario makes a fault at another place in every case: an allocation refused, a copy that fails or stalls, a read
error, a file changed while it is read, a limit of memory, a full disk, a signal. After each the same engine, or a new
process, must work as if nothing had been. Exits with 1 where it does not; the summary says what was seen how often.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from provenance import ROOT, provenance
from torch.utils._python_dispatch import TorchDispatchMode

from tritonmoe.checkpoint import tensor_files as checkpoint
from tritonmoe.engine import Engine, embedded_folder
from tritonmoe.errors import CheckpointError, InputError, TransferError, TritonMoeError
from tritonmoe.generation.sampling import SamplingParams
from tritonmoe.offload import copy_engine
from tritonmoe.offload.experts import OffloadedExperts
from tritonmoe.offload.trace import read_trace
from tritonmoe.placement.loader import Placement

PLACEMENTS = {
    "resident": Placement(policy="resident"),
    "on-demand": Placement(policy="on-demand", expert_slots="25%"),
    "exact": Placement(policy="exact", expert_slots="50%"),
}
PROMPT, LONG_PROMPT = "Once", "Once upon a time there was a little house in a wood."
GREEDY = SamplingParams(max_new_tokens=4)
STALL_S = 0.05
DEADLINE_S = 120.0  # after which a process counts as hung
COMMAND = [sys.executable, "-m", "tritonmoe.generate"]
QUIET_EXITS = (0, 130, 143, -signal.SIGINT, -signal.SIGTERM)  # the last two: before `main`, or after it


@dataclass
class Findings:
    """What the cases of one scenario came to."""

    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def note(self, outcome: str) -> None:
        self.cases += 1
        self.outcomes[outcome] += 1


def refused_allocations(folder: Path, cases: int, seed: int) -> Findings:
    """Out of memory at one operation of a long prompt or of the steps after it, a short one having run before."""
    findings = Findings()
    for name, planner in (("resident", False), ("exact", False), ("exact", True), ("on-demand", True)):
        engine = load(folder, name, plan_on_device=planner)
        expected = [engine.generate(prompt, GREEDY).token_ids for prompt in (PROMPT, LONG_PROMPT)]
        with Refusing(None) as counted:
            engine.generate(LONG_PROMPT, GREEDY)
        share = max(1, cases // 4)
        for at in spread(counted.calls, share):
            try:
                with Refusing(at):
                    engine.generate(LONG_PROMPT, GREEDY)
                findings.problems.append(f"{name}: operation {at} was refused and nothing was said")
            except InputError as error:
                findings.note(brief(error))
                if not str(error).startswith("out of memory (") or "--max-context" not in str(error):
                    findings.problems.append(f"{name}, operation {at}: {error}")
            again = [engine.generate(prompt, GREEDY).token_ids for prompt in (PROMPT, LONG_PROMPT)]
            if again != expected:
                findings.problems.append(f"{name}: after operation {at} was refused other tokens were drawn")
        engine.close()
    return findings


class Refusing(TorchDispatchMode):
    """torch.OutOfMemoryError in place of the n-th operation; None: none, they are counted."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if self.calls - 1 == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return func(*args, **(kwargs or {}))


def faulty_copies(folder: Path, cases: int, seed: int) -> Findings:
    """The n-th copy of a record raises, or does not end in time, or its thread is gone."""
    findings, chance = Findings(), random.Random(seed)
    engine = load(folder, "on-demand")
    experts = engine.decoder.experts
    assert isinstance(experts, OffloadedExperts)
    expected = engine.generate(LONG_PROMPT, GREEDY).token_ids
    moved = experts.copies.num_copies
    for kind in ("raises", "stalls", "ends its thread"):
        for at in spread(moved, max(1, cases // 3)):
            try:
                with broken_copy(kind, at):
                    experts.resize(experts.pool.num_slots)  # so that as many copies come as before
                    experts.copies.timeout_s = STALL_S if kind == "stalls" else 30.0
                    drawn = engine.generate(LONG_PROMPT, GREEDY).token_ids
                findings.note("nobody waited for it")
                if drawn != expected:
                    findings.problems.append(f"copy {at} {kind}: other tokens were drawn")
            except TransferError as error:
                findings.note(brief(error))
                if "expert" not in str(error):
                    findings.problems.append(f"copy {at} {kind}: {error} names no expert")
            time.sleep(2 * STALL_S * chance.random())
            experts.copies.timeout_s = 30.0
            if engine.generate(LONG_PROMPT, GREEDY).token_ids != expected:
                findings.problems.append(f"after copy {at} {kind} other tokens were drawn")
    engine.close()
    return findings


@contextmanager
def broken_copy(kind: str, at: int) -> Iterator[None]:
    """Have the `at`-th copy by a thread fail."""
    original, left = copy_engine.ThreadCopies._copy, at

    def copy(self: Any, record: Any) -> None:
        nonlocal left
        left -= 1
        if left != -1:
            original(self, record)
        elif kind == "raises":
            raise RuntimeError("the record is gone")
        elif kind == "stalls":
            time.sleep(4 * STALL_S)
            original(self, record)
        else:
            raise EndOfThread

    def work(tasks: Any) -> None:
        while (task := tasks.get()) is not None:
            future, function, arguments = task
            try:
                future.set_result(function(*arguments))
            except EndOfThread:
                return
            except BaseException as problem:
                future.set_exception(problem)

    works, copy_engine.ThreadCopies._copy = copy_engine._work, copy  # type: ignore[method-assign]
    if kind == "ends its thread":
        copy_engine._work = work
    try:
        yield
    finally:
        copy_engine.ThreadCopies._copy = original  # type: ignore[method-assign]
        copy_engine._work = works


class EndOfThread(Exception):
    """What a thread dies of, without a word to whoever waits for it."""


def read_errors(folder: Path, cases: int, seed: int) -> Findings:
    """While weights are read: an input error, short reads, a file truncated, replaced or written to."""
    findings, chance = Findings(), random.Random(seed)
    reads = Reads("counted", -1, folder)
    with reads:
        load(folder, "exact").close()
    for i in range(cases):
        kind = ("input error", "short", "truncated", "replaced", "written to")[i % 5]
        with tempfile.TemporaryDirectory() as temporary:
            copied = Path(shutil.copytree(folder, Path(temporary) / "model"))
            try:
                with Reads(kind, chance.randrange(reads.calls), copied):
                    load(copied, "exact").close()
                findings.note(f"{kind}: loaded")
                if kind not in ("short",):
                    findings.problems.append(f"{kind}: a model was loaded from it")
            except CheckpointError as error:
                findings.note(f"{kind}: {brief(error)}")
                if kind == "short" or ".safetensors" not in str(error):
                    findings.problems.append(f"{kind}: {error}")
    return findings


class Reads:
    """Something happens at one read of weights; short ones from there on."""

    def __init__(self, kind: str, at: int, folder: Path) -> None:
        self.kind, self.at, self.calls = kind, at, 0
        self._file = next(folder.glob("model*.safetensors"))  # not what foretells experts, which may lie beside it
        self._preadv = os.preadv

    def __enter__(self) -> Reads:
        checkpoint.os.preadv = self._read  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        checkpoint.os.preadv = self._preadv

    def _read(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        self.calls += 1
        if self.kind == "short" and self.calls > self.at:
            return self._preadv(descriptor, [buffers[0][: 1 + len(buffers[0]) // 3]], offset)
        if self.calls - 1 == self.at:
            if self.kind == "input error":
                raise OSError(5, "Input/output error")
            if self.kind == "truncated":
                os.truncate(self._file, max(1, offset // 2))
            elif self.kind == "replaced":
                other = self._file.with_name("other")
                shutil.copy(self._file, other)
                other.replace(self._file)
            elif self.kind == "written to":
                with self._file.open("r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    file.write(b"\0")
                os.utime(self._file)
        return self._preadv(descriptor, buffers, offset)


def failed_resizes(folder: Path, cases: int, seed: int) -> Findings:
    """More slots than memory holds, or an interrupt, while the number of slots changes."""
    findings, chance = Findings(), random.Random(seed)
    for planner in (False, True):
        engine = load(folder, "exact", plan_on_device=planner)
        experts = engine.decoder.experts
        assert isinstance(experts, OffloadedExperts)
        expected = engine.generate(PROMPT, GREEDY).token_ids
        for _ in range(max(1, cases // 2)):
            most = chance.choice((0, 1, 3, experts.pool.num_slots))
            wanted = most + chance.randint(1, 40)
            try:
                with slots_that_fit(most, interrupted=chance.random() < 0.3):
                    experts.resize(wanted)
                findings.note(f"{experts.pool.num_slots} slots instead" if most else "no slot, and no error")
                if experts.pool.num_slots > most:
                    findings.problems.append(f"{experts.pool.num_slots} slots where {most} fit")
            except InputError as error:
                findings.note(brief(error))
            except KeyboardInterrupt:
                findings.note("interrupted")
            if engine.generate(PROMPT, GREEDY).token_ids != expected:
                findings.problems.append(f"after a resize to {wanted} with room for {most}: other tokens")
            experts.scheduler.check_integrity()
        engine.close()
    return findings


@contextmanager
def slots_that_fit(most: int, interrupted: bool) -> Iterator[None]:
    original = OffloadedExperts._make_slots

    def make(self: OffloadedExperts, num_slots: int) -> None:
        if num_slots > most:
            if interrupted:
                raise KeyboardInterrupt
            raise torch.OutOfMemoryError("CUDA out of memory.")
        original(self, num_slots)

    OffloadedExperts._make_slots = make  # type: ignore[method-assign]
    try:
        yield
    finally:
        OffloadedExperts._make_slots = original  # type: ignore[method-assign]


def signals(folder: Path, cases: int, seed: int) -> Findings:
    """SIGINT or SIGTERM at a random moment of a process that loads, generates and writes a trace."""
    findings, chance = Findings(), random.Random(seed)
    options = ["--model", str(folder), "--policy", "exact", "--expert-slots", "50%", "--max-new-tokens", "40", PROMPT]
    with tempfile.TemporaryDirectory() as temporary:
        trace = Path(temporary) / "trace.npz"
        began = time.monotonic()
        run_command([*options, "--trace", str(trace)])
        whole = time.monotonic() - began
        for i in range(cases):
            number = (signal.SIGINT, signal.SIGTERM)[i % 2]
            trace.unlink(missing_ok=True)
            process = start_command([*options, "--trace", str(trace)])
            time.sleep(chance.uniform(0.05, whole))
            process.send_signal(number)
            try:
                _, said = process.communicate(timeout=DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                findings.problems.append(f"{number.name}: hung")
                continue
            findings.note(f"{number.name}: exit code {process.returncode}")
            check_exit(findings, f"{number.name}", process.returncode, said, QUIET_EXITS)
            if trace.exists():
                read_trace(trace)  # whole, or an error
            left = [path.name for path in Path(temporary).iterdir() if path != trace]
            if left and process.returncode != -signal.SIGTERM:
                findings.problems.append(f"{number.name}: {left} were left behind")
    return findings


def memory_limits(folder: Path, cases: int, seed: int) -> Findings:
    """`ulimit -v` from what the interpreter needs to what all of it needs."""
    findings = Findings()
    for i in range(cases):
        limit = int((600 + 900 * i / max(1, cases - 1)) * (1 << 20))
        done = run_command(["--model", str(folder), PROMPT, "--max-new-tokens", "2"], address_space=limit)
        findings.note(last_line(done.stderr) if done.returncode else "enough")
        if done.returncode not in (0, 2) and "OpenBLAS" not in done.stderr and "bad_alloc" not in done.stderr:
            check_exit(findings, f"{limit >> 20} MiB", done.returncode, done.stderr, (0, 2))
    return findings


def full_disks(folder: Path, cases: int, seed: int) -> Findings:
    """Output to a full device, to a pipe that nobody reads, and a trace larger than a file may be."""
    findings = Findings()
    base = ["--model", str(folder), PROMPT, "--max-new-tokens", "30"]
    with tempfile.TemporaryDirectory() as temporary:
        trace = Path(temporary) / "trace.npz"
        for options, output in (([], "/dev/full"), (["--json"], "/dev/full"), (["--json"], "closed"), ([], "closed")):
            done = run_command(base + options, output=output)
            findings.note(last_line(done.stderr) if done.returncode else f"{output}: quiet")
            check_exit(findings, output, done.returncode, done.stderr, (2,) if output == "/dev/full" else (0,))
        trace.write_bytes(b"as it was")
        done = run_command([*base, "--trace", str(trace)], file_size=1000)
        findings.note(last_line(done.stderr))
        check_exit(findings, "trace", done.returncode, done.stderr, (2,))
        if trace.read_bytes() != b"as it was" or len(os.listdir(temporary)) != 1:
            findings.problems.append("a trace that could not be written changed what was there")
    return findings


def two_processes(folder: Path, cases: int, seed: int) -> Findings:
    """Two at a time on the same files."""
    findings = Findings()
    options = ["--model", str(folder), PROMPT, "--max-new-tokens", "8"]
    for _ in range(cases):
        pair = [start_command(options) for _ in range(2)]
        said = [process.communicate(timeout=DEADLINE_S) for process in pair]
        findings.note("both generated" if said[0][0] == said[1][0] and said[0][0] else "they differ")
        if said[0][0] != said[1][0] or not said[0][0]:
            findings.problems.append(f"they generated {said}")
    return findings


SCENARIOS: dict[str, Callable[[Path, int, int], Findings]] = {
    "refused allocations": refused_allocations,
    "faulty copies": faulty_copies,
    "read errors": read_errors,
    "failed resizes": failed_resizes,
    "signals": signals,
    "memory limits": memory_limits,
    "full disks": full_disks,
    "two processes": two_processes,
}


def load(folder: Path, placement: str, plan_on_device: bool = False) -> Engine:
    engine = Engine.from_pretrained(folder, device="cpu", placement=PLACEMENTS[placement], max_context=100)
    if isinstance(engine.decoder.experts, OffloadedExperts):
        engine.decoder.experts._plan_on_device = plan_on_device
    return engine


def spread(total: int, count: int) -> list[int]:
    """`count` of the numbers below `total`, or all."""
    return sorted({i * total // count for i in range(count)}) if count < total else list(range(total))


def start_command(
    options: Sequence[str], output: str = "", address_space: int = 0, file_size: int = 0
) -> subprocess.Popen[str]:
    def limit() -> None:
        if address_space:
            resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
        if file_size:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))

    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    target = open(output, "w") if output.startswith("/") else subprocess.PIPE  # noqa: SIM115
    process = subprocess.Popen(
        [*COMMAND, *options], env=environment, stdin=subprocess.DEVNULL, stdout=target, stderr=subprocess.PIPE,
        text=True, preexec_fn=limit,
    )  # fmt: skip
    if output == "closed" and process.stdout is not None:
        process.stdout.close()
        process.stdout = None
    return process


def run_command(options: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
    process = start_command(options, **how)
    out, said = process.communicate(timeout=DEADLINE_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, said)


def check_exit(findings: Findings, what: str, code: int, said: str, allowed: Sequence[int]) -> None:
    """The code is one that is documented, and what was said is no traceback of ours."""
    if code not in allowed:
        findings.problems.append(f"{what}: exit code {code}: {last_line(said)}")
    if "Traceback" in said and "in main" in said:
        findings.problems.append(f"{what}: a traceback: {said[-400:]}")


def last_line(said: str) -> str:
    return brief((said.strip() or "nothing").splitlines()[-1])


def brief(message: object) -> str:
    """The part of a message that is the same whatever it names."""
    words = str(message).split()
    return " ".join("N" if any(sign.isdigit() or sign == "/" for sign in word) else word for word in words)[:100]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder; default: the embedded model")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="repeatable; default: all")
    parser.add_argument("--cases", type=int, default=100, help="of each scenario, roughly")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="the JSON summary")
    options = parser.parse_args(argv)
    logging.disable(logging.WARNING)  # what an engine says of a fault that it survives
    source, results = provenance(), {}
    for name in options.scenario or SCENARIOS:
        began = time.perf_counter()
        try:
            found = SCENARIOS[name](options.model or embedded_folder(), options.cases, options.seed)
        except TritonMoeError as error:
            parser.error(str(error))
        results[name] = {
            "cases": found.cases, "outcomes": dict(found.outcomes.most_common()), "problems": found.problems,
            "seconds": round(time.perf_counter() - began, 1),
        }  # fmt: skip
        print(name, json.dumps(results[name]), flush=True)
        if options.output is not None:  # after each: what was done is there where the next one is cut short
            summary = {"provenance": source, "results": results}
            options.output.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return int(any(result["problems"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
