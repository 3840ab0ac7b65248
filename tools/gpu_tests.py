"""Run the tests that a GPU is for, kernels included, and store their summary; arguments go to pytest.

Most of their time is compiling, so they are dealt out to several processes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from provenance import ROOT, provenance

OUTPUT = ROOT / "docs/measurements/gpu-tests.json"
PROCESSES = 14
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


def run(tests: list[str]) -> str:
    command = [*PYTEST, "-s", "-rs", "--tb=short", *tests]
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    ).stdout


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
    source, began = provenance(), time.perf_counter()
    tests = collect(sys.argv[1:])
    with ThreadPoolExecutor(PROCESSES) as pool:
        logs = list(pool.map(run, [tests[i::PROCESSES] for i in range(min(PROCESSES, len(tests)))]))
    for log in logs:
        if re.search(r"\d+ (failed|error)", log):
            print(log)
    results = summarise(logs)
    results["seconds"] = round(time.perf_counter() - began)
    OUTPUT.write_text(json.dumps({"provenance": source, "results": results}, indent=1) + "\n")
    print(f"{results['summary']} in {results['seconds']} s")
    return int("failed" in str(results["summary"]) or "error" in str(results["summary"]))


if __name__ == "__main__":
    sys.exit(main())
