"""Curves and tables as HTML strings for decks, without scripts or external resources."""

import html
import math
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import pairwise

_WIDTH, _HEIGHT = 420, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 408, 28, 176
_MAX_CHARACTERS = 400
_COLORS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#bf8700", "#0a7ea4", "#bf3989", "#57606a")

_Point = tuple[float, float]
_BARS, _NUM_BARS = "▁▂▃▄▅▆▇█", 24


def sparkline(values: Sequence[float], width: int = _NUM_BARS) -> str:
    """Draws values as bars from the lowest to the highest; more than `width` are averaged.

    Example:
        >>> sparkline([0.0, 1.0, 3.5, 7.0]), sparkline([2.0, 2.0, 4.0, 4.0], width=2)
        ('▁▂▅█', '▁█')
    """
    count = min(width, len(values))
    bounds = [len(values) * index // count for index in range(count + 1)] if count else []
    parts = [values[start:end] for start, end in pairwise(bounds)]
    means = [sum(part) / len(part) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BARS[round((mean - low) * scale)] if math.isfinite(mean) else " " for mean in means
    )


def curve_svg(title: str, xs: Sequence[float], ys: Sequence[float]) -> str:
    """Returns an inline SVG of one curve, with its ranges and last value; NaN leaves a gap."""
    runs = _finite_runs(xs, ys)
    points = [point for run in runs for point in run]
    parts = [_label(_LEFT, 16, title, size=13)]
    if points:
        parts += [_axes(points), *_lines(runs, points)]
    else:
        parts.append(_label(_WIDTH / 2, _HEIGHT / 2, "no values", anchor="middle"))
    return _svg(parts)


def curves_svg(title: str, lines: Mapping[str, Sequence[_Point]]) -> str:
    """Returns an inline SVG of named curves on the same axes, with a legend; NaN leaves a gap."""
    runs = {
        name: _finite_runs([x for x, _ in points], [y for _, y in points])
        for name, points in lines.items()
    }
    all_points = [point for each in runs.values() for run in each for point in run]
    parts = [_label(_LEFT, 16, title, size=13)]
    parts += [_axes(all_points, last=False)] if all_points else []
    for index, (name, each) in enumerate(runs.items()):
        color = _COLORS[index % len(_COLORS)]
        parts += _lines(each, all_points, color) if each else []
        y = _HEIGHT + 14 * (index + 1)
        parts.append(f'<path d="M{_LEFT},{y - 4} h16" stroke="{color}" stroke-width="3"/>')
        parts.append(_label(_LEFT + 22, y, name))
    return _svg(parts, height=_HEIGHT + 14 * len(lines) + 8)


def completions_html(rows: Sequence[Mapping[str, object]]) -> str:
    """Returns a table of completions, one row per mapping such as `{"prompt": …, "reward": …}`.

    Values are shown as text: markup and control characters are escaped, long values are cut.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return "<p>no completions</p>"
    cell = 'style="border:1px solid #ccc;padding:4px;text-align:left;white-space:pre-wrap"'
    lines = ["".join(f"<th {cell}>{_text(column)}</th>" for column in columns)]
    lines += [
        "".join(f"<td {cell}>{_text(row.get(column, ''))}</td>" for column in columns)
        for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table style="border-collapse:collapse;font-size:12px">{body}</table>'


def _svg(parts: Sequence[str], *, height: int = _HEIGHT) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        # A long name in a legend overflows the chart instead of being cut.
        f'viewBox="0 0 {_WIDTH} {height}" overflow="visible" role="img" font-family="sans-serif">'
        f"{''.join(parts)}</svg>"
    )


def _finite_runs(xs: Sequence[float], ys: Sequence[float]) -> list[list[_Point]]:
    runs: list[list[_Point]] = [[]]
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(x) and math.isfinite(y):
            runs[-1].append((float(x), float(y)))
        else:
            runs.append([])
    return [run for run in runs if run]


def _axes(points: list[_Point], *, last: bool = True) -> str:
    xs, ys = zip(*points, strict=True)
    labels = [
        _label(_LEFT - 6, _TOP + 4, f"{max(ys):.4g}", anchor="end"),
        _label(_LEFT - 6, _BOTTOM, "" if min(ys) == max(ys) else f"{min(ys):.4g}", anchor="end"),
        _label(_LEFT, _BOTTOM + 16, f"{min(xs):.6g}"),
        _label(_RIGHT, _BOTTOM + 16, f"{max(xs):.6g}", anchor="end"),
    ]
    if last:
        labels.append(_label(_RIGHT, 16, f"last {ys[-1]:.4g}", anchor="end"))
    frame = f'<path d="M{_LEFT},{_TOP} V{_BOTTOM} H{_RIGHT}" fill="none" stroke="#999"/>'
    return frame + "".join(labels)


def _lines(runs: list[list[_Point]], points: list[_Point], color: str = _COLORS[0]) -> list[str]:
    xs, ys = zip(*points, strict=True)

    def point(x: float, y: float) -> str:
        across = _LEFT + (_RIGHT - _LEFT) * fraction(x, min(xs), max(xs))
        down = _BOTTOM - (_BOTTOM - _TOP) * fraction(y, min(ys), max(ys))
        return f"{across:.1f},{down:.1f}"

    # A run of one point has no length: its round cap makes it visible.
    return [
        f'<polyline points="{" ".join(point(x, y) for x, y in [run[0], *run])}" fill="none" '
        f'stroke="{color}" stroke-width="2" stroke-linecap="round"/>'
        for run in runs
    ]


def fraction(value: float, low: float, high: float) -> float:
    """Returns the position of a value between two bounds, 0 to 1."""
    # Halves first: the difference of two huge values of opposite sign would overflow.
    span = high / 2 - low / 2
    return (value / 2 - low / 2) / span if span else 0.5


def _label(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}">{_text(text)}</text>'
    )


def _text(value: object) -> str:
    """Escapes any value as HTML text."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[:_MAX_CHARACTERS]}… ({len(text) - _MAX_CHARACTERS} more characters)"
    # Control, format (writing direction) and surrogate characters would garble the page.
    shown = (
        character
        if character in "\n\t" or not unicodedata.category(character).startswith("C")
        else character.encode("unicode_escape").decode()
        for character in text
    )
    return html.escape("".join(shown))
