"""Small drawings as SVG elements whose colours follow the page, light or dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

WIDTH = 900
_BAR_WIDTH = 620
_LEFT = 64


class Drawing:
    """Elements of an SVG; all text is escaped.

    Args:
        height: In pixels.
        title: What it shows, in a sentence, for those who do not see it.
        width: In pixels.
    """

    def __init__(self, height: float, title: str, width: int = WIDTH) -> None:
        self._height = height
        self._width = width
        self._parts = [Markup("<title>{}</title>").format(title)]
        self._title = title

    def path(self, data: str, name: str) -> None:
        """A shape; `name` is its class."""
        if data:
            self._parts.append(Markup('<path class="{}" d="{}"/>').format(name, data))

    def boxes(self, boxes: Iterable[tuple[float, float, float, float]], name: str) -> None:
        """Rectangles (x, y, width, height) of one class, as one shape."""
        shapes = (f"M{x:.2f} {y:.1f}h{w:.2f}v{h:.1f}h-{w:.2f}z" for x, y, w, h in boxes)
        self.path("".join(shapes), name)

    def text(self, x: float, y: float, text: str, name: str = "", anchor: str = "start") -> None:
        """A word; `name` is its class."""
        self._parts.append(
            Markup('<text x="{}" y="{}" class="{}" text-anchor="{}">{}</text>').format(
                f"{x:.1f}", f"{y:.1f}", name, anchor, text
            )
        )

    def done(self) -> Markup:
        """The element."""
        name = "small" if self._width < WIDTH else ""
        head = Markup('<svg class="{}" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
            name, self._width, f"{self._height:.0f}", self._title
        )
        return head + Markup("").join(self._parts) + Markup("</svg>")


@dataclass(frozen=True)
class Bar:
    """A stacked bar."""

    label: str
    parts: Sequence[tuple[str, float, str]]
    """Class, length and name of every part."""


def stacked_bars(bars: Sequence[Bar], title: str) -> Markup:
    """Bars of equal length, each divided in proportion."""
    step, left = (26, 120) if len(bars) <= 32 else (14, 120)
    drawing = Drawing(step * len(bars) + 4, title, _BAR_WIDTH)
    for number, bar in enumerate(bars):
        y, x = number * step + 2, float(left)
        whole = sum(length for _, length, _ in bar.parts) or 1.0
        drawing.text(left - 8, y + step / 2 + 3, bar.label, anchor="end")
        for name, length, _ in bar.parts:
            width = (_BAR_WIDTH - left - 4) * length / whole
            drawing.boxes([(x, y, width, step - 6)], name)
            if width > 34:
                share = f"{100 * length / whole:.0f}%"
                ink = "light" if name.startswith("k-") else ""
                drawing.text(x + width / 2, y + step / 2 + 2, share, ink, "middle")
            x += width
    return drawing.done()


@dataclass(frozen=True)
class Curve:
    """A line of a chart."""

    name: str
    """Class: "a", "b" or "reference"."""
    xs: Sequence[float]
    ys: Sequence[float]
    marks: Sequence[float] = field(default_factory=tuple)
    """Where to draw vertical lines."""


def line_chart(
    curves: Sequence[Curve],
    title: str,
    x_label: str,
    y_label: str,
    *,
    height: float = 260,
    y_range: tuple[float, float] | None = None,
) -> Markup:
    """Lines over one horizontal axis; what is no number, or outside of `y_range`, leaves a gap."""
    drawing = Drawing(height, title)
    finite = [
        (x, y) for curve in curves for x, y in zip(curve.xs, curve.ys, strict=True) if _is_ok(x, y)
    ]
    if not finite:
        drawing.text(_LEFT, height / 2, "no points")
        return drawing.done()
    low_x, high_x = min(x for x, _ in finite), max(x for x, _ in finite)
    low_y, high_y = y_range or (min(y for _, y in finite), max(y for _, y in finite))
    margin = 0.05 * (high_y - low_y) or 0.05 * abs(high_y) or 1.0
    low_y, high_y = low_y - margin, high_y + margin
    span_x = (high_x - low_x) or 1.0
    right, bottom, top = WIDTH - 12, height - 40, 26

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (right - _LEFT) * (x - low_x) / span_x,
            bottom - (bottom - top) * (y - low_y) / (high_y - low_y),
        )

    for value in ticks(low_y, high_y, 5):
        _, y = place(low_x, value)
        drawing.path(f"M{_LEFT} {y:.1f}H{right}", "grid")
        drawing.text(_LEFT - 6, y + 4, f"{value:g}", "soft", "end")
    for value in ticks(low_x, low_x + span_x, 7):
        x, _ = place(value, low_y)
        drawing.path(f"M{x:.1f} {bottom}v4", "axis")
        drawing.text(x, bottom + 17, f"{value:g}", "soft", "middle")
    drawing.path(f"M{_LEFT} {bottom}H{right}", "axis")
    drawing.text((_LEFT + right) / 2, height - 6, x_label, "soft", "middle")
    drawing.text(_LEFT, 14, y_label, "soft")
    for curve in curves:
        data, pen = [], "M"
        for x, y in zip(curve.xs, curve.ys, strict=True):
            if not _is_ok(x, y) or not low_y <= y <= high_y:
                pen = "M"
                continue
            at_x, at_y = place(x, y)
            data.append(f"{pen}{at_x:.1f} {at_y:.1f}")
            pen = "L"
        drawing.path("".join(data), f"curve {curve.name}")
        for mark in curve.marks:
            x, _ = place(mark, low_y)
            drawing.path(f"M{x:.1f} {top}V{bottom}", "mark")
    return drawing.done()


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two, at most about `most`."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _is_ok(x: float, y: float) -> bool:
    return math.isfinite(x) and math.isfinite(y)
