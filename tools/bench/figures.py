"""The pictures of the documents, each from the JSON of a measurement."""

from __future__ import annotations

from typing import Any

from bench.svg import Axis, Svg

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 84, 52
LOOKS = {"on-demand": "a", "exact": "b", "router-pf": "c"}
LANES = {"compute": "compute", "plan": "plan, speculate", "fetch": "fetch"}
LANE_HEIGHT, LANE_PITCH = 44, 72
OUTCOMES = {  # of fetched records
    "demand": "on demand",
    "used": "foretold, in time",
    "late": "foretold, late",
    "wasted": "wasted",
    "cancelled": "cancelled",
    "empty": "nothing to fetch",
}
SHOWN_FROM = 0.4  # of the hit rates: below, nobody would run a cache


def tpot_by_hit_rate(result: dict[str, Any]) -> str:
    """Milliseconds per token over the hit rate of a cache without prediction, by policy, and their floor."""
    rows = [r for r in result["rows"] if not r["is_timing_only"] and r["hit_rate_without_prediction"] >= SHOWN_FROM]
    if not rows:
        raise ValueError("no row with a hit rate to draw")
    resident_ms = result["resident_ms"]["median"]
    times = [t for row in rows for t in (row["tpot_ms"]["p10"], row["tpot_ms"]["p90"], row["floor_ms"]["median"])]
    low = min(row["hit_rate_without_prediction"] for row in rows)
    x = Axis(min(50.0, 100 * low - 2), 100, LEFT, WIDTH - RIGHT)
    y = Axis(0.85 * min(*times, resident_ms), 1.15 * max(times), HEIGHT - BOTTOM, TOP, is_log=True)
    picture = Svg(WIDTH, HEIGHT, f"Time per token by slot hit rate, {result['model']}")
    source = result["provenance"]
    where = source.get("gpu") or source["cpu"]
    picture.text(LEFT, 22, f"{result['model']} in {result['dtype']}, batch {result['batch']}, {where}", kind="title")
    picture.axes(x, y, "slot hit rate without prediction, %", "ms per token (bars: p10 to p90)")
    floors = {row["hit_rate_without_prediction"]: row["floor_ms"]["median"] for row in rows}
    picture.line([(x.at(100 * rate), y.at(floors[rate])) for rate in sorted(floors)], "floor")
    picture.line([(x.start, y.at(resident_ms)), (x.end, y.at(resident_ms))], "resident")
    shown = [name for name in LOOKS if any(_policy(row) == name for row in rows)]
    for name in shown:
        _curve(picture, x, y, sorted(_points(rows, name)), LOOKS[name])
    _legend(picture, [*((name, f"{LOOKS[name]} curve") for name in shown), ("schedule floor", "floor"),
                      ("all experts resident", "resident")])  # fmt: skip
    return picture.render()


def _policy(row: dict[str, Any]) -> str:
    return row["case"].partition(":")[0]


def _points(rows: list[dict[str, Any]], policy: str) -> list[tuple[float, float, float, float]]:
    """(hit rate, median, p10, p90) of a policy's rows."""
    found = []
    for row in rows:
        if _policy(row) == policy:
            tpot = row["tpot_ms"]
            found.append((row["hit_rate_without_prediction"], tpot["median"], tpot["p10"], tpot["p90"]))
    return found


def _curve(picture: Svg, x: Axis, y: Axis, points: list[tuple[float, float, float, float]], look: str) -> None:
    """Medians, joined, with a bar from p10 to p90 at each."""
    picture.line([(x.at(100 * rate), y.at(median)) for rate, median, _, _ in points], f"{look} curve")
    for rate, median, p10, p90 in points:
        place = x.at(100 * rate)
        picture.line([(place, y.at(p10)), (place, y.at(p90))], f"{look} curve")
        note = f"{100 * rate:.1f} %: {median:.2f} ms ({p10:.2f} to {p90:.2f})"
        picture.circle(place, y.at(median), 3.5, look, note)


def _legend(picture: Svg, entries: list[tuple[str, str]]) -> None:
    """In one line below the title."""
    place = float(LEFT)
    for name, kind in entries:
        picture.line([(place, 42), (place + 24, 42)], kind)
        picture.text(place + 30, 46, name)
        place += 52 + 6.6 * len(name)


def timeline(result: dict[str, Any]) -> str:
    """Launches of three layers in lanes; the records of a fetch side by side, each with what became of it."""
    begins, source = result["begins_us"], result["provenance"]
    x = Axis(0.0, begins[-1], 120, WIDTH - RIGHT)
    bottom = 78 + LANE_PITCH * len(LANES)
    picture = Svg(WIDTH, bottom + 50, f"Timeline of a decode step, {result['model']}")
    title = f"{result['model']} in {result['dtype']}, {result['policy'].split(':')[0]}, slot hit rate "
    title += f"{100 * result['hit_rate_without_prediction']:.0f} % without prediction, {source.get('gpu')}"
    picture.text(16, 22, title, kind="title")
    for begin, end, layer in zip(begins[:-1], begins[1:], result["layers"], strict=True):
        picture.line([(x.at(begin), 70), (x.at(begin), bottom)], "grid")
        picture.text(x.at((begin + end) / 2), 82, f"layer {layer}", anchor="middle", kind="small")
    shown: set[str] = set()
    for place, (lane, name) in enumerate(LANES.items()):
        top = 92 + LANE_PITCH * place
        picture.text(16, top + LANE_HEIGHT / 2 + 4, name)
        for event in result["events"]:
            if event["lane"] == lane:
                shown |= _launch(picture, x, top, event)
    for tick in x.ticks():
        picture.line([(x.at(tick), bottom), (x.at(tick), bottom + 5)], "axis")
        picture.text(x.at(tick), bottom + 19, f"{tick:g}", anchor="middle")
    picture.line([(x.start, bottom), (x.end, bottom)], "axis")
    picture.text((x.start + x.end) / 2, bottom + 40, "us from the routing of the first layer", anchor="middle")
    left = 16.0
    for outcome, label in OUTCOMES.items():
        if outcome in shown:
            picture.rectangle(left, 38, 14, 12, f"{outcome} block")
            picture.text(left + 19, 48, label)
            left += 36 + 6.4 * len(label)
    return picture.render()


def _launch(picture: Svg, x: Axis, top: float, event: dict[str, Any]) -> set[str]:
    """Draw a launch; of a fetch, the records share its time evenly. Returns the outcomes that were drawn."""
    start, duration, records = event["start_us"], event["duration_us"], event["records"]
    parts = [(f"{record['outcome']}: expert {record['expert']}", record["outcome"]) for record in records]
    if not parts:
        parts = [(event["kernel"], "empty" if event["lane"] == "fetch" else event["lane"])]
    share, shown = duration / len(parts), set()
    for i, (note, look) in enumerate(parts):
        begin, end = max(x.low, start + i * share), min(x.high, start + (i + 1) * share)
        if end <= begin:
            continue
        width = max(0.6, x.at(end) - x.at(begin) - (0.6 if records else 0.0))
        where = f"layer {event['layer']}, {note}, {share:.1f} us"
        picture.rectangle(x.at(begin), top, min(width, x.end - x.at(begin)), LANE_HEIGHT, f"{look} block", where)
        shown.add(look)
    return shown
