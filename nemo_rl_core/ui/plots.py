"""Small drawings of runs against each other: sparklines, scatter, parallel coordinates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from nemo_rl_core.telemetry.curves import fraction
from nemo_rl_core.ui.text import NONE

SPARK_WIDTH, SPARK_HEIGHT = 84, 22


def sparkline_points(values: Sequence[float]) -> str:
    """Returns the points of an SVG polyline; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    step = (SPARK_WIDTH - 4) / (len(values) - 1)
    bottom, height = SPARK_HEIGHT - 3, SPARK_HEIGHT - 6
    places = [
        (2 + n * step, bottom - height * fraction(v, low, high)) for n, v in enumerate(values)
    ]
    bottom, height = SPARK_HEIGHT - 3, SPARK_HEIGHT - 6
    places = [
        (2 + n * step, bottom - height * fraction(v, low, high)) for n, v in enumerate(values)
    ]
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


WIDTH, HEIGHT = 420, 196
LEFT, RIGHT, TOP, BOTTOM = 60, 410, 14, 172
_MAX_POINTS = 360
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class PlotLine:
    """A line of a plot: a run, or the mean of runs with the band from lowest to highest."""

    label: str
    color: int
    points: str
    band: str
    last: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A tick of an axis: its place and its text."""

    place: float
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """Curves of several runs over each other."""

    title: str
    lines: Sequence[PlotLine]
    x: Sequence[Tick]
    y: Sequence[Tick]

    @property
    def description(self) -> str:
        """A description for screen readers."""
        lines = "; ".join(f"{line.label} last {line.last}" for line in self.lines)
        steps = " to ".join(tick.text for tick in (*self.x[:1], *self.x[-1:]))
        return f"{self.title} over steps {steps}: {lines}" if steps else f"{self.title}: no values"


def overlay(title: str, curves: Sequence[tuple[str, int, Sequence[Points]]]) -> Plot:
    """Draws a line per entry: label, color, and the curves of its runs, with a band for several."""
    means = [(label, color, _banded(members)) for label, color, members in curves]
    everything = [point for _, _, points in means for point in points]
    if not everything:
        return Plot(
            title, [PlotLine(label, color, "", "", NONE) for label, color, _ in means], (), ()
        )
    left, right = min(p[0] for p in everything), max(p[0] for p in everything)
    low, high = min(p[2] for p in everything), max(p[3] for p in everything)

    def position(x: float, y: float) -> str:
        across = LEFT + (RIGHT - LEFT) * fraction(x, left, right)
        return f"{across:.1f},{BOTTOM - (BOTTOM - TOP) * fraction(y, low, high):.1f}"

    lines = []
    for label, color, points in means:
        kept = points[:: max(1, math.ceil(len(points) / _MAX_POINTS))]
        kept += points[-1:] if points and kept[-1] != points[-1] else []
        is_band = any(p[2] < p[3] for p in kept)
        border = [position(p[0], p[3]) for p in kept] + [
            position(p[0], p[2]) for p in reversed(kept)
        ]
        line = [position(p[0], p[1]) for p in kept]
        lines.append(
            PlotLine(
                label,
                color,
                " ".join(line if len(line) > 1 else line * 2),
                " ".join(border) if is_band else "",
                f"{points[-1][1]:.4g}" if points else NONE,
            )
        )
    across = LEFT, RIGHT
    x = [Tick(at, f"{v:g}") for at, v in zip(across, dict.fromkeys((left, right)), strict=False)]
    y = [Tick(at, f"{v:.3g}") for at, v in zip((TOP, BOTTOM), (high, low), strict=True)]
    return Plot(title, lines, x, y if high > low else y[1:])


def _banded(curves: Sequence[Points]) -> list[tuple[float, float, float, float]]:
    """Returns step, mean, lowest and highest, in the range of steps that all curves have.

    Long curves are thinned, each at other steps, so values between two steps are interpolated.
    """
    finite = [
        sorted({x: y for x, y in curve if math.isfinite(y)}.items()) for curve in curves if curve
    ]
    filled = [curve for curve in finite if curve]
    if not filled:
        return []
    left, right = max(curve[0][0] for curve in filled), min(curve[-1][0] for curve in filled)
    steps = sorted({x for curve in filled for x, _ in curve if left <= x <= right})
    values = [
        np.interp(steps, [x for x, _ in curve], [y for _, y in curve]).tolist() for curve in filled
    ]
    return [(x, fmean(ys), min(ys), max(ys)) for x, *ys in zip(steps, *values, strict=True)]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of parallel coordinates: its name, its place and its ticks."""

    name: str
    place: float
    ticks: Sequence[Tick]


@dataclass(frozen=True, slots=True)
class Dot:
    """A run in a scatter plot, or its line over parallel axes."""

    label: str
    color: int
    x: float
    y: float
    line: str = ""


@dataclass(frozen=True, slots=True)
class Scatter:
    """Runs as dots or lines, with axes."""

    title: str
    axes: Sequence[Axis]
    dots: Sequence[Dot]
    x: Sequence[Tick] = ()
    y: Sequence[Tick] = ()


def _scale(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Returns places from 0 to 1, and ticks; numbers of a wide range are on a log scale."""
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) == len(values) and len(set(numbers)) > 1:
        is_log = min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_RANGE
        scaled = [math.log(v) for v in numbers] if is_log else [float(v) for v in numbers]
        low, high = min(scaled), max(scaled)
        ends = [(0.0, f"{min(numbers):.4g}"), (1.0, f"{max(numbers):.4g}")]
        return [fraction(v, low, high) for v in scaled], ends
    names = list(dict.fromkeys(str(v) for v in values))
    step = 1 / max(1, len(names) - 1)
    where = {name: n * step if len(names) > 1 else 0.5 for n, name in enumerate(names)}
    return [where[str(v)] for v in values], [(where[name], name[:14]) for name in names]


_LOG_RANGE = 20


def scatter(title: str, labels: Sequence[str], xs: Sequence[Any], ys: Sequence[float]) -> Scatter:
    """Draws runs as dots: a setting across, a result up."""
    across, x_ticks = _scale(xs)
    up, y_ticks = _scale(ys)
    dots = [
        Dot(label, n, LEFT + 10 + (RIGHT - LEFT - 20) * x, BOTTOM - (BOTTOM - TOP) * y)
        for n, (label, x, y) in enumerate(zip(labels, across, up, strict=True))
    ]
    return Scatter(
        title,
        (),
        dots,
        [Tick(LEFT + 10 + (RIGHT - LEFT - 20) * at, text) for at, text in x_ticks],
        [Tick(BOTTOM - (BOTTOM - TOP) * at, text) for at, text in y_ticks],
    )


PARALLEL_WIDTH = 1000


def parallel(labels: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> Scatter:
    """Draws a line per run over an axis per column."""
    step = (PARALLEL_WIDTH - 160) / max(1, len(columns) - 1)
    axes, lines = [], [list[str]() for _ in labels]
    for n, (name, values) in enumerate(columns.items()):
        places, ticks = _scale(values)
        across = 80 + n * step
        heights = [BOTTOM - (BOTTOM - TOP - 20) * place for place in places]
        for line, height in zip(lines, heights, strict=True):
            line.append(f"{across:.1f},{height:.1f}")
        marks = [Tick(BOTTOM - (BOTTOM - TOP - 20) * at, text) for at, text in ticks]
        axes.append(Axis(name, across, marks))
    dots = [
        Dot(label, n, 0, 0, " ".join(line))
        for n, (label, line) in enumerate(zip(labels, lines, strict=True))
    ]
    return Scatter("Settings and results of each run", axes, dots)
