"""Where a measurement comes from: machine, versions, commit and command, for the JSON it is stored in."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy")


def provenance() -> dict[str, object]:
    """Everything needed to repeat a measurement, without paths of this machine."""
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    return {
        "command": shlex.join(["python", name, *(_portable(argument) for argument in sys.argv[1:])]),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _portable(argument: str) -> str:
    """A file is named, but not the folder it lay in, or is to be written to."""
    return Path(argument).name if "/" in argument and Path(argument).parent.exists() else argument


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """The commit, marked when files differ from it. A copy of the tree that cannot tell is told by TRITONMOE_COMMIT."""
    told = os.environ.get("TRITONMOE_COMMIT")
    if told:
        return told
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
