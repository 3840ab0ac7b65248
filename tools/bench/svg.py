"""Vector pictures as text: shapes whose looks are in one style sheet, for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

# Series are of middle lightness, to be told apart on white and on black; the rest follows the page.
STYLE = """
text { font: 12px sans-serif; fill: #333 }
.small { font-size: 11px }
.title { font-size: 14px }
.axis { stroke: #666; stroke-width: 1; fill: none }
.grid { stroke: #999; stroke-opacity: 0.3; stroke-width: 1; fill: none }
.floor { stroke: #777; stroke-width: 1.5; stroke-dasharray: 6 4; fill: none }
.resident { stroke: #777; stroke-width: 1.5; stroke-dasharray: 1 4; fill: none }
.a { stroke: #d1672a; fill: #d1672a } .b { stroke: #3178c6; fill: #3178c6 } .c { stroke: #2f9461; fill: #2f9461 }
.curve { stroke-width: 2; fill: none }
.late { stroke: #d1672a; fill: #d1672a } .wasted { stroke: #c23b4b; fill: #c23b4b; fill-opacity: 0.75 }
.cancelled { stroke: #c23b4b; fill: #c23b4b; fill-opacity: 0.35 } .empty { stroke: #888; fill: #888 }
.used { stroke: #3178c6; fill: #3178c6 } .demand { stroke: #7a5bb5; fill: #7a5bb5 }
.compute { stroke: #2f9461; fill: #2f9461 } .plan { stroke: #a88a1c; fill: #a88a1c }
.block { stroke-width: 0 }
@media (prefers-color-scheme: dark) { text { fill: #ccc } .axis { stroke: #999 } }
"""


class Svg:
    """Shapes in the order of their drawing; `kind` names classes of the style sheet. Coordinates are pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height = width, height
        self._parts = [f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>"]

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        places = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._parts.append(f'<polyline class="{kind}" points="{places}"/>')

    def circle(self, x: float, y: float, radius: float, kind: str, note: str = "") -> None:
        shape = f'<circle class="{kind}" cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}"'
        self._parts.append(_noted(shape, "circle", note))

    def rectangle(self, x: float, y: float, width: float, height: float, kind: str, note: str = "") -> None:
        sizes = zip(("x", "y", "width", "height"), (x, y, width, height), strict=True)
        shape = f'<rect class="{kind}" ' + " ".join(f'{name}="{_number(value)}"' for name, value in sizes)
        self._parts.append(_noted(shape, "rect", note))

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> None:
        """`anchor`: start, middle or end of the text is at x; its base line is at y."""
        looks = f' class="{kind}"' if kind else ""
        place = f'x="{_number(x)}" y="{_number(y)}" text-anchor="{anchor}"'
        self._parts.append(f"<text{looks} {place}>{escape(text)}</text>")

    def axes(self, x: Axis, y: Axis, across: str, up: str) -> None:
        """Both with their ticks, a grid behind the picture, and what they show."""
        for tick in y.ticks():
            self.line([(x.start, y.at(tick)), (x.end, y.at(tick))], "grid")
            self.text(x.start - 8, y.at(tick) + 4, f"{tick:g}", anchor="end")
        for tick in x.ticks():
            self.line([(x.at(tick), y.start), (x.at(tick), y.start + 5)], "axis")
            self.text(x.at(tick), y.start + 19, f"{tick:g}", anchor="middle")
        self.line([(x.start, y.end), (x.start, y.start), (x.end, y.start)], "axis")
        self.text((x.start + x.end) / 2, self.height - 10, across, anchor="middle")
        self.text(x.start, y.end - 10, up)

    def render(self) -> str:
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        body = "\n".join(self._parts)
        return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>\n{body}\n</svg>\n'


class Axis(NamedTuple):
    """Values from `low` to `high` at pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values within the axis: 1, 2 and 5 times powers of ten, where it is linear about eight of one step."""
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            return [t for p in powers for t in (10.0**p, 2 * 10.0**p, 5 * 10.0**p) if self.low <= t <= self.high]
        rough = (self.high - self.low) / 8
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _noted(shape: str, tag: str, note: str) -> str:
    """Closed, with a text that shows when one points at it."""
    return f"{shape}><title>{escape(note)}</title></{tag}>" if note else f"{shape}/>"


def _number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
