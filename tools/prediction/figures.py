"""The pictures of `tools/evaluate.py`'s results: recall and drift by layer, accuracy against what is moved."""

from __future__ import annotations

from typing import Any

from bench.svg import Axis, Svg

from .report import accuracy_of

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 84, 52
LOOKS = {
    "residual": "a", "quasi-hidden": "b", "estimator": "c", "hybrid": "demand",
    "this layer's router input": "wasted", "untrained": "resident",
}  # fmt: skip


def recall_by_layer(content: dict[str, Any], corpus: str) -> str:
    """Recall of the next layer's experts, in percent; an untrained model's residual for comparison."""
    found = content["prediction"]["results"]
    series = {name: _points(rows, "recall") for name, rows in found[corpus]["recall"].items() if name in LOOKS}
    series["untrained"] = _points(found["untrained"]["recall"]["residual"], "recall")
    title = f"{content['model']}: recall of the {found['top_k']} experts of each layer, {corpus}"
    return _by_layer(title, series, "recall, %", 100.0)


def drift_by_layer(content: dict[str, Any], corpus: str) -> str:
    """Cosine of what stands for a layer's router input to the true one."""
    found = content["prediction"]["results"][corpus]["drift"]
    states = {name: rows for name, rows in found.items() if next(iter(rows.values()))["cosine"] is not None}
    series = {name: _points(rows, "cosine") for name, rows in states.items() if name in LOOKS}
    return _by_layer(f"{content['model']}: nearness to the true router input, {corpus}", series, "cosine", 1.0)


def accuracy_by_bytes(content: dict[str, Any]) -> str:
    """Exact match over megabytes a token, a point for each policy and share of slots, and the front of the best."""
    points = []
    for row in content["policies"]["results"]:
        mean = accuracy_of(row)
        for share, cell in row.get("traffic", {}).items() if mean is not None else ():
            assert mean is not None
            points.append((cell["bytes_per_token"] / 1e6, 100 * mean[0], 100 * mean[1], f"{row['policy']}, {share}"))
    if not points:
        raise ValueError("no policy whose accuracy and bytes were both measured")
    x = Axis(0.0, 1.25 * max(p[0] for p in points) + 1e-9, LEFT, WIDTH - RIGHT)
    y = Axis(0.0, 100.0, HEIGHT - BOTTOM, TOP)
    picture = Svg(WIDTH, HEIGHT, f"Accuracy over bytes a token, {content['model']}")
    picture.text(LEFT, 22, f"{content['model']}: tasks right and what is moved, one sequence at a time", kind="title")
    picture.axes(x, y, "MB per token", "tasks right, % (bars: standard error)")
    front = pareto(points)
    picture.line([(x.at(p[0]), y.at(p[1])) for p in front], "floor")
    for place, right, error, name in sorted(points):
        look = "c" if (place, right, error, name) in front else "a"
        picture.line(
            [(x.at(place), y.at(right - error)), (x.at(place), y.at(min(100, right + error)))], f"{look} curve"
        )
        picture.circle(x.at(place), y.at(right), 3.5, look, f"{name}: {place:.3f} MB, {right:.1f} %")
        picture.text(x.at(place) + 6, y.at(right) - 5, name, kind="small")
    return picture.render()


def pareto(points: list[tuple[float, float, float, str]]) -> list[tuple[float, float, float, str]]:
    """Those that no other beats with fewer bytes and more right, by bytes."""
    front: list[tuple[float, float, float, str]] = []
    for point in sorted(points, key=lambda p: (p[0], -p[1])):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front


def _points(rows: dict[str, Any], measure: str) -> list[tuple[int, float]]:
    return sorted((int(layer), row[measure]) for layer, row in rows.items())


def _by_layer(title: str, series: dict[str, list[tuple[int, float]]], name: str, unit: float) -> str:
    layers = [layer for points in series.values() for layer, _ in points]
    lowest = min(unit * value for points in series.values() for _, value in points)
    x = Axis(min(layers) - 0.5, max(layers) + 0.5, LEFT, WIDTH - RIGHT)
    y = Axis(max(0.0, lowest - 0.05 * unit), unit, HEIGHT - BOTTOM, TOP)
    picture = Svg(WIDTH, HEIGHT, title)
    picture.text(LEFT, 22, title, kind="title")
    picture.axes(x, y, "layer that is foretold", name)
    left = float(LEFT)
    for label, points in series.items():
        look = LOOKS[label]
        curve = look if look == "resident" else f"{look} curve"
        picture.line([(x.at(layer), y.at(unit * value)) for layer, value in points], curve)
        for layer, value in points:
            if look != "resident":
                picture.circle(x.at(layer), y.at(unit * value), 2.5, look, f"{label}, {layer}: {unit * value:.3g}")
        picture.line([(left, 42), (left + 24, 42)], curve)
        picture.text(left + 30, 46, label)
        left += 52 + 6.6 * len(label)
    return picture.render()
