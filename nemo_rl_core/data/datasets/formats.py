"""Recognition of row formats by their columns, and conversion into one format per kind.

The first entry of `row_converters.ROW_FORMATS` whose columns are present applies, otherwise a
published format (`known.py`). Columns that are part of a question (`content.py`) are written into
the prompt or refused. Other columns go into `metadata` of prompts, and are ignored in rows of other
kinds; the log lists those with text.
"""

import logging
from collections.abc import Sequence

from nemo_rl_core.config.row_format import KNOWN_COLUMNS, RowFormat
from nemo_rl_core.data.chunks import chunks_of, rows_of
from nemo_rl_core.data.datasets.columns import (
    RowFaults,
    chosen_columns,
    kept_names,
    present_columns,
)
from nemo_rl_core.data.datasets.content import CONTENT, has_content
from nemo_rl_core.data.datasets.known import FORMATS, published_format
from nemo_rl_core.data.datasets.parts import Recognized
from nemo_rl_core.data.datasets.prompt_columns import AnswerPattern, PromptWriter
from nemo_rl_core.data.datasets.published import PublishedFormat
from nemo_rl_core.data.datasets.records import Records
from nemo_rl_core.data.datasets.row_converters import (
    ROW_FORMATS,
    RecordFormat,
    pair_without_prompt,
    prompt_only_row,
)
from nemo_rl_core.data.datasets.row_reading import RowReading
from nemo_rl_core.data.datasets.unwritten import (
    contained_content,
    mapping_line,
    refuse_lost_questions,
    refuse_unsupported_formats,
    shown_columns,
    text_columns,
    written_content,
)
from nemo_rl_core.data.tools import SPELLINGS
from nemo_rl_core.errors import DataError

logger = logging.getLogger(__name__)

_KNOWN = (
    "the columns prompt and answer, or prompt and completion, messages, text, chosen and rejected, "
    "responses and scores, or a published format (docs/data.md lists them)"
)


def recognize(
    records: Records,
    *,
    where: str,
    task: str,
    form: RowFormat | None = None,
    drops_invalid: bool = False,
) -> Recognized:
    """Converts records into rows of one kind, in the order of the records.

    Missing values are filled: `id` with the record's index, `completion` with the answer and
    `answer` with the completion, `task` with `task`. Unrecognized columns of prompts go into
    `metadata`, where rewards read them. Numbers become text; other values are unchanged, and
    `schemas.checked_rows` checks them. The records are iterated several times, in chunks.

    Args:
        form: How columns are read; None recognizes them.
        drops_invalid: Whether rows that do not fit are dropped, up to a share of them; `read_as`
            then has their number and faults.
    """
    form = form or RowFormat()
    if not len(records):
        return Recognized([], "no rows")
    lost: dict[int, str] = {}
    dropped = lost if drops_invalid else None
    plain = chosen_columns(records, form, where, dropped)
    present = present_columns(plain)
    refuse_unsupported_formats(plain, present, where)
    name = published_format(plain, present, form, where)
    published = None if name is None else FORMATS[name]
    understood = present
    if published is not None:
        understood = _understood(plain, published, RowFaults(where, drops=drops_invalid))
    row_format = _format_of(understood, form, where)
    content = written_content(present, row_format, published, form)
    choices = content.get("choices")
    if choices and not any(has_content(record.get(choices)) for record in plain):
        del content["choices"]
    used = _used(row_format, published) | {*content.values()}
    contained = contained_content(
        plain, present - used, row_format, published, form, where, dropped
    )
    others = sorted(present - used)
    read = kept_names(form) | shown_columns(form) | contained
    if published is not None:
        read |= {*published.required, *published.uses, *published.names.values()}
    unread = text_columns(plain, [name for name in others if name not in read])
    if "chosen" in understood and "prompt" not in understood and name in (None, "question_pairs"):
        refuse_lost_questions(plain, unread, where, form)
    pattern = form.answer_pattern or (published.answer_pattern if published else None)
    if pattern is not None and not row_format.is_prompt:
        raise DataError(
            f"{where}: data.answer_pattern needs rows with answers",
            got=row_format.description,
            fix="leave answer_pattern out, or map columns to prompt and answer",
        )
    reading = RowReading(
        faults=RowFaults(where, drops=drops_invalid, lost=lost),
        task=form.task or task,
        row_format=row_format,
        published=published,
        content=content,
        others=tuple(others) if row_format.is_prompt else (),
        answers=None if pattern is None else AnswerPattern(pattern, where),
        prompts=PromptWriter(form, records, _hidden(form, published), where),
    )
    rows = reading.rows(plain, records)
    read_as = row_format.description if published is None else f"{name}: {published.description}"
    read_as += f"; {reading.dropped}" if reading.dropped else ""
    num_ties = len(records) - len(rows) - reading.num_dropped
    _log_format(
        where, read_as, num_ties=num_ties, others=others, unread=unread, row_format=row_format
    )
    return Recognized(rows, read_as)


def _understood(records: Records, published: PublishedFormat, faults: RowFaults) -> set[str]:
    if published.names:  # only renames columns, so every row fits
        present = present_columns(records)
        return {target for target, source in published.names.items() if source in present}
    names: set[str] = set()
    first = 0
    for chunk in chunks_of(records):
        rows = faults.read_rows(published.read, rows_of(chunk), first)
        names |= present_columns([row for _, row in rows])
        first += len(chunk)
    faults.close(len(records))
    return names


def _format_of(present: set[str], form: RowFormat, where: str) -> RecordFormat:
    mapped = {*form.columns.values()}
    # Columns that the user maps take precedence over other columns.
    for columns in (mapped, present) if mapped else (present,):
        for row_format in ROW_FORMATS:
            # Columns with known names complete a mapped prompt or a mapped pair.
            is_part = row_format.row in (prompt_only_row, pair_without_prompt)
            is_incomplete = columns is not present and is_part
            if columns.issuperset(row_format.required) and not is_incomplete:
                return row_format
    raise _unknown(present, where)


def _used(row_format: RecordFormat, published: PublishedFormat | None) -> set[str]:
    used = {"id", "task", "metadata", *SPELLINGS}
    if published is None:
        return {*row_format.required, *row_format.optional, *used} - {*CONTENT}
    kept = {*published.answers} - {*KNOWN_COLUMNS} if row_format.is_prompt else set()
    kept |= _RECOGNIZED_BY
    return used | {*published.required, *published.uses} - kept


def _hidden(form: RowFormat, published: PublishedFormat | None) -> set[str]:
    answers = {"answer", "completion", "chosen", "rejected", "responses"}
    mapped = {source for source, target in form.columns.items() if target in answers}
    return answers | mapped | ({*published.answers} if published else set())


def _log_format(
    where: str,
    description: str,
    *,
    num_ties: int,
    others: Sequence[str],
    unread: Sequence[str],
    row_format: RecordFormat,
) -> None:
    message = f"{where}: {description}"
    if num_ties:
        message += f"; {num_ties} rows with equal scores are dropped"
    if others:
        what = "columns in metadata" if row_format.is_prompt else "ignored columns"
        message += f"; {what}: {', '.join(others)}"
    if unread:
        names = ", ".join(unread)
        # Conversations and plain text have no template.
        write = "write it with data.prompt_template, or " if "prompt" in row_format.required else ""
        message += (
            f"; text that is in neither prompt nor answer: {names} "
            f"({write}remove it with data.drop_columns: [{names}])"
        )
    logger.warning("%s", message)


def _unknown(present: set[str], where: str) -> DataError:
    needed = ("prompt",) if {"responses", "scores"} <= present else ("prompt", "answer")
    missing = [column for column in needed if column not in present]
    likely = [next((name for name in names if name in present), None) for names in _LIKELY]
    question, answer = (name or word for name, word in zip(likely, _WORDS, strict=True))
    columns = dict(zip((question, answer), needed, strict=False))
    return DataError(
        f"{where} lacks the column {' and the column '.join(missing)}",
        expected=_KNOWN,
        got=", ".join(sorted(present))[:160] or "no columns",
        fix=f"map the columns, as in {mapping_line(columns)}",
    )


_LIKELY = (
    ("question", "problem", "instruction", "query", "input", "Question", "Problem", "prompt"),
    ("answer", "solution", "response", "output", "target", "ground_truth", "reference_answer"),
)
_WORDS = ("YOUR_COLUMN", "OTHER")
_RECOGNIZED_BY = {"reward_model", "answers", "level", "type"}
"""Columns of published formats of which `read` uses only a part; they stay in `metadata` for
rewards, like answers under their own name."""
