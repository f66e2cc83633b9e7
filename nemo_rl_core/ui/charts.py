"""Curves for the templates: several series in one chart, thinned to its width in pixels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_core.telemetry.curves import fraction
from nemo_rl_core.ui.text import NONE

WIDTH, HEIGHT = 420, 200
LEFT, RIGHT, TOP, BOTTOM = 60, 410, 14, 172
_TICK_LENGTH = 7
_MAX_POINTS = 360
"""A bucket of steps is about one pixel wide; its lowest and highest value are both kept."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart; lines that belong together have the same color index."""

    label: str
    points: Sequence[Point]
    color: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """A series as SVG polylines, several where values are missing."""

    label: str
    strokes: list[str]
    last: str
    count: int
    color: int = 0


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of one metric, with the position and text of each tick."""

    title: str
    lines: list[Line]
    ticks_x: list[tuple[float, str]]
    ticks_y: list[tuple[float, str]]
    axis: str = "steps"

    @property
    def num_lines(self) -> int:
        """Number of lines."""
        return len(self.lines)

    @property
    def description(self) -> str:
        """A description of the chart for screen readers."""
        last_values = "; ".join(f"{line.label or 'last value'} {line.last}" for line in self.lines)
        steps = " to ".join(text for _, text in self.ticks_x)
        return (
            f"{self.title} over {self.axis} {steps}: {last_values}"
            if steps
            else f"{self.title}: no values"
        )


def chart(title: str, series: Sequence[Series], *, axis: str = "steps") -> Chart:
    """Returns the series on shared axes; values that are not finite leave a gap."""
    finite = [p for one in series for p in one.points if math.isfinite(p[1])]
    if not finite:
        empty = [Line(one.label, [], NONE, len(one.points), one.color) for one in series]
        return Chart(title, empty, [], [])
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    box = (min(xs), max(xs), min(ys), max(ys))
    lines = [_line(one, box) for one in series]
    ticks_x: list[tuple[float, str]] = [(LEFT, f"{box[0]:g}")]
    if box[1] > box[0]:
        ticks_x.append((RIGHT, f"{box[1]:g}"))
    ticks_y = [(_down(box[3], box), _tick(box[3]))]
    if box[3] > box[2]:
        ticks_y.append((_down(box[2], box), _tick(box[2])))
    return Chart(title, lines, ticks_x, ticks_y, axis)


def _tick(value: float) -> str:
    """Formats with four significant digits if they fit into the margin, else two."""
    text = f"{value:.4g}"
    return text if len(text) <= _TICK_LENGTH else f"{value:.2g}"


def _line(series: Series, box: tuple[float, float, float, float]) -> Line:
    strokes: list[list[str]] = [[]]
    last = NONE
    for x, y in thinned(series.points):
        if not math.isfinite(y):
            strokes.append([])
            continue
        last = f"{y:.4g}"
        across = LEFT + (RIGHT - LEFT) * fraction(x, box[0], box[1])
        strokes[-1].append(f"{across:.1f},{_down(y, box):.1f}")
    # A stroke of one point has no length: doubled, its round cap shows it.
    polylines = [" ".join(s if len(s) > 1 else s * 2) for s in strokes if s]
    return Line(series.label, polylines, last, len(series.points), series.color)


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


def _down(y: float, box: tuple[float, float, float, float]) -> float:
    return BOTTOM - (BOTTOM - TOP) * fraction(y, box[2], box[3])
