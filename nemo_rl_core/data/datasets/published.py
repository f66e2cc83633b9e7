"""Definition of one published format: its columns, and how its records are read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]


@dataclass(frozen=True)
class PublishedFormat:
    """One published format.

    Attributes:
        required: Columns that every such set has.
        description: Description for the log and the record of a run.
        read: Converts a record to the columns of `formats.py`; None leaves the row out. Raises
            ValueError for a row that does not fit.
        answers: Columns that a prompt must not show.
        uses: Columns that `read` reads in addition to the required ones.
        absent: Columns that indicate another format.
        answer_pattern: Default pattern that extracts the answer.
        fits: Additional condition on the records.
        names: Columns of the data by columns of `formats.py`, if `read` only renames.
        content: Kinds of content (see `content.py`) that are written into the prompt if the set
            has such columns.
    """

    required: tuple[str, ...]
    description: str
    read: Callable[[Record], dict[str, Any] | None]
    answers: tuple[str, ...]
    uses: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    answer_pattern: str | None = None
    fits: Callable[[Sequence[Record]], bool] = lambda records: True
    names: Mapping[str, str] = field(default_factory=dict)
    content: tuple[str, ...] = ()


def renamed(
    description: str,
    names: Mapping[str, str],
    *,
    uses: tuple[str, ...] = (),
    required: tuple[str, ...] = (),
    answers: tuple[str, ...] = (),
    **options: Any,
) -> PublishedFormat:
    """Returns a format that only renames columns.

    Args:
        names: Columns of the data by columns of `formats.py`.
        uses: Optional columns among them.
        answers: Other columns that a prompt must not show.
    """

    def read(record: Record) -> dict[str, Any]:
        return {target: record.get(source) for target, source in names.items()}

    always = [source for source in names.values() if source not in uses]
    hidden = [source for target, source in names.items() if target not in ("prompt", "choices")]
    return PublishedFormat(
        (*always, *required),
        description,
        read,
        answers=(*hidden, *answers),
        uses=uses,
        names=names,
        **options,
    )


def first_value(records: Sequence[Record], column: str) -> Any:
    """Returns the first value of a column that is not null; None if there is none."""
    values = (record.get(column) for record in records)
    return next((value for value in values if value is not None), None)


def has_key(column: str, *keys: str) -> Callable[[Sequence[Record]], bool]:
    """Returns a condition: a column has an object, or a list of them, with one of the keys."""

    def fits(records: Sequence[Record]) -> bool:
        for record in records:
            value = record.get(column)
            first = value[0] if isinstance(value, list) and value else value
            if isinstance(first, Mapping) and not first.keys().isdisjoint(keys):
                return True
        return False

    return fits
