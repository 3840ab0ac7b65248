"""The tables of `tools/evaluate.py`, in Markdown."""

from __future__ import annotations

from typing import Any

from documents.markdown import ABSENT, percent, percent_right, table


def recall_table(part: dict[str, Any], corpus: str, measure: str = "recall") -> str:
    """By layer and predictor, and the mean of the layers."""
    rows = part["results"][corpus]["recall"]
    layers = sorted({int(layer) for found in rows.values() for layer in found})
    cells = [
        [
            str(layer),
            *(percent(found[str(layer)][measure]) if str(layer) in found else ABSENT for found in rows.values()),
        ]
        for layer in layers
    ]
    means = [_mean(found, measure) for found in rows.values()]
    return table(["layer", *rows], [*cells, ["mean", *map(percent, means)]])


def summary_table(part: dict[str, Any], corpus: str) -> str:
    """By predictor: means over layers, and the layer that is foretold worst."""
    rows = []
    for name, found in part["results"][corpus]["recall"].items():
        worst = min(found, key=lambda layer: found[layer]["recall"])
        means = [percent(_mean(found, measure)) for measure in ("recall", "gate_mass_recall", "precision", "whole")]
        rows.append([name, *means, f"{percent(found[worst]['recall'])} (layer {worst})"])
    header = ["predictor", "recall, %", "of gate mass, %", "precision, %", "tokens foretold whole, %", "worst layer, %"]
    return table(header, rows)


def drift_table(part: dict[str, Any], corpus: str) -> str:
    """Cosine to the true router input, and Spearman's rho of the logits, by layer."""
    found = part["results"][corpus]["drift"]
    states = [name for name, rows in found.items() if next(iter(rows.values()))["cosine"] is not None]
    rows = []
    for layer in sorted({int(layer) for rows in found.values() for layer in rows}):
        cosines = [f"{found[name][str(layer)]['cosine']:.3f}" for name in states]
        rows.append([str(layer), *cosines, *(f"{rows[str(layer)]['spearman']:.3f}" for rows in found.values())])
    header = ["layer", *(f"cos, {name}" for name in states), *(f"ρ, {name}" for name in found)]
    return table(header, rows)


def _mean(found: dict[str, Any], measure: str) -> float:
    return sum(row[measure] for row in found.values()) / len(found)


def accuracy_of(row: dict[str, Any]) -> tuple[float, float] | None:
    """The mean of the task files' accuracies and its standard error."""
    cells = list(row["tasks"].values())
    if not cells:
        return None
    error = sum(cell["standard_error"] ** 2 for cell in cells) ** 0.5 / len(cells)
    return sum(cell["accuracy"] for cell in cells) / len(cells), error


def policy_table(part: dict[str, Any]) -> str:
    """Text and answers by policy."""
    rows = part["results"]
    names = list(dict.fromkeys(name for row in rows for name in row["tasks"]))
    lines = []
    for row in rows:
        mean, cells = accuracy_of(row), list(row["tasks"].values())
        same = None if not cells else sum(cell["same_answers"] for cell in cells) / len(cells)
        place = "" if row["batch"] > 1 or row["policy"] == "resident" else f", {row['slots']} of the slots"
        items = " to ".join(str(n) for n in sorted({cell["items"] for cell in cells}))
        lines.append(
            [
                row["policy"] + place,
                f"{row['text']['perplexity'] / row['text']['baseline_perplexity']:.4f}" if "text" in row else ABSENT,
                *(percent_right(row["tasks"][name]) for name in names),
                ABSENT if mean is None else f"{percent(mean[0])} ± {percent(mean[1])}",
                percent(same),
                items or ABSENT,
            ]
        )
    header = [
        "policy",
        "perplexity / baseline's",
        *names,
        "mean, % right",
        "answers as the baseline's, %",
        "items a file",
    ]
    return table(header, lines)


def traffic_table(part: dict[str, Any]) -> str:
    """Bytes and hits by policy and share of slots, for one sequence at a time."""
    lines = []
    for row in part["results"]:
        for share, cell in row.get("traffic", {}).items():
            late = cell.get("late", 0) / max(1, cell.get("routed", 0))
            wasted = cell.get("wasted", 0) / max(1, cell.get("prefetched", 0))
            cells = [percent(cell["hit_rate"]), percent(late), percent(wasted)]
            lines.append([row["policy"], share, f"{cell['bytes_per_token'] / 1e6:.3f}", *cells])
    header = ["policy", "slots", "MB per token", "hits, %", "late, %", "of prefetches wasted, %"]
    return table(header, lines)


def cache_table(part: dict[str, Any]) -> str:
    rows = part["results"]["rows"]
    names = [name for name in rows[0] if name not in ("share", "slots", "static", "best")]
    lines = [
        [
            percent(row["share"]),
            percent(row["static"]),
            *(f"{percent(row[name]['hit_rate'])} ({row[name]['bytes_per_token'] / 1e6:.3f})" for name in names),
            percent(row.get("best")),
        ]
        for row in rows
    ]
    header = ["slots, %", "static set, % hits", *(f"{name}, % (MB per token)" for name in names), "best possible, %"]
    return table(header, lines)


def report(content: dict[str, Any]) -> str:
    """Everything that a file has."""
    text = f"# {content['model']}\n"
    if "policies" in content:
        text += f"\n## Policies\n\n{policy_table(content['policies'])}\n{traffic_table(content['policies'])}"
    if "prediction" in content:
        part = content["prediction"]
        for corpus in part["results"]:
            if corpus == "top_k":
                continue
            text += f"\n## Prediction, {corpus}\n\n{summary_table(part, corpus)}\n{recall_table(part, corpus)}\n"
            text += drift_table(part, corpus)
    if "caches" in content:
        text += f"\n## Caches\n\n{cache_table(content['caches'])}"
    return text
