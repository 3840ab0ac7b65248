"""`python -m tritonmoe.doctor`: what this machine has, how fast its link is, whether the engine works on it, and what
to run. It takes less than a minute, and needs no network. Exit code 0 where all is right, 1 where something is not."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import math
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import constants

import tritonmoe
from tritonmoe import self_test
from tritonmoe.checkpoint.quantization import EXPERT_FORMATS
from tritonmoe.errors import EXIT_FAULT, EXIT_INTERRUPTED, TritonMoeError
from tritonmoe.files import discard_stdout
from tritonmoe.memory import available_bytes, empty_tensor
from tritonmoe.model.expert_store import ExpertStore, RecordLayout
from tritonmoe.model.operations import kernels
from tritonmoe.placement.memory_plan import format_bytes
from tritonmoe.placement.storage import WANTED_SHARE

PACKAGES = ("torch", "triton", "safetensors", "tokenizers", "huggingface-hub", "numpy")
QUERY = {
    "driver": "driver_version",
    "link_generation": "pcie.link.gen.current",
    "link_generation_most": "pcie.link.gen.max",
    "link_width": "pcie.link.width.current",
    "link_width_most": "pcie.link.width.max",
}
COPIED_BYTES = 256 << 20
RECORD = RecordLayout(2048, 768, torch.bfloat16, has_bias=False)  # of Qwen3-30B-A3B: 9.44 MB
TRIAL_BYTES = 1 << 30  # to pin
COPIES = 5
ROOM_BYTES = 4 << 30  # on the GPU, beside weights: caches, workspace, some slots
PLAIN, FEWER_BITS = "bfloat16", "int4"  # of experts: as most are published, and what is advised where those are many
SMALLER_REST = "--dense-dtype int8 --embedding host"  # for what is not experts


class Sizes(NamedTuple):
    """Billions of parameters of a model as it is published."""

    all: float
    outside: float  # of routed experts
    embedding: float
    active: float  # of a token's experts


MODELS = {  # with their experts' form
    "openai/gpt-oss-20b": (Sizes(20.9, 1.8, 0.58, 2.4), "mxfp4"),
    "Qwen/Qwen3-30B-A3B": (Sizes(30.5, 1.5, 0.31, 1.8), PLAIN),
    "mistralai/Mixtral-8x7B-v0.1": (Sizes(46.7, 1.6, 0.13, 11.3), PLAIN),
    "openai/gpt-oss-120b": (Sizes(116.8, 2.1, 0.58, 3.6), "mxfp4"),
    "Qwen/Qwen3-235B-A22B": (Sizes(235.1, 8.0, 0.62, 14.2), PLAIN),
}

Report = dict[str, Any]


def examine(device: torch.device) -> Report:
    """Everything, as plain values; "problems" says in a line each what is not as it should be."""
    report: Report = {"versions": versions(), "gpu": None, "memory": memory(device), "problems": []}
    if device.type == "cuda":
        report["gpu"] = gpu(device)
    report["bandwidth_gbps"] = bandwidths(device)
    if device.type == "cuda":
        report["gpu"] |= query_driver(device)  # now that the link is awake
        report["pinning"] = pinning()
    report["self_test"] = run_tests(device, report["problems"])
    report["advice"] = advice(report)
    return report


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"tritonmoe": tritonmoe.__version__, "python": platform.python_version()}
    found["system"] = platform.platform()
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "free_bytes": available_bytes(device),
    }


def query_driver(device: torch.device) -> dict[str, str | None]:
    """What only the driver's tool tells; None where that is not there."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY.values())}", "--format=csv,noheader,nounits"]
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    try:
        done = subprocess.run(
            [*command, f"--id={index if uuid is None else f'GPU-{uuid}'}"],
            capture_output=True, text=True, check=True, timeout=20,
        )  # fmt: skip
        values = [value.strip() for value in done.stdout.strip().split(",")]
    except (OSError, subprocess.SubprocessError):
        values = []
    return dict(zip(QUERY, values if len(values) == len(QUERY) else [None] * len(QUERY), strict=True))


def memory(device: torch.device) -> dict[str, int | None]:
    """Bytes that are free; limits are None where there is none."""
    cache = Path(constants.HF_HUB_CACHE)
    folder = next(path for path in (cache, *cache.parents) if path.exists())
    limits = {"lockable_bytes": resource.RLIMIT_MEMLOCK, "address_space_bytes": resource.RLIMIT_AS}
    found: dict[str, int | None] = {
        "host_free_bytes": available_bytes(torch.device("cpu")),
        "device_free_bytes": available_bytes(device),
        "cache_free_bytes": shutil.disk_usage(folder).free,
    }
    for name, limit in limits.items():
        soft, _ = resource.getrlimit(limit)
        found[name] = None if soft == resource.RLIM_INFINITY else soft
    return found


def bandwidths(device: torch.device) -> dict[str, float]:
    """GB/s of the best of a few copies."""
    host = torch.ones(COPIED_BYTES, dtype=torch.uint8)
    if device.type != "cuda":
        return {"copy within main memory": _rate(torch.empty_like(host), host)}
    pinned, there = host.pin_memory(), torch.empty_like(host, device=device)
    record = pinned[: RECORD.num_bytes]
    return {
        "host to device, pinned": _rate(there, pinned),
        "host to device, one expert of 9.4 MB": _rate(there[: RECORD.num_bytes], record),
        "host to device, pageable": _rate(there, host),
        "device to host, pinned": _rate(pinned, there),
    }


def _rate(to: torch.Tensor, source: torch.Tensor) -> float:
    def wait() -> None:
        if to.is_cuda or source.is_cuda:
            torch.cuda.synchronize()

    times = []
    for _ in range(COPIES):
        wait()
        began = time.perf_counter()
        to.copy_(source, non_blocking=True)
        wait()
        times.append(time.perf_counter() - began)
    return to.nbytes / min(times) / 1e9


def pinning() -> dict[str, Any]:
    """Whether a gigabyte can be registered as expert stores are, and how fast."""
    num_records = math.ceil(TRIAL_BYTES / RECORD.num_bytes)
    arena = empty_tensor((num_records, RECORD.num_bytes), torch.uint8, torch.device("cpu")).zero_()
    store = ExpertStore(RECORD, [arena], {0: arena})
    began = time.perf_counter()
    is_pinned = store.pin()
    seconds = time.perf_counter() - began
    store.close()
    return {"tried_bytes": arena.nbytes, "is_pinned": is_pinned, "gb_per_s": arena.nbytes / seconds / 1e9}


def run_tests(device: torch.device, problems: list[str]) -> dict[str, Any]:
    """Each test's result and seconds; what fails goes to `problems`."""
    found: dict[str, Any] = {}

    def run(name: str, test: Callable[[], list[str]]) -> None:
        began = time.perf_counter()
        try:
            wrong = test()
        except TritonMoeError as error:
            wrong = [str(error)]
        except Exception as error:  # a compiler or a driver that fails is what this is for
            wrong = [f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"]
        found[name] = {"is_right": not wrong, "seconds": round(time.perf_counter() - began, 2)}
        problems.extend(f"{name}: {line}" for line in wrong)

    def compare_kernels() -> list[str]:
        twins = self_test.nano_kernels(device, kernels())
        found["kernel_errors"] = {name: round(error, 3) for name, error in twins.errors.items()}
        missed = [f"{name} was not run" for name in twins.errors if not twins.calls[name]]
        return [*twins.problems.values(), *missed]

    def compare_transfers() -> list[str]:
        wrong = self_test.compare_transfers(device)
        return [] if wrong is None else [wrong]

    if device.type == "cuda":
        run("kernels against their references", compare_kernels)
    run("experts in host memory against resident ones", compare_transfers)
    return found


def advice(report: Report) -> list[str]:
    """What to run, and what to change about the machine."""
    free, on_gpu = report["memory"], report["gpu"] is not None
    lines = []
    if on_gpu and not report["pinning"]["is_pinned"]:
        lines.append("memory cannot be pinned: raise `ulimit -l`, or experts are copied slower and planned on the host")
    if not on_gpu:
        lines.append("no GPU: models run on the CPU, for trying out; --dtype bfloat16 halves their memory")
    room = (free["device_free_bytes"] or 0) - ROOM_BYTES if on_gpu else None, free["host_free_bytes"] or 0
    rate = report["bandwidth_gbps"].get("host to device, one expert of 9.4 MB")
    for name, (sizes, form) in MODELS.items():
        share, how = fit(sizes, form, *room, rate)
        line = f"{name} in {form} {how}"
        if form == PLAIN and share < WANTED_SHARE:
            form = FEWER_BITS
            share, fewer = fit(sizes, form, *room, rate)
            if fewer != how:  # the same where what is not experts is too large
                line += f"; with --expert-dtype {form} it {fewer}"
        if on_gpu and share < WANTED_SHARE:
            more, smaller = fit(sizes, form, *room, rate, has_smaller_rest=True)
            if more > share:
                line += f"; with {SMALLER_REST}, too, it {smaller}"
        lines.append(line)
    return lines


def bytes_per_weight(form: str) -> float:
    """Of a matrix in this form, its scales included."""
    layout = replace(RECORD, format=EXPERT_FORMATS.get(form))
    return layout.num_bytes / (3 * layout.hidden * layout.intermediate)


def fit(
    sizes: Sizes,
    form: str,
    device_room: int | None,
    host_room: int,
    gbps: float | None,
    has_smaller_rest: bool = False,
) -> tuple[float, str]:
    """How much of a model can be on the GPU (of its experts, in slots), and how it runs; with what is not experts in
    bfloat16, or as SMALLER_REST has it."""
    per_weight = bytes_per_weight(form)
    experts, rest = 1e9 * (sizes.all - sizes.outside) * per_weight, 1e9 * sizes.outside * RECORD.dtype.itemsize
    if has_smaller_rest:
        rest = 1e9 * (sizes.outside - sizes.embedding) * bytes_per_weight("int8")
        host_room -= round(1e9 * sizes.embedding * RECORD.dtype.itemsize)
    if device_room is None:
        if experts + rest <= host_room:
            return 1.0, "fits in main memory"
        return 0.0, f"does not fit: its {(experts + rest) / 1e9:.0f} GB are more than what is free in main memory"
    if experts + rest <= device_room:
        return 1.0, "fits: --policy resident, with as long a --max-context as there is room for"
    if rest > device_room or experts > host_room:
        what, where = ("rest", "on the GPU") if rest > device_room else ("experts", "in main memory")
        size = (rest if rest > device_room else experts) / 1e9
        return 0.0, f"does not fit: its {what} ({size:.0f} GB) are more than what is free {where}"
    share = (device_room - rest) / experts
    how = f"fits with experts in host memory: --policy exact (the default), {100 * share:.0f} % of them in slots"
    if gbps is not None:
        how += f"; at most {sizes.active * per_weight / gbps * 1e3:.0f} ms per token for what no slot holds"
    return share, how


def lines(report: Report) -> list[str]:
    """The report to read."""
    found = [", ".join(f"{name} {version}" for name, version in report["versions"].items() if version is not None)]
    if report["gpu"] is None:
        found.append("GPU: none that torch can use, so no kernel was tested")
    else:
        card = report["gpu"]
        now, most = ((card[f"link_generation{end}"], card[f"link_width{end}"]) for end in ("", "_most"))
        link = "its link is not told" if None in now else f"PCIe {now[0]} x{now[1]} (at most {most[0]} x{most[1]})"
        capability = f"compute capability {card['compute_capability']}"
        found.append(f"GPU: {card['name']}, {capability}, driver {card['driver'] or 'not told'}, {link}")
    for name, size in report["memory"].items():
        label = name.removesuffix("_bytes").replace("_", " ")
        found.append(f"{label}: {'no limit' if size is None else format_bytes(size)}")
    found += [f"{name}: {rate:.1f} GB/s" for name, rate in report["bandwidth_gbps"].items()]
    if "pinning" in report:
        trial = report["pinning"]
        outcome = f"yes, at {trial['gb_per_s']:.1f} GB/s" if trial["is_pinned"] else "no"
        found.append(f"pinning {trial['tried_bytes'] / 1e9:.1f} GB: {outcome}")
    for name, outcome in report["self_test"].items():
        if "is_right" in outcome:
            found.append(f"{name}: {'right' if outcome['is_right'] else 'WRONG'} ({outcome['seconds']:.1f} s)")
    found += [f"advice: {line}" for line in report["advice"]]
    found += [f"problem: {line}" for line in report["problems"]] or ["no problem was found"]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Examine the machine, print what was found; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tritonmoe.doctor",
        description="Say what this machine has, test the engine on it, and advise on what to run.",
        epilog="exit codes: 0 all is right, 1 something is not (the lines that begin with 'problem'), 2 bad options, "
        "130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="what to test (default: auto)"
    )
    options = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    is_there = torch.cuda.is_available()
    try:
        report = examine(torch.device("cuda" if is_there and options.device != "cpu" else "cpu"))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    if options.device == "cuda" and not is_there:
        report["problems"].append(
            "--device cuda: torch finds no GPU here; see the driver, and which torch is installed"
        )
    try:
        print(json.dumps(report, indent=1) if options.json else "\n".join(lines(report)), flush=True)
    except BrokenPipeError:
        discard_stdout()  # the reader has gone (`| head`), which is its right
    except OSError as error:
        discard_stdout()
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return EXIT_FAULT
    return int(bool(report["problems"]))


if __name__ == "__main__":
    sys.exit(main())
