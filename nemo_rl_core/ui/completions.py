"""Reads and filters completions: rows of an artifact's rollouts or of an evaluation."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROLLOUTS = "rollouts"
_COLUMNS = (
    "prompt_id",
    "group",
    "sample",
    "mode",
    "category",
    "task",
    "prompt",
    "completion",
    "answer",
    "extracted",
    "reward",
    "advantage",
    "correct",
    "truncated",
    "error",
)


@dataclass(frozen=True)
class Filter:
    """A filter of completions.

    Attributes:
        only: "" for all, else `error`, `truncated`, `correct` or `wrong`.
        order: "" as in the file, else `best` or `worst` reward first.
    """

    low: float | None = None
    high: float | None = None
    text: str = ""
    only: str = ""
    order: str = ""

    def passes(self, row: dict[str, Any]) -> bool:
        """True if the row matches the filter."""
        reward = row.get("reward")
        if self.low is not None and (reward is None or reward < self.low):
            return False
        if self.high is not None and (reward is None or reward > self.high):
            return False
        if self.text:
            text = self.text.casefold()
            if not any(text in str(row.get(k) or "").casefold() for k in ("prompt", "completion")):
                return False
        return _PASSES[self.only](row) if self.only in _PASSES else True


def _is_correct(row: dict[str, Any]) -> bool:
    """Returns the column `correct`, or for rollouts whether the reward is positive."""
    correct = row["correct"]
    return (row["reward"] or 0) > 0 if correct is None else bool(correct)


_PASSES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "error": lambda row: bool(row.get("error")),
    "truncated": lambda row: bool(row.get("truncated")),
    "correct": _is_correct,
    "wrong": lambda row: row["reward"] is not None and not _is_correct(row),
}


def steps(folder: Path) -> list[int]:
    """Returns the steps with rollouts in an artifact, in order."""
    files = (folder / _ROLLOUTS).glob("step_*.parquet")
    numbers = (path.stem.removeprefix("step_") for path in files)
    return sorted(int(number) for number in numbers if number.isdigit())


def file_of(folder: Path, step: int | None) -> Path | None:
    """Returns the file with the rows of a step, or of an evaluation; None if missing."""
    path = (
        folder / "rows.parquet" if step is None else folder / _ROLLOUTS / f"step_{step:06d}.parquet"
    )
    return path if path.is_file() else None


def has_completions(folder: Path) -> bool:
    """Returns whether an artifact has completions to show."""
    if steps(folder):
        return True
    path = file_of(folder, None)
    try:
        return path is not None and "completion" in _columns(path)
    except OSError:
        return True  # the page of the completions shows the error


def read(path: Path, row_filter: Filter) -> tuple[list[dict[str, Any]], int]:
    """Reads the rows that pass the filter and counts all rows."""
    import pyarrow.parquet as pq

    columns = [name for name in _COLUMNS if name in _columns(path)]
    with _arrow_errors_as_os_errors():
        values_of_rows: list[dict[str, Any]] = pq.read_table(path, columns=columns).to_pylist()
    rows = [_row(index, values) for index, values in enumerate(values_of_rows)]
    kept = [row for row in rows if row_filter.passes(row)]
    if row_filter.order in ("best", "worst"):
        sign = -1 if row_filter.order == "best" else 1
        scored = [row for row in kept if row.get("reward") is not None]
        kept = sorted(scored, key=lambda row: sign * row["reward"]) + [
            row for row in kept if row.get("reward") is None
        ]
    return kept, len(rows)


def _row(index: int, values: dict[str, Any]) -> dict[str, Any]:
    """Fills missing columns with None and replaces non-numeric rewards by None."""
    row = {**dict.fromkeys(_COLUMNS), **values, "index": index}
    if not isinstance(row["reward"], (int, float)) or math.isnan(row["reward"]):
        row["reward"] = None
    return row


def _columns(path: Path) -> list[str]:
    import pyarrow.parquet as pq

    with _arrow_errors_as_os_errors():
        names: list[str] = pq.read_schema(path).names
    return names


@contextmanager
def _arrow_errors_as_os_errors() -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise OSError(str(error)) from error
