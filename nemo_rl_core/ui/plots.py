"""Small drawings of runs against each other: sparklines, scatter, parallel coordinates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from nemo_rl_core.telemetry.curves import fraction
from nemo_rl_core.ui.charts import BOTTOM, LEFT, RIGHT, TOP, Chart, Point, Series, chart

SPARK_WIDTH, SPARK_HEIGHT = 84, 22


def sparkline_points(values: Sequence[float]) -> str:
    """Returns the points of an SVG polyline; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    step = (SPARK_WIDTH - 4) / (len(values) - 1)
    bottom, height = SPARK_HEIGHT - 3, SPARK_HEIGHT - 6
    positions = [
        (2 + n * step, bottom - height * fraction(v, low, high)) for n, v in enumerate(values)
    ]
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)


Points = Sequence[Point]


@dataclass(frozen=True, slots=True)
class Tick:
    """A tick of an axis: its position and its text."""

    position: float
    text: str


def overlay(title: str, curves: Sequence[tuple[str, int, Sequence[Points]]]) -> Chart:
    """Draws a line per entry: label, color, and the curves of its runs.

    The line of several seeds is their mean, with a band from lowest to highest.
    """
    return chart(
        title,
        [
            _banded(label, color, members)
            if len(members) > 1
            else Series(label, members[0] if members else (), color)
            for label, color, members in curves
        ],
    )


def _banded(label: str, color: int, curves: Sequence[Points]) -> Series:
    """Returns the mean of curves, at each step of those that have begun and not yet ended.

    Long curves are thinned, each at other steps, so values between two steps are interpolated.
    """
    finite = [{x: y for x, y in curve if math.isfinite(y)} for curve in curves]
    filled = [sorted(each.items()) for each in finite if each]
    steps = sorted({x for curve in filled for x, _ in curve})
    values = [
        np.interp(steps, [x for x, _ in c], [y for _, y in c], left=math.nan, right=math.nan)
        for c in filled
    ]
    present = [[y for y in ys if math.isfinite(y)] for ys in zip(*values, strict=True)]
    label = f"{label}, {len(curves)} seeds"
    if present and len(present[-1]) < len(curves):
        label += f", {len(present[-1])} at the last step"
    means = [(x, fmean(ys)) for x, ys in zip(steps, present, strict=True)]
    lows = [(x, min(ys)) for x, ys in zip(steps, present, strict=True)]
    highs = [(x, max(ys)) for x, ys in zip(steps, present, strict=True)]
    return Series(label, means, color, lows, highs)


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of parallel coordinates: its name, its position and its ticks."""

    name: str
    position: float
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
    """Returns positions from 0 to 1, and ticks; numbers of a wide range are on a log scale."""
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
        positions, ticks = _scale(values)
        across = 80 + n * step
        heights = [BOTTOM - (BOTTOM - TOP - 20) * position for position in positions]
        for line, height in zip(lines, heights, strict=True):
            line.append(f"{across:.1f},{height:.1f}")
        marks = [Tick(BOTTOM - (BOTTOM - TOP - 20) * at, text) for at, text in ticks]
        axes.append(Axis(name, across, marks))
    dots = [
        Dot(label, n, 0, 0, " ".join(line))
        for n, (label, line) in enumerate(zip(labels, lines, strict=True))
    ]
    return Scatter("Settings and results of each run", axes, dots)
