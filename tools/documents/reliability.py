"""Regions of docs/reliability.md."""

from __future__ import annotations

from documents.markdown import ABSENT, figure, listing, table
from documents.measurement import origin, read, runs

STEPS = ("decode", "prefill")


def fuzz() -> str:
    part = read("fuzz.json")
    header = ["files", "cases", "of them directed", "accepted", "refused", "findings", "longest, s", "most memory, MiB"]
    rows = []
    for name, row in part["kinds"].items():
        refused = ", ".join(f"{count:,} {error}" for error, count in row["refused"].items()) or ABSENT
        counts = [f"{row[key]:,}" for key in ("cases", "directed", "accepted")]
        most = [figure(row["longest_s"]), f"{row['grown_mib']:.0f}"]
        rows.append([name, *counts, refused, str(len(row["findings"])), *most])
    text = f"{part['cases']:,} cases, {part['findings']} findings; a case may take {part['case_seconds']:g} s and map "
    return text + f"{part['memory_mib']:,} MiB.\n\n" + table(header, rows) + origin(part)


def faults() -> str:
    """What every scenario came to, and how often each outcome was seen."""
    part = read("inject-faults.json")
    rows = []
    for name, found in part["results"].items():
        outcomes = (f"{count} x {said}".replace("|", " ") for said, count in found["outcomes"].items())
        rows.append([name, f"{found['cases']:,}", "; ".join(outcomes)])
    text = table(["scenario", "cases", "how they ended"], rows)
    problems = [line for found in part["results"].values() for line in found["problems"]]
    return text + _problems(problems) + origin(part)


def soak() -> str:
    """Every run that is stored."""
    parts = [read(name) for name in runs("soak-nano")]
    header = ["policy", "slots", "tokens", "generations", "compared", "records fetched", "memory, MB", "grown by, MB"]
    rows, problems = [], []
    for found in (found for part in parts for found in part["results"]):
        counted, host = found["counters"], found["host_bytes"]
        fetched = sum(counted[f"{step} {what}"] for step in STEPS for what in ("demand", "prefetched"))
        counts = [f"{found[name]:,}" for name in ("tokens", "generations", "compared_tokens")]
        most = max(size for name, size in host.items() if name != "grown")
        sizes = [figure(most / 1e6), f"{host['grown'] / 1e6:.1f}"]
        rows.append([found["policy"], f"{found['slots']:,} of {found['experts']:,}", *counts, f"{fetched:,}", *sizes])
        problems += found["problems"]
    return table(header, rows) + _problems(problems) + "".join(map(origin, parts))


def _problems(lines: list[str]) -> str:
    return listing("Problems", lines) or "\nNo problem was found.\n"


REGIONS = {"fuzz": fuzz, "faults": faults, "soak": soak}
