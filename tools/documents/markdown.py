"""Figures, lists and tables, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable

ABSENT = "—"


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def listing(title: str, lines: Iterable[str]) -> str:
    """Lines below a title; nothing where there are none."""
    points = "".join(f"- {line}\n" for line in lines)
    return points and f"\n{title}:\n\n{points}"


def figure(value: float | None) -> str:
    """Three significant digits, or all of those before the point."""
    if value is None:
        return ABSENT
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def spread(median: float, low: float, high: float) -> str:
    return f"{figure(median)} ({figure(low)}–{figure(high)})"


def percent(share: float | None) -> str:
    return ABSENT if share is None else f"{100 * share:.1f}"


def percent_right(cell: dict[str, float]) -> str:
    """The accuracy of a task file, with its standard error."""
    return f"{percent(cell['accuracy'])} ± {percent(cell['standard_error'])}"


def gigabytes(num_bytes: int | None) -> str:
    return figure(None if num_bytes is None else num_bytes / 1e9)
