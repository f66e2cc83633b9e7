"""Curves for the templates: several series in one chart, thinned to its width in pixels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_core.telemetry.curves import fraction
from nemo_rl_core.ui.text import NONE

LEFT, RIGHT, TOP, BOTTOM = 60, 410, 14, 172
_TICK_LENGTH = 7
_MAX_POINTS = 360
"""A bucket of steps is about one pixel wide; its lowest and highest value are both kept."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart; lines that belong together have the same color index.

    Attributes:
        lows: Lower border of a band around the line, `highs` the upper one; empty without a band.
    """

    label: str
    points: Sequence[Point]
    color: int = 0
    lows: Sequence[Point] = ()
    highs: Sequence[Point] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """A series as SVG polylines, several where values are missing, and its band as a polygon."""

    label: str
    strokes: list[str]
    last: str
    count: int
    color: int = 0
    band: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of one metric, with the position and text of each tick.

    Attributes:
        span: First and last position on the horizontal axis, as text; empty without values.
        borders: Positions at which iterations begin.
    """

    title: str
    lines: list[Line]
    ticks_x: list[tuple[float, str]]
    ticks_y: list[tuple[float, str]]
    axis: str = "steps"
    span: str = ""
    borders: tuple[float, ...] = ()

    @property
    def num_lines(self) -> int:
        """Number of lines."""
        return len(self.lines)

    @property
    def description(self) -> str:
        """A description of the chart for screen readers."""
        last_values = "; ".join(f"{line.label or 'last value'} {line.last}" for line in self.lines)
        return (
            f"{self.title} over {self.axis} {self.span}: {last_values}"
            if self.span
            else f"{self.title}: no values"
        )


def chart(
    title: str, series: Sequence[Series], *, axis: str = "steps", borders: Sequence[float] = ()
) -> Chart:
    """Returns the series on shared axes; values that are not finite leave a gap.

    Args:
        borders: Positions on the horizontal axis for thin vertical lines.
    """
    every = [p for one in series for each in (one.points, one.lows, one.highs) for p in each]
    finite = [p for p in every if math.isfinite(p[1])]
    if not finite:
        empty = [Line(one.label, [], NONE, len(one.points), one.color) for one in series]
        return Chart(title, empty, [], [])
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    box = (min(xs), max(xs), min(ys), max(ys))
    return Chart(
        title,
        [_line(one, box) for one in series],
        [
            (_across(x, box), text)
            for x, text in ticks(box[0], box[1], 6)
            if axis != "steps" or float(x).is_integer()
        ],
        [(_down(y, box), text) for y, text in ticks(box[2], box[3], 4)],
        axis,
        " to ".join(f"{x:g}" for x in dict.fromkeys(box[:2])),
        tuple(_across(x, box) for x in borders if box[0] < x < box[1]),
    )


def ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """Returns round numbers between two bounds with their text; the bounds if none is.

    Example:
        >>> [text for _, text in ticks(0.13, 0.92, 5)]
        ['0.2', '0.4', '0.6', '0.8']
    """
    span = high / 2 - low / 2  # halves: the difference of two huge values would overflow
    if not span or abs(high) > 1e300 or abs(low) > 1e300:
        return [(value, _tick(value)) for value in dict.fromkeys((low, high))]
    rough = 2 * span / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * f for f in (1, 2, 5, 10) if power * f >= rough * (1 - 1e-9))
    if step == 0 or abs(low) / step > 1e12:  # denormal, or closer than floats can divide
        return [(value, _tick(value)) for value in (low, high)]
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [
        (n * step, _tick(round(n * step, 12 - math.floor(math.log10(step)))))
        for n in range(first, last + 1)
    ]


def _tick(value: float) -> str:
    """Formats with four significant digits if they fit into the margin, else two."""
    text = f"{value:.4g}"
    return text if len(text) <= _TICK_LENGTH else f"{value:.2g}"


def _across(x: float, box: tuple[float, float, float, float]) -> float:
    return round(LEFT + (RIGHT - LEFT) * fraction(x, box[0], box[1]), 1)


def _line(series: Series, box: tuple[float, float, float, float]) -> Line:
    strokes: list[list[str]] = [[]]
    last = NONE
    for x, y in thinned(series.points):
        if not math.isfinite(y):
            strokes.append([])
            continue
        last = f"{y:.4g}"
        strokes[-1].append(_position(x, y, box))
    # A stroke of one point has no length: doubled, its round cap shows it.
    polylines = [" ".join(s if len(s) > 1 else s * 2) for s in strokes if s]
    border = [*thinned(series.highs), *reversed(thinned(series.lows))]
    band = " ".join(_position(x, y, box) for x, y in border)
    return Line(series.label, polylines, last, len(series.points), series.color, band)


def thinned(points: Sequence[Point]) -> list[Point]:
    """Returns the lowest and the highest value of each bucket of steps."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    width = math.ceil(2 * len(points) / _MAX_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), width):
        chunk = points[start : start + width]
        # NaN is neither lowest nor highest; a bucket of only NaN remains a gap.
        bucket = [p for p in chunk if math.isfinite(p[1])] or chunk[:1]
        ends = {min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])}
        kept += sorted(ends)
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def _position(x: float, y: float, box: tuple[float, float, float, float]) -> str:
    return f"{_across(x, box):.1f},{_down(y, box):.1f}"


def _down(y: float, box: tuple[float, float, float, float]) -> float:
    return BOTTOM - (BOTTOM - TOP) * fraction(y, box[2], box[3])
