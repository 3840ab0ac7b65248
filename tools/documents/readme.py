"""Regions of README.md."""

from __future__ import annotations

from documents.markdown import figure, percent, table
from documents.measurement import machine, read
from documents.performance import BENCHES, baseline_of, model_of


def headline() -> str:
    """The first measured row of each model at batch 1."""
    rows, commits = [], []
    for name in BENCHES:
        part = read(name)
        row = next((r for r in part["rows"] if r["batch"] == 1 and r["status"] == "measured"), None)
        if row is None:
            raise ValueError(f"{name} has no measured row of batch 1")
        theirs = baseline_of(row)
        times = [row["ours"]["tpot_ms"]["median"], theirs and theirs["tpot_ms"]["median"], row["floor_ms"]]
        rows.append([model_of(part), machine(part), f"{row['context']:,}", *map(figure, times)])
        commits.append(part["provenance"]["commit"])
    text = table(["ms per token", "on", "prompt, tokens", "tritonmoe", "transformers", "floor"], rows)
    return text + f"\n`tools/bench.py` at commit {' and '.join(dict.fromkeys(commits))}.\n"


def headline_offload() -> str:
    """Exact decoding with experts in host memory, by the share of them that is found in slots."""
    part = read("routing-qwen3-30b-a3b.json")
    rows = [
        [percent(row["hit_rate"]), figure(row["tpot_ms"]["median"]), figure(row["floor_ms"]["median"])]
        for row in part["rows"]
        if row["case"].startswith("exact:") and not row["is_timing_only"]
    ]
    text = table(["found in slots, %", "ms per token", "floor"], sorted(rows, key=lambda row: float(row[0])))
    text = f"{part['model']} in {part['dtype']} on {machine(part)}:\n\n{text}"
    return text + f"\n`tools/bench_routing.py` at commit {part['provenance']['commit']}.\n"


REGIONS = {"headline": headline, "headline-offload": headline_offload}
