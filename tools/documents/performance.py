"""Regions of docs/performance.md: models with all experts on the GPU."""

from __future__ import annotations

import re
from typing import Any

from documents.markdown import ABSENT, figure, gigabytes, listing, percent, table
from documents.measurement import each, forms, origin, read, tpot

BENCHES = ("bench-qwen3-30b-a3b.json", "bench-gpt-oss-20b.json")
PROFILED_KERNELS = 12  # rows of a profile that are shown one by one
NAME_LENGTH = 60  # of a kernel's name in C++


def bench(part: dict[str, Any]) -> str:
    """One model: decoding, prefill and memory, what was skipped, and what the baseline ran."""
    measured = [row for row in part["rows"] if row["status"] == "measured"]
    sizes = [[str(row["batch"]), f"{row['context']:,}"] for row in measured]
    decoding = [[*size, *_decoding_cells(row)] for size, row in zip(sizes, measured, strict=True)]
    prefill = [[*size, *_prefill_cells(row)] for size, row in zip(sizes, measured, strict=True)]
    ratios = ["floor / TPOT, %", "transformers TPOT, ms", "ratio"]
    memory = ["experts of a layer in a step", "GPU memory, GB", "transformers, GB"]
    text = f"### {model_of(part)}\n\nWeights: {gigabytes(part['weight_bytes'])} GB. A large copy moves "
    text += f"{figure(part['memory_gbps'])} GB/s.\n\n"
    text += table(["batch", "context", "TPOT, ms", "on the device", "floor, ms", *ratios], decoding) + "\n"
    text += table(["batch", "context", "TTFT, ms", "transformers TTFT, ms", *memory], prefill)
    text += listing("Not measured", _skipped(part["rows"]))
    chosen = sorted({theirs["experts"] for row in measured if (theirs := baseline_of(row)) is not None})
    if chosen:
        kinds = " or ".join(f"`{kind}`" for kind in chosen)
        text += f"\ntransformers ran `{part['baseline']['attention']}` attention and {kinds} experts.\n"
    return text + origin(part)


def model_of(part: dict[str, Any]) -> str:
    settings = part["settings"]
    weights = ", random weights" if settings["weights"] == "random" else ""
    return f"{settings['model']} in {forms(settings)}{weights}"


def baseline_of(row: dict[str, Any]) -> dict[str, Any] | None:
    """What transformers did in this row, if it was measured."""
    found = row["baseline"]
    return found if found is not None and found["status"] == "measured" else None


def _decoding_cells(row: dict[str, Any]) -> list[str]:
    ours, theirs = row["ours"], baseline_of(row)
    times = [tpot(ours), figure(ours["tpot_device_ms"]), figure(row["floor_ms"])]
    baseline = ABSENT if theirs is None else tpot(theirs)
    return [*times, percent(row["share_of_floor"]), baseline, figure(row.get("speedup"))]


def _prefill_cells(row: dict[str, Any]) -> list[str]:
    sides = row["ours"], baseline_of(row) or {"ttft_ms": None, "gpu_peak_bytes": None}
    experts = [layer["per_step"] for layer in row["distinct_experts"]]
    mean = f"{sum(experts) / len(experts):.1f}" if experts else ABSENT
    return [*(figure(side["ttft_ms"]) for side in sides), mean, *(gigabytes(side["gpu_peak_bytes"]) for side in sides)]


def _skipped(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each row, or baseline of a row, that was not measured, with the reason."""
    lines = []
    for row in rows:
        where = f"batch {row['batch']}, context {row['context']:,}"
        if row["status"] == "skipped":
            lines.append(f"{where}: {row['reason']}")
        elif row["baseline"] is not None and row["baseline"]["status"] == "skipped":
            lines.append(f"transformers, {where}: {row['baseline']['reason']}")
    return lines


def profile_decode() -> str:
    part = read("profile-qwen3-30b-a3b.json")
    found, times = part["kernels"], ("duration_us", "interval_us", "total_us")
    rows = [
        [f"`{_short(row['name'])}`", f"{row['calls']:.0f}", *(figure(row[time]) for time in times)]
        for row in found[:PROFILED_KERNELS]
    ]
    rest = found[PROFILED_KERNELS:]
    if rest:
        rows.append(_sums(f"{len(rest)} others", rest))
    rows.append(_sums("all", found))
    text = f"{part['model']}, batch {part['batch']}, context {part['context']:,}.\n\n"
    text += table(["kernel", "calls a step", "us each", "interval, us", "us a step"], rows)
    text += f"\nWithout the profiler a step takes {figure(part['step_us'])} us; its floor is "
    text += f"{figure(part['floor_us'])} us, {percent(part['share_of_floor'])} % of that.\n"
    return text + origin(part)


def _sums(name: str, rows: list[dict[str, Any]]) -> list[str]:
    calls, total = (sum(row[key] for row in rows) for key in ("calls", "total_us"))
    return [name, f"{calls:.0f}", ABSENT, ABSENT, figure(total)]


def _short(name: str) -> str:
    """A kernel's name without namespaces and argument lists, as far as it fits."""
    name = re.sub(r"\(anonymous namespace\)::|\b\w+::|^void ", "", name.replace("|", " "))
    return name if len(name) <= NAME_LENGTH else name[: NAME_LENGTH - 1].rstrip() + "…"


REGIONS = {"bench-decode": lambda: each(bench, BENCHES), "profile-decode": profile_decode}
