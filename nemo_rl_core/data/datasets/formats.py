"""Recognition of row formats by columns, and conversion into one form per kind.

| columns | rows become |
|---|---|
| `chosen`, `rejected`, and `prompt` | preference pairs |
| `chosen`, `rejected` alone | preference pairs; the shared prefix is the prompt |
| `prompt`, `responses`, `scores` | preference pairs, best against worst; ties are dropped |
| `messages` | conversations |
| `prompt` and `answer`, or `prompt` and `completion` | prompts, which can be trained on as well |
| `text` | plain text, trained on whole |
| `prompt` alone | prompts without answers, for rewards that need none |

The first matching line of the table applies. Turns are `{"role": ..., "content": ...}` in a list,
or in the JSON of a list. `known.py` has the published formats whose columns differ: they are
recognised where no line of this table fits. Other columns go into `metadata` of prompts, and are
ignored with a warning in rows of other kinds.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.data.chunks import chunks_of, rows_of
from nemo_rl_core.data.datasets.columns import RowFaults, chosen_columns, present_columns
from nemo_rl_core.data.datasets.known import FORMATS, PublishedFormat, published_format
from nemo_rl_core.data.datasets.prompt_columns import AnswerPattern, PromptWriter
from nemo_rl_core.data.datasets.records import Records
from nemo_rl_core.data.datasets.row_converters import (
    ROW_FORMATS,
    RecordFormat,
    lone_prompt_row,
    prompt_row,
)
from nemo_rl_core.data.datasets.row_reading import RowReading
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

_KNOWN = (
    "the columns prompt and answer, or prompt and completion, messages, text, chosen and rejected, "
    f"responses and scores, or a published format ({', '.join(FORMATS)})"
)


@dataclass(frozen=True)
class Recognised:
    """Rows in the form of their kind, and what their columns were taken for."""

    rows: Sequence[Row]
    read_as: str


def recognise(
    records: Records, *, where: str, task: str, form: RowFormat | None = None
) -> Recognised:
    """Rows in the form of their kind, in the order of the records.

    Missing values are filled: `id` with the record's number, `completion` with the answer and
    `answer` with the completion, `task` with `task`. Prompts carry the columns that are not
    understood in `metadata`, where rewards read them. Numbers become text; other values are
    unchanged, and `schemas.validate_rows` checks them. The records are gone through several times,
    a chunk at a time.

    Args:
        records: Mappings from columns to values.
        where: Name of the source in messages.
        task: The task of rows without one.
        form: How columns are read; None recognises them.

    Raises:
        DataError: When the columns are of no known format (lists those) or of several, or rows do
            not fit their format (names the rows, counted from 0).
    """
    form = form or RowFormat()
    if not len(records):
        return Recognised([], "no rows")
    plain = chosen_columns(records, form, where)
    present = present_columns(plain)
    name = published_format(plain, present, form, where)
    published = None if name is None else FORMATS[name]
    understood = present if published is None else _understood(plain, published, where)
    found = _format_of(understood, form, where)
    is_prompt = found.row in (prompt_row, lone_prompt_row)
    others = sorted(present - _used(found, published))
    pattern = form.answer_pattern or (published.answer_pattern if published else None)
    if pattern is not None and not is_prompt:
        raise DataError(
            f"{where}: data.answer_pattern needs rows with answers",
            got=found.description,
            fix="leave answer_pattern out, or map columns to prompt and answer",
        )
    reading = RowReading(
        where=where,
        task=form.task or task,
        found=found,
        published=published,
        others=tuple(others) if is_prompt else (),
        answers=None if pattern is None else AnswerPattern(pattern, where),
        prompts=PromptWriter(form, records, _hidden(form, published), where),
    )
    rows = reading.rows(plain, records)
    read_as = found.description if published is None else f"{name}: {published.description}"
    num_dropped = len(records) - len(rows)
    _log_format(where, read_as, num_ties=num_dropped, others=others, kept=is_prompt)
    return Recognised(rows, read_as)


def _understood(records: Records, published: PublishedFormat, where: str) -> set[str]:
    """The columns that are understood and have a value somewhere.

    Raises:
        DataError: Names rows that do not fit the format.
    """
    if published.names:  # only other names for columns, which no row fails
        present = present_columns(records)
        return {target for target, source in published.names.items() if source in present}
    faults = RowFaults(where)
    found: set[str] = set()
    first = 0
    for chunk in chunks_of(records):
        rows = faults.each(published.read, rows_of(chunk), first)
        found |= present_columns([row for _, row in rows])
        first += len(chunk)
    faults.refuse()
    return found


def _format_of(present: set[str], form: RowFormat, where: str) -> "RecordFormat":
    mapped = {*form.columns.values()}
    # What a user maps says more than columns that are there as well.
    for columns in (mapped, present) if mapped else (present,):
        for one in ROW_FORMATS:
            # A mapped prompt alone is completed by columns that have their name already.
            waits = columns is not present and one.row is lone_prompt_row
            if columns.issuperset(one.required) and not waits:
                return one
    raise _unknown(present, where)


def _used(found: "RecordFormat", published: PublishedFormat | None) -> set[str]:
    used = {"id", "task", "metadata"}
    if published is None:
        return {*found.required, *found.optional, *used}
    return used | {*published.required, *published.uses} - _RECOGNISED_BY


def _hidden(form: RowFormat, published: PublishedFormat | None) -> set[str]:
    own = {"answer", "completion", "chosen", "rejected", "responses"}
    mapped = {source for source, target in form.columns.items() if target in own}
    return own | mapped | ({*published.answers} if published else set())


def _log_format(
    where: str, description: str, *, num_ties: int, others: Sequence[str], kept: bool
) -> None:
    message = f"{where}: {description}"
    if num_ties:
        message += f"; {num_ties} rows whose scores are all equal are dropped"
    if others:
        what = "columns in metadata" if kept else "columns that are ignored"
        message += f"; {what}: {', '.join(others)}"
    logger.warning("%s", message)


def _unknown(present: set[str], where: str) -> DataError:
    missing = [column for column in ("prompt", "answer") if column not in present]
    return DataError(
        f"{where} lacks the column {' and the column '.join(missing)}",
        expected=_KNOWN,
        got=", ".join(sorted(present))[:160] or "no columns",
        fix="map the columns, as in data.columns: {YOUR_COLUMN: prompt, OTHER: answer}",
    )


_RECOGNISED_BY = {"reward_model", "answers", "level", "type"}
"""Columns of published formats that have more than `read` takes: rewards may want the rest."""
