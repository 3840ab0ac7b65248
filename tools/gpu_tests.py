"""Run the tests that a GPU is for, kernels included, and store their summary; other arguments go to pytest.

Most of their time is compiling, so they are dealt out to several processes, a few tests of one file at a time; where
there are several GPUs, to all of them in turn. With `--time-limit S` what has not ended after so many seconds is
stopped, and counted as not run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import torch
from provenance import ROOT, provenance

OUTPUT = ROOT / "docs/measurements/gpu-tests.json"
SPARE_CORES = 2
MOST_PROCESSES = 28  # of one GPU, whose memory holds the context of each
TESTS_PER_PART = 12  # of one file: what they compile they share; and what is lost where a part is stopped
PYTEST = [sys.executable, "-m", "pytest", "-m", "gpu or kernel"]
# What the parity tests print, one line per architecture.
PARITY = re.compile(r"^(\S+): rms error (\S+), transformers (\S+), ratio (\S+)$", re.MULTILINE)
SUMMARY = re.compile(r"^(?:\d+ \w+,? ?)+ in [\d.]+s.*$", re.MULTILINE)
COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


def collect(arguments: list[str]) -> list[str]:
    """Node ids of all tests to run."""
    command = [*PYTEST, "--collect-only", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if "::" in line and not line.startswith(" ")]
    if not found:
        raise SystemExit("pytest collected nothing; its output was:\n" + (done.stdout + done.stderr)[-2000:])
    return found


def deal(tests: list[str]) -> list[list[str]]:
    """The tests in parts of one file each."""
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.partition("::")[0], []).append(test)
    starts = [(found, i) for found in files.values() for i in range(0, len(found), TESTS_PER_PART)]
    return [found[i : i + TESTS_PER_PART] for found, i in starts]


def visible_gpus() -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES; at least one."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return given.split(",")
    return [str(i) for i in range(max(1, torch.cuda.device_count()))]


def run(tests: list[str], ends: float | None, gpus: Queue[str]) -> str | None:
    """What pytest prints; None if it had not ended at `ends` on the clock of time.perf_counter."""
    gpu = gpus.get()
    try:
        return _run(tests, ends, gpu)
    finally:
        gpus.put(gpu)


def _run(tests: list[str], ends: float | None, gpu: str) -> str | None:
    left = None if ends is None else ends - time.perf_counter()
    if left is not None and left <= 0:
        return None
    command = [*PYTEST, "-s", "-rs", "--tb=short", *tests]
    try:
        return subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=left,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
        ).stdout  # fmt: skip
    except subprocess.TimeoutExpired:
        return None


def summarise(logs: list[str]) -> dict[str, object]:
    """Counts over all processes, and the bfloat16 errors that the parity tests printed."""
    counts: Counter[str] = Counter()
    for log in logs:
        summary = SUMMARY.findall(log)
        if not summary:
            raise SystemExit("pytest printed no summary; its output was:\n" + log[-3000:])
        for number, outcome in COUNT.findall(summary[-1]):
            counts[outcome] += int(number)
    parity = sorted(line for log in logs for line in PARITY.findall(log))
    return {
        "summary": ", ".join(
            f"{counts[name]} {name}" for name in ("passed", "failed", "error", "skipped") if counts[name]
        ),
        "bfloat16_rms_error": {
            name: {"ours": float(ours), "transformers": float(theirs), "ratio": float(ratio)}
            for name, ours, theirs, ratio in parity
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--time-limit", type=float, metavar="S")
    parser.add_argument("--output", type=Path, help="the JSON to write (default: the documents', for all tests)")
    options, arguments = parser.parse_known_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    if arguments and options.output is None:
        parser.error("these are not all tests: give --output, so as not to write over what the documents show")
    source, began = provenance(), time.perf_counter()
    ends = None if options.time_limit is None else began + options.time_limit
    parts, names, gpus = deal(collect(arguments)), visible_gpus(), Queue[str]()
    processes = max(1, min((os.cpu_count() or 1) - SPARE_CORES, MOST_PROCESSES * len(names)))
    for i in range(processes):
        gpus.put(names[i % len(names)])
    with ThreadPoolExecutor(processes) as pool:
        logs = list(pool.map(run, parts, [ends] * len(parts), [gpus] * len(parts)))
    for log in logs:
        if log is not None and re.search(r"\d+ (failed|error)", log):
            print(log)
    not_run = sum(len(part) for part, log in zip(parts, logs, strict=True) if log is None)
    results = summarise([log for log in logs if log is not None])
    if not_run:
        results["summary"] = f"{results['summary']}, {not_run} not run"
    results["seconds"] = round(time.perf_counter() - began)
    (options.output or OUTPUT).write_text(json.dumps({"provenance": source, "results": results}, indent=1) + "\n")
    print(f"{results['summary']} in {results['seconds']} s")
    for part, log in zip(parts, logs, strict=True):
        if log is None:
            print(f"not run to its end: {part[0]} and {len(part) - 1} more")
    return int(any(word in str(results["summary"]) for word in ("failed", "error", "not run")))


if __name__ == "__main__":
    sys.exit(main())
