"""Charts as SVG: a few plain forms, coloured by the page's style sheet so that they follow its light and dark themes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

CHART_WIDTH, CHART_HEIGHT = 420, 250  # pixels: two charts side by side on a laptop, one on a phone
PLOT_LEFT, PLOT_RIGHT = 58, CHART_WIDTH - 16  # room for tick labels and the name of the axis
PLOT_TOP, PLOT_BOTTOM = 14, CHART_HEIGHT - 46


class Axis(NamedTuple):
    """A range of values and the places of its tick marks."""

    low: float
    high: float
    ticks: list[float]
    log: bool = False

    def place(self, value: float) -> float:
        """Map a value to its place: 0 at the low end, 1 at the high one."""
        a, b, v = (math.log10(t) for t in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return (v - a) / (b - a) if b > a else 0.5


def linear(values: Sequence[float], zero: bool = False) -> Axis:
    """Make an axis around values, with about five round marks."""
    finite = [v for v in values if math.isfinite(v)] or [0.0]
    low, high = min(finite), max(finite)
    low = min(low, 0.0) if zero else low
    if high <= low:
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    raw = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = [i * step for i in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], ticks)


def decades(values: Sequence[float]) -> Axis:
    """Make a logarithmic axis around values > 0, marked at powers of ten."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    every = max(1, math.ceil((high - low) / 6))
    return Axis(10.0**low, 10.0**high, [10.0**e for e in range(low, high + 1, every)], True)


def number(value: float) -> str:
    """Format a number in its shortest form."""
    if value == 0:
        return "0"
    if abs(value) >= 1e4 or abs(value) < 1e-3:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return f"{value:.4g}"


class Chart:
    """A frame with two axes to draw into."""

    def __init__(self, x: Axis, y: Axis, x_name: str, y_name: str, label: str):
        self.x, self.y, self.label = x, y, label
        self.parts: list[str] = []
        self.marks = 0
        for tick in y.ticks:
            at = self.up(tick)
            self.parts.append(f'<line class="grid" x1="{PLOT_LEFT}" x2="{PLOT_RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            self.text(PLOT_LEFT - 6, at + 4, number(tick), "end")
        for tick in x.ticks:
            self.text(self.across(tick), PLOT_BOTTOM + 20, number(tick), "middle")
        self.parts.append(
            f'<line class="axis" x1="{PLOT_LEFT}" x2="{PLOT_RIGHT}" y1="{PLOT_BOTTOM}" y2="{PLOT_BOTTOM}"/>'
        )
        self.text((PLOT_LEFT + PLOT_RIGHT) / 2, CHART_HEIGHT - 6, x_name, "middle")
        self.parts.append(
            f'<text class="name" transform="translate(11 {(PLOT_TOP + PLOT_BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">'
            f"{escape(y_name)}</text>"
        )

    def across(self, value: float) -> float:
        """From a value to a place."""
        return PLOT_LEFT + self.x.place(value) * (PLOT_RIGHT - PLOT_LEFT)

    def up(self, value: float) -> float:
        """From a value to a place."""
        return PLOT_BOTTOM - self.y.place(value) * (PLOT_BOTTOM - PLOT_TOP)

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> None:
        """Draw a text at a place of the frame."""
        self.parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')

    def line(self, xs: Sequence[float], ys: Sequence[float], kind: str = "first") -> None:
        """Draw a line through points; those that are not finite are left out."""
        points = [
            (self.across(a), self.up(b)) for a, b in zip(xs, ys, strict=True) if math.isfinite(a) and math.isfinite(b)
        ]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        self.parts.append(f'<polyline class="line {kind}" points="{path}"/>')

    def dots(
        self, xs: Sequence[float], ys: Sequence[float], kind: str = "first", sizes: Sequence[float] | None = None
    ) -> None:
        """Draw a dot at each point."""
        for i, (a, b) in enumerate(zip(xs, ys, strict=True)):
            if math.isfinite(a) and math.isfinite(b):
                r = 3.5 if sizes is None else sizes[i]
                self.parts.append(
                    f'<circle class="dot {kind}" cx="{self.across(a):.1f}" cy="{self.up(b):.1f}" r="{r:.1f}"/>'
                )

    def mark(self, x: float, text: str, kind: str = "second") -> None:
        """Draw a vertical line with a word at its top."""
        at = self.across(x)
        self.parts.append(f'<line class="mark {kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{PLOT_TOP}" y2="{PLOT_BOTTOM}"/>')
        right = at > CHART_WIDTH * 0.6
        self.text(at - 5 if right else at + 5, PLOT_TOP + 9 + 15 * self.marks, text, "end" if right else "start", kind)
        self.marks += 1

    def bars(self, edges: Sequence[float], heights: Sequence[float]) -> None:
        """Draw bars of these heights between edges."""
        base = self.up(max(0.0, self.y.low))
        for a, b, h in zip(edges[:-1], edges[1:], heights, strict=True):
            left, top = self.across(a), self.up(h)
            size = f'width="{max(0.5, self.across(b) - left - 1):.1f}" height="{max(0.0, base - top):.1f}"'
            self.parts.append(f'<rect class="bar first" x="{left:.1f}" y="{top:.1f}" {size}/>')

    def svg(self) -> str:
        """Return the chart as an SVG element."""
        return (
            f'<svg viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" role="img" aria-label="{escape(self.label, quote=True)}">'
            f"{''.join(self.parts)}</svg>"
        )
