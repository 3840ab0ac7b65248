"""A few decode steps under torch.profiler: a Chrome trace, and where the time went by kernel."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from bench.measure import Stepper, phase, run_steps, synchronize

PROFILED_STEPS = 4
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CATEGORIES = ("cuda_runtime", "cuda_driver")
LAUNCHES = ("GraphLaunch", "LaunchKernel", "LaunchCooperativeKernel", "Memcpy", "Memset")  # within names of calls


def profile_steps(stepper: Stepper, path: Path, steps: int) -> list[dict[str, Any]]:
    """Write the trace of up to PROFILED_STEPS steps to `path` (.json.gz); rows {name, calls, total_us, share}, the
    largest first: kernels on a GPU, operators without their callees on a CPU."""
    is_cuda = stepper.device.type == "cuda"
    run_steps(stepper, 1)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    stepper.restart()
    with profile(activities=activities) as profiler:
        for _ in range(min(steps, PROFILED_STEPS)):
            with phase("decode step", stepper.device), record_function("decode step"):
                stepper.launch()
                stepper.tokens()
        synchronize(stepper.device)
    profiler.export_chrome_trace(str(path))
    if is_cuda:
        return _ranked(_device_times(path))
    times = {item.key: (item.count, item.self_cpu_time_total) for item in profiler.key_averages()}
    return _ranked({name: value for name, value in times.items() if name != "decode step"})


def device_events(path: Path) -> list[dict[str, Any]]:
    """Kernels, copies and fills of a Chrome trace in the order of their starts; times in us."""
    events = (event for event in _events(path) if event.get("cat") in DEVICE_CATEGORIES)
    return sorted(events, key=lambda event: event["ts"])


def host_launches(path: Path) -> int:
    """Calls of a Chrome trace by which the host gave the device something to do."""
    calls = (event["name"] for event in _events(path) if event.get("cat") in HOST_CATEGORIES)
    return sum(any(part in name for part in LAUNCHES) for name in calls)


def _events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def _device_times(path: Path) -> dict[str, tuple[int, float]]:
    """{name: (calls, us)} of everything that ran on the device, out of the trace file."""
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in device_events(path):
        calls, total = found[event["name"]]
        found[event["name"]] = (calls + 1, total + float(event["dur"]))
    return found


def _ranked(times: dict[str, tuple[int, float]]) -> list[dict[str, Any]]:
    whole = sum(total for _, total in times.values()) or 1.0
    rows = [
        {"name": name[:200], "calls": calls, "total_us": total, "share": total / whole}
        for name, (calls, total) in times.items()
    ]
    return sorted(rows, key=lambda row: row["total_us"], reverse=True)
