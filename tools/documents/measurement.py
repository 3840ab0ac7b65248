"""What lies in docs/measurements, and what is said of every measurement."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from provenance import ROOT

from documents.markdown import spread

MEASUREMENTS = ROOT / "docs/measurements"
NOT_YET = "Not measured yet.\n"


def read(name: str) -> dict[str, Any]:
    path = MEASUREMENTS / name
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent.name}/{name} is missing, and a document shows what is in it")
    return json.loads(path.read_text(encoding="utf-8"))


def files(pattern: str) -> list[str]:
    """The names of the files, that of a measurement before those of its other runs ("a.json" before "a-b.json")."""
    return [path.name for path in sorted(MEASUREMENTS.glob(pattern), key=lambda path: path.stem)]


def runs(name: str) -> list[str]:
    """The file of a measurement, which must be there, and those of its other runs, which may differ in settings."""
    return [f"{name}.json", *files(f"{name}-*.json")]


def each(show: Callable[[dict[str, Any]], str], names: Iterable[str]) -> str:
    """One after the other, of any number of files."""
    return "\n".join(show(read(name)) for name in names) or NOT_YET


def machine(part: dict[str, Any]) -> str:
    source = part["provenance"]
    return source.get("gpu") or f"{source['cpu']}, {source['torch_threads']} thread(s)"


def origin(part: dict[str, Any]) -> str:
    """One line that says how to repeat a measurement."""
    source = part["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
    command = re.sub(r" --output \S+", "", source["command"])  # where the result lay does not matter
    return f"\n`{command}` at commit {source['commit']} on {machine(part)} ({versions}).\n"


def forms(part: dict[str, Any]) -> str:
    """The type that was computed in, and what was kept in fewer bits."""
    kept = {"experts": part.get("expert_dtype"), "other matrices": part.get("dense_dtype")}
    fewer = [f"{what} in {form}" for what, form in kept.items() if form not in (None, part["dtype"])]
    return ", ".join([part["dtype"], *fewer])


def tpot(side: dict[str, Any]) -> str:
    return spread(*(side["tpot_ms"][kind] for kind in ("median", "p10", "p90")))
