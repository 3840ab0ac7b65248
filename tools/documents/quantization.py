"""Regions of docs/quantization.md: what fewer bits cost and bring. Any number of files, none included."""

from __future__ import annotations

import statistics
from typing import Any

from documents.kernels import kernels
from documents.markdown import ABSENT, figure, listing, percent, percent_right, spread, table
from documents.measurement import NOT_YET, each, files, origin, read
from documents.offload import routing
from documents.performance import bench


def quantization_error(part: dict[str, Any]) -> str:
    """What formats of experts cost a model, of tools/quantization_error.py."""
    header = ["experts", "bits", "error of weights, %", "of layers, % (least–greatest)"]
    header += ["bits per character", "perplexity", "easy tasks, %", "hard tasks, %"]
    rows = []
    for name, found in part["formats"].items():
        layers, text, tasks = found.get("layers"), found["text"], found.get("tasks")
        cells = [ABSENT] * 3
        if layers:
            weights = [layer[kind] for layer in layers for kind in ("gate_up", "down")]
            outputs = [100 * layer["outputs"] for layer in layers]
            errors = spread(statistics.median(outputs), min(outputs), max(outputs))
            cells = [figure(found["bits"]), figure(100 * statistics.mean(weights)), errors]
        shares = map(percent_right, tasks.values()) if tasks else [ABSENT] * 2
        rows.append([name, *cells, f"{text['bits_per_character']:.4f}", f"{text['perplexity_per_token']:.2f}", *shares])
    characters = part["formats"][next(iter(part["formats"]))]["text"]["characters"]
    return f"{part['model']}, {characters:,} characters of held-out text.\n\n" + table(header, rows) + origin(part)


def memory(part: dict[str, Any]) -> str:
    """What a model took of a card by the driver, beside the budget that was given."""
    header = ["budget", "experts in", "slots, % of experts", "by the plan used, GiB", "taken, GiB", "main memory, GiB"]
    cells = []
    for row in part["rows"]:
        used = row["budget_bytes"] - row["plan"].get("not used", 0)
        sizes = [used, max(row["taken_bytes"].values()), row["host_bytes"]]
        share = percent(row["slot_share"]) if row["slots"] else "all resident"
        cells.append([row["budget"], row["expert_dtype"], share, *(figure(size / 2**30) for size in sizes)])
    text = f"{part['model']} in {part['dtype']}, a context of {part['max_context']:,} tokens.\n\n{table(header, cells)}"
    return text + listing("Not run", (f"{row['budget']}: {row['reason']}" for row in part["skipped"])) + origin(part)


def packed() -> str:
    """Runs with weights in fewer bits, of tools/bench_kernels.py, tools/bench.py and tools/bench_routing.py."""
    shows = {"kernels": kernels, "bench": bench, "routing": routing}
    texts = [show(read(name)) for tool, show in shows.items() for name in files(f"packed-{tool}-*.json")]
    return "\n".join(texts) or NOT_YET


REGIONS = {
    "quantization-error": lambda: each(quantization_error, files("quantization-*.json")),
    "memory": lambda: each(memory, files("memory-*.json")),
    "packed": packed,
}
