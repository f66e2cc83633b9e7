"""Rows of the table: how each is measured, and its results."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.comparison.turns import Turn


@dataclass(frozen=True)
class Figure:
    """A median with the smallest and largest value."""

    value: float
    low: float
    high: float
    unit: str = "times"

    def text(self) -> str:
        """Formats the figure for the table."""
        if self.unit == "%":
            return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%})"
        return f"{_short(self.value)} {self.unit} ({_short(self.low)} to {_short(self.high)})"


@dataclass(frozen=True)
class Measured:
    """Results of a row.

    Attributes:
        figures: Figures by name, such as CPU time.
        n: Turns per side.
        medians: Medians of each side, formatted.
        note: Further details of the run.
    """

    figures: Mapping[str, Figure]
    n: int
    medians: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Bench:
    """Settings of a measurement.

    Attributes:
        scratch: Folder for models, data and runs; deleted at the end.
        logs: Folder for the output of the sides.
        n: Turns per side; a row whose turns take minutes takes fewer.
    """

    scratch: Path
    logs: Path
    n: int

    def folder(self, name: str) -> Path:
        """Creates a new folder."""
        folder = self.scratch / f"{name}-{sum(1 for _ in self.scratch.iterdir())}"
        folder.mkdir()
        return folder


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: Name on the command line.
        work: Description of the comparison.
        goal: Goal, as shown in the table.
        measure: Function that measures the row.
    """

    name: str
    work: str
    goal: str
    measure: Callable[[Bench], Measured]


class UnequalWorkError(Exception):
    """The sides of a row computed different things."""


def require_equal(figure: str, sides: Mapping[str, Sequence[Turn]], *, within: float) -> None:
    """Checks that all sides report the same figure for their last turn.

    Raises:
        UnequalWorkError: If they differ, or if a side does not report it.
    """
    last_values = {
        name: turns[-1].figures.get(figure, float("nan")) for name, turns in sides.items()
    }
    is_known = all(math.isfinite(value) for value in last_values.values())
    if not is_known or max(last_values.values()) - min(last_values.values()) > within:
        raise UnequalWorkError(f"{figure} of {last_values}, which may differ by {within}")


def compared(
    ours: Sequence[Turn],
    theirs: Sequence[Turn],
    *,
    names: tuple[str, str] = ("this project", "TRL"),
    per: str | None = None,
    note: str = "",
) -> Measured:
    """Compares times: ratios of medians, and the ratios of single rounds.

    Args:
        ours: Turns of the project.
        theirs: Turns of the other side, in the same rounds.
        names: Names of the two sides.
        per: A figure that both sides report; times are divided by it.
        note: Further details of the run.
    """
    figures = {}
    medians: dict[str, list[str]] = {name: [] for name in names}
    for kind, unit in (("cpu", "CPU-s"), ("wall", "s")):
        mine, other = (
            [getattr(turn, kind) / (turn.figures[per] if per else 1.0) for turn in turns]
            for turns in (ours, theirs)
        )
        figures["CPU" if kind == "cpu" else "wall"] = ratio(other, mine)
        for name, values in zip(names, (mine, other), strict=True):
            scale, word = (1e6, f"µ{unit} a token") if per else (1.0, unit)
            medians[name].append(f"{_short(scale * statistics.median(values))} {word}")
    texts = {name: ", ".join(values) for name, values in medians.items()}
    return Measured(figures, len(ours), texts, note)


def ratio(above: Sequence[float], below: Sequence[float], unit: str = "times") -> Figure:
    """Returns the ratio of medians, with the smallest and largest ratio of a round."""
    rounds = [one / other for one, other in zip(above, below, strict=True)]
    value = statistics.median(above) / statistics.median(below)
    return Figure(value, min(rounds), max(rounds), unit)


def median(values: Sequence[float], unit: str) -> Figure:
    """Returns the median with the range."""
    return Figure(statistics.median(values), min(values), max(values), unit)


def add_to(file: Path, row: Row, measured: Measured, where: Mapping[str, Any]) -> None:
    """Writes a row into the file of results, replacing an earlier one of its name."""
    rows = json.loads(file.read_text()) if file.exists() else {}
    rows[row.name] = {"work": row.work, "goal": row.goal, **asdict(measured), **where}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def table(file: Path, order: Sequence[str]) -> str:
    """Formats the results as a table for `docs/results.md`, with the machines below it.

    The load is that of the minute before a row and of its last minute.
    """
    rows = json.loads(file.read_text())
    lines = ["| work | goal | measured | n, load | medians |", "|---|---|---|---|---|"]
    machines: list[str] = []
    for name in [each for each in order if each in rows]:
        row = rows[name]
        if row["machine"] not in machines:
            machines.append(row["machine"])
        figures = "; ".join(
            f"{what} {Figure(**figure).text()}" for what, figure in row["figures"].items()
        )
        medians = "; ".join(f"{side} {each}" for side, each in row["medians"].items())
        note = f" ({row['note']})" if row["note"] else ""
        mark = f" [{machines.index(row['machine']) + 1}]"
        load = f"{row['n']}, {row['load_before']:.1f} to {row['load_after']:.1f}"
        lines.append(
            f"| {row['work']}{note} | {row['goal']} | {figures}{mark} | {load} | {medians} |"
        )
    lines += ["", *(f"[{number}] {each}." for number, each in enumerate(machines, start=1))]
    return "\n".join(lines) + "\n"


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
