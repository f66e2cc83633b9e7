"""What a row of the table is: how it is measured, and what was found."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.beside.turns import Turn


@dataclass(frozen=True)
class Figure:
    """A figure with the smallest and largest of what it is the median of."""

    value: float
    low: float
    high: float
    unit: str = "times"

    def text(self) -> str:
        """As the table shows it."""
        if self.unit == "%":
            return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%})"
        return f"{_short(self.value)} {self.unit} ({_short(self.low)} to {_short(self.high)})"


@dataclass(frozen=True)
class Measured:
    """What was found for a row.

    Attributes:
        figures: By what they are of, such as CPU time.
        n: How many turns, of each side.
        medians: What each side took, in words.
        note: What ran, where the row's own words do not say it.
    """

    figures: Mapping[str, Figure]
    n: int
    medians: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Bench:
    """What rows are measured with.

    Attributes:
        scratch: For models, data and runs; gone at the end.
        logs: For what the sides print.
        n: Turns of each side; a row that takes minutes a turn takes fewer.
    """

    scratch: Path
    logs: Path
    n: int

    def folder(self, name: str) -> Path:
        """A new folder."""
        place = self.scratch / f"{name}-{sum(1 for _ in self.scratch.iterdir())}"
        place.mkdir()
        return place


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        name: For the command line.
        work: What is compared.
        goal: As the table shows it.
        measure: Measures it.
    """

    name: str
    work: str
    goal: str
    measure: Callable[[Bench], Measured]


class UnequalWorkError(Exception):
    """The sides of a row have computed different things."""


def require_equal(figure: str, sides: Mapping[str, Sequence[Turn]], *, within: float) -> None:
    """Holds that all sides say the same of their last turn.

    Raises:
        UnequalWorkError: If they do not, or if one says nothing.
    """
    found = {name: turns[-1].figures.get(figure, float("nan")) for name, turns in sides.items()}
    is_known = all(math.isfinite(value) for value in found.values())
    if not is_known or max(found.values()) - min(found.values()) > within:
        raise UnequalWorkError(f"{figure} of {found}, which may differ by {within}")


def compared(
    ours: Sequence[Turn],
    theirs: Sequence[Turn],
    *,
    names: tuple[str, str] = ("this project", "TRL"),
    per: str | None = None,
    note: str = "",
) -> Measured:
    """How many times as long the others take: ratios of medians, with those of single rounds.

    Args:
        ours: The project's turns.
        theirs: The others', round by round.
        names: Of the two.
        per: A figure that both say of a turn; times are then divided by it.
        note: What ran.
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
    found = {name: ", ".join(values) for name, values in medians.items()}
    return Measured(figures, len(ours), found, note)


def ratio(above: Sequence[float], below: Sequence[float], unit: str = "times") -> Figure:
    """The ratio of medians, with the smallest and largest ratio of a round."""
    rounds = [one / other for one, other in zip(above, below, strict=True)]
    value = statistics.median(above) / statistics.median(below)
    return Figure(value, min(rounds), max(rounds), unit)


def median(values: Sequence[float], unit: str) -> Figure:
    """The median with the range."""
    return Figure(statistics.median(values), min(values), max(values), unit)


def add_to(file: Path, row: Row, found: Measured, where: Mapping[str, Any]) -> None:
    """Writes a row into the file of results, in place of an earlier one of its name."""
    rows = json.loads(file.read_text()) if file.exists() else {}
    rows[row.name] = {"work": row.work, "goal": row.goal, **asdict(found), **where}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def table(file: Path, order: Sequence[str]) -> str:
    """The results as a table for `docs/results.md`, with the machines below it.

    The load is that of the minute before a row and of the last minute of it.
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
