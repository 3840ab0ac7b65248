"""Draw the pictures of docs/figures from docs/measurements; `--check` only says whether they agree."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.figures import timeline, tpot_by_hit_rate
from prediction.figures import accuracy_by_bytes, drift_by_layer, recall_by_layer
from provenance import ROOT

MEASUREMENTS, PICTURES = ROOT / "docs/measurements", ROOT / "docs/figures"
FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "tpot-by-hit-rate.svg": ("routing-qwen3-30b-a3b.json", tpot_by_hit_rate),
    "timeline.svg": ("timeline-qwen3-30b-a3b.json", timeline),
    "recall-nano-text.svg": ("prediction-nano.json", partial(recall_by_layer, corpus="text")),
    "recall-nano-tasks.svg": ("prediction-nano.json", partial(recall_by_layer, corpus="tasks")),
    "drift-nano-text.svg": ("prediction-nano.json", partial(drift_by_layer, corpus="text")),
    "accuracy-nano.svg": ("prediction-nano.json", accuracy_by_bytes),
    **{
        f"{kind}-{name}{suffix}.svg": (f"prediction-{name}.json", draw)
        for name in ("sibling-qwen3", "sibling-gpt-oss")
        for kind, suffix, draw in (
            ("recall", "-text", partial(recall_by_layer, corpus="text")),
            ("recall", "-tasks", partial(recall_by_layer, corpus="tasks")),
            ("accuracy", "", accuracy_by_bytes),
            ("drift", "-text", partial(drift_by_layer, corpus="text")),
        )
    },
}


def stale() -> dict[str, str | None]:
    """The pictures that are not what their measurement says, and what they should be: None, not there at all."""
    found: dict[str, str | None] = {}
    for name, (source, draw) in FIGURES.items():
        measurement, picture = MEASUREMENTS / source, PICTURES / name
        new = draw(json.loads(measurement.read_text(encoding="utf-8"))) if measurement.is_file() else None
        old = picture.read_text(encoding="utf-8") if picture.is_file() else None
        if new != old:
            found[name] = new
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a picture is out of date")
    check = parser.parse_args(arguments).check
    found = stale()
    for name, text in found.items():
        if text is None:
            parser.error(f"{PICTURES.name}/{name} has no measurement {FIGURES[name][0]}")
        if not check:
            PICTURES.mkdir(exist_ok=True)
            (PICTURES / name).write_text(text, encoding="utf-8")
    if found:
        print(("out of date: " if check else "written: ") + ", ".join(found))
    return 1 if check and found else 0


if __name__ == "__main__":
    sys.exit(main())
