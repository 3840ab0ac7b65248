"""Run the tests that a GPU is for, kernels included, and store their summary; arguments go to pytest."""

from __future__ import annotations

import json
import re
import subprocess
import sys

from provenance import ROOT, provenance

OUTPUT = ROOT / "docs/measurements/gpu-tests.json"
# What the parity tests print, one line per architecture.
PARITY = re.compile(r"\.*(\S+): rms error (\S+), transformers (\S+), ratio (\S+)")
SUMMARY = re.compile(r"^\d+ (?:passed|failed|skipped).* in .*$", re.MULTILINE)


def summarise(log: str) -> dict[str, object]:
    """The closing line of pytest, and the bfloat16 errors that the parity tests printed."""
    summary = SUMMARY.findall(log)
    if not summary:
        raise SystemExit("pytest printed no summary; its output was:\n" + log[-2000:])
    return {
        "summary": summary[-1],
        "bfloat16_rms_error": {
            name: {"ours": float(ours), "transformers": float(theirs), "ratio": float(ratio)}
            for name, ours, theirs, ratio in PARITY.findall(log)
        },
    }


def main() -> int:
    command = [sys.executable, "-m", "pytest", "-m", "gpu or kernel", "-s", "-rs", *sys.argv[1:]]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout)
    OUTPUT.write_text(json.dumps({"provenance": provenance(), "results": summarise(done.stdout)}, indent=1) + "\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
