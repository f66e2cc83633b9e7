"""Completions to read: rows of an artifact's rollouts or of an evaluation, filtered."""

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
    """Which completions to show.

    Attributes:
        low: The lowest reward; None for any.
        high: The highest.
        text: Must be in prompt or completion; letter case does not count.
        only: "" for all, else `error`, `truncated`, `correct` or `wrong`.
        order: "" as written, else `best` or `worst` reward first.
    """

    low: float | None = None
    high: float | None = None
    text: str = ""
    only: str = ""
    order: str = ""

    def passes(self, row: dict[str, Any]) -> bool:
        """Whether the row is to be shown."""
        reward = row.get("reward")
        if self.low is not None and (reward is None or reward < self.low):
            return False
        if self.high is not None and (reward is None or reward > self.high):
            return False
        if self.text:
            wanted = self.text.casefold()
            if not any(
                wanted in str(row.get(k) or "").casefold() for k in ("prompt", "completion")
            ):
                return False
        return _PASSES[self.only](row) if self.only in _PASSES else True


def _is_right(row: dict[str, Any]) -> bool:
    """As the evaluation graded it; a rollout of training has only its reward."""
    graded = row["correct"]
    return (row["reward"] or 0) > 0 if graded is None else bool(graded)


_PASSES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "error": lambda row: bool(row.get("error")),
    "truncated": lambda row: bool(row.get("truncated")),
    "correct": _is_right,
    "wrong": lambda row: row["reward"] is not None and not _is_right(row),
}


def steps(folder: Path) -> list[int]:
    """The steps whose rollouts an artifact keeps, in order."""
    found = (folder / _ROLLOUTS).glob("step_*.parquet")
    numbers = (path.stem.removeprefix("step_") for path in found)
    return sorted(int(number) for number in numbers if number.isdigit())


def file_of(folder: Path, step: int | None) -> Path | None:
    """Where the rows of a step lie, or those of an evaluation; None where there are none."""
    path = (
        folder / "rows.parquet" if step is None else folder / _ROLLOUTS / f"step_{step:06d}.parquet"
    )
    return path if path.is_file() else None


def has_completions(folder: Path) -> bool:
    """Whether an artifact has completions to read."""
    if steps(folder):
        return True
    path = file_of(folder, None)
    try:
        return path is not None and "completion" in _columns(path)
    except OSError:
        return True  # the page of the completions says what is wrong


def read(path: Path, wanted: Filter) -> tuple[list[dict[str, Any]], int]:
    """The rows that pass, and how many there are in all.

    Raises:
        OSError: If the file went away, or is no parquet file.
    """
    import pyarrow.parquet as pq

    columns = [name for name in _COLUMNS if name in _columns(path)]
    with _damage_is_of_the_file():
        found: list[dict[str, Any]] = pq.read_table(path, columns=columns).to_pylist()
    rows = [_row(place, values) for place, values in enumerate(found)]
    kept = [row for row in rows if wanted.passes(row)]
    if wanted.order in ("best", "worst"):
        sign = -1 if wanted.order == "best" else 1
        scored = [row for row in kept if row.get("reward") is not None]
        kept = sorted(scored, key=lambda row: sign * row["reward"]) + [
            row for row in kept if row.get("reward") is None
        ]
    return kept, len(rows)


def _row(place: int, values: dict[str, Any]) -> dict[str, Any]:
    """With every column that is shown; what is no number is no reward."""
    row = {**dict.fromkeys(_COLUMNS), **values, "place": place}
    if not isinstance(row["reward"], (int, float)) or math.isnan(row["reward"]):
        row["reward"] = None
    return row


def _columns(path: Path) -> list[str]:
    import pyarrow.parquet as pq

    with _damage_is_of_the_file():
        names: list[str] = pq.read_schema(path).names
    return names


@contextmanager
def _damage_is_of_the_file() -> Iterator[None]:
    """Raises OSError for whatever pyarrow finds wrong in a file."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise OSError(str(error)) from error
