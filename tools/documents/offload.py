"""Regions of docs/offload.md: experts in host memory."""

from __future__ import annotations

from typing import Any

from documents.markdown import ABSENT, figure, gigabytes, listing, percent, table
from documents.measurement import each, forms, origin, runs, tpot


def routing(part: dict[str, Any]) -> str:
    """Synthetic routing by hit rate: whole records, then smaller ones, then what the host has to do with it."""
    header = [
        "policy", "hits without prediction, %", "slots", "ms per token", "schedule floor, ms", "held against, ms",
        "ratio", "hits, %", "late", "wasted", "MB per token", "saved, %",
    ]  # fmt: skip
    text = f"{part['model']} in {forms(part)}, batch {part['batch']}; all experts resident: "
    text += f"{tpot({'tpot_ms': part['resident_ms']})} ms per token.\n"
    for size in dict.fromkeys(row["record_bytes"] for row in part["rows"]):
        rows = [row for row in part["rows"] if row["record_bytes"] == size]
        rate = figure(rows[0]["gather_bytes_per_s"] / 1e9)
        text += f"\nRecords of {figure(size / 1e6)} MB, fetched at {rate} GB/s"
        text += f"; computed with weights in {part['dtype']}" if rows[0]["is_timing_only"] else ""
        text += ".\n\n" + table(header, map(_routing_cells, rows))
    for row in part["rows"]:
        if "host" in row:
            host = row["host"]
            text += f"\n{row['case'].removesuffix(':host')} %: {figure(host['launches_per_token'])} launches of the "
            text += f"host per token; with {host['busy_cores']} cores busy {100 * host['change']:+.1f} % per token.\n"
    skipped = listing("Not measured", (f"{row['case']}: {row['reason']}" for row in part["skipped"]))
    return text + skipped + origin(part)


def _routing_cells(row: dict[str, Any]) -> list[str]:
    per_token, wanted = row["per_token"], row["wanted_ratio"]
    return [
        row["case"].partition(":")[0],
        percent(row["hit_rate_without_prediction"]),
        f"{row['slots']:,}",
        tpot(row),
        figure(row["floor_ms"]["median"]),
        figure(row["best_ms"]),
        figure(row["ratio"]) + ("" if wanted is None else f" (wanted {wanted:.2f})"),
        percent(row["hit_rate"]),
        f"{per_token['late']:.1f}",
        f"{per_token['prefetched_wasted'] + per_token['cancelled']:.1f}",
        *_link_cells(row),
    ]


def offload(part: dict[str, Any]) -> str:
    """One run of the benchmark: the machine's own link, then each one that waits emulated."""
    text = f"{part['model']} in {forms(part)}, batch 1; records of {figure(part['record_bytes'] / 1e6)} MB.\n"
    for gbps in dict.fromkeys(row.get("emulated_gbps") for row in part["rows"]):
        rows = [row for row in part["rows"] if row.get("emulated_gbps") == gbps]
        rate = figure(rows[0].get("link_bytes_per_s", part["link_bytes_per_s"]) / 1e9)
        link = "The machine's own link" if gbps is None else f"A link of {gbps:g} GB/s, emulated by waits"
        text += f"\n{link}: copies of records at {rate} GB/s.\n\n" + _tables(rows)
    lines = []
    for row in part.get("skipped", []):
        link = "" if row["emulated_gbps"] is None else f", emulated {row['emulated_gbps']:g} GB/s"
        lines.append(f"{row['case']}, context {row['context']:,}{link}: {row['reason']}")
    return text + listing("Not measured", lines) + origin(part)


def _tables(rows: list[dict[str, Any]]) -> str:
    """Decode steps, then the first tokens of the prompts that were run."""
    place = ["context", "policy", "slots"]
    header = ["ms per token", "link floor, ms", "resident, ms", "time / best", "hits, %", "MB per token", "saved, %"]
    text = table([*place, *header], [[*_place(row), *_decoding_cells(row)] for row in rows])
    prompts = [[*_place(row), *_prefill_cells(row)] for row in rows if row["ttft_ms"] is not None]
    if prompts:
        header = ["first token, ms", "fetched, GB", "best, ms", "time / best"]
        text += "\n" + table([*place, *header], prompts)
    return text


def _place(row: dict[str, Any]) -> list[str]:
    slots = f"{row['slots']:,} ({percent(row['slots_share'])} %)"
    planner = ", host plans" if row.get("planner") == "host" and row["emulated_gbps"] is None else ""
    return [f"{row['context']:,}", _policy(row) + planner, slots]


def _decoding_cells(row: dict[str, Any]) -> list[str]:
    times = [row["floor_ms"], row.get("resident_ms"), row.get("ratio")]
    return [tpot(row), *map(figure, times), percent(row["counters"]["hit_rate"]["all"]), *_link_cells(row)]


def _prefill_cells(row: dict[str, Any]) -> list[str]:
    bound = figure(row.get("ttft_bound_ms"))
    return [figure(row["ttft_ms"]), gigabytes(row.get("ttft_bytes")), bound, figure(row.get("ttft_ratio"))]


def _policy(row: dict[str, Any]) -> str:
    return row["policy"].split(":")[0]


def _link_cells(row: dict[str, Any]) -> list[str]:
    """Megabytes a token, and the share of them that the policy saved of what it could save."""
    saved = row.get("saved")
    share = ABSENT if saved is None else f"{percent(saved)} of {percent(row['saved_bound'])}"
    return [figure(row["bytes_per_token"] / 1e6), share]


REGIONS = {
    "routing": lambda: each(routing, runs("routing-qwen3-30b-a3b")),
    "offload": lambda: each(offload, runs("offload-qwen3-30b-a3b")),
}
