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

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.data.chunks import RowWriter, chunks_of, rows_of
from nemo_rl_core.data.datasets import columnar
from nemo_rl_core.data.datasets.columns import (
    AnswerPattern,
    PromptWriter,
    RowFaults,
    chosen_columns,
    present_columns,
)
from nemo_rl_core.data.datasets.known import FORMATS, PublishedFormat, published_format
from nemo_rl_core.data.datasets.records import Records
from nemo_rl_core.data.turns import stored, turns_of
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_KNOWN = (
    "the columns prompt and answer, or prompt and completion, messages, text, chosen and rejected, "
    f"responses and scores, or a published format ({', '.join(FORMATS)})"
)


@dataclass(frozen=True)
class _Format:
    """One line of the table above: its columns, its description, and its row converter."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    description: str
    row: Callable[[Mapping[str, Any]], Row | None]


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
    is_prompt = found.row in (_prompt, _prompt_alone)
    others = sorted(present - _used(found, published))
    pattern = form.answer_pattern or (published.answer_pattern if published else None)
    if pattern is not None and not is_prompt:
        raise DataError(
            f"{where}: data.answer_pattern needs rows with answers",
            got=found.description,
            fix="leave answer_pattern out, or map columns to prompt and answer",
        )
    reading = _Reading(
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


class _Reading:
    """Makes rows of records, chunk by chunk, and refuses all that do not fit at the end.

    Args:
        where: Name of the source in messages.
        task: The task of rows without one.
        found: The format of what is understood.
        published: The published format that is read first, if any.
        others: Columns that go into `metadata`.
        answers: Takes answers out of texts, if asked.
        prompts: Writes prompts and system turns, if asked.
    """

    def __init__(
        self,
        *,
        where: str,
        task: str,
        found: _Format,
        published: PublishedFormat | None,
        others: Sequence[str],
        answers: AnswerPattern | None,
        prompts: PromptWriter,
    ) -> None:
        self._task, self._found, self._published = task, found, published
        self._others, self._answers, self._prompts = others, answers, prompts
        self._faults = RowFaults(where)

    def rows(self, plain: Records, records: Records) -> Sequence[Row]:
        """The rows of all records.

        Args:
            plain: The records with their columns chosen.
            records: With the columns that the data has.

        Raises:
            DataError: Names rows that do not fit.
        """
        writer = RowWriter()
        first = 0
        for chunk, source in zip(chunks_of(plain), chunks_of(records), strict=True):
            writer.add(self._chunk(chunk, source, first))
            first += len(chunk)
        self._faults.refuse()
        if self._answers is not None:
            self._answers.refuse()
        self._prompts.refuse()
        return writer.close()

    def _chunk(
        self, chunk: "list[Row] | pa.Table", source: "list[Row] | pa.Table", first: int
    ) -> "list[Row] | pa.Table":
        if not isinstance(chunk, list):
            table = self._table(chunk, first)
            if table is not None:
                return table
        plain = rows_of(chunk)
        numbered = self._faults.each(self._row, plain, first)
        rows = [
            {
                "id": _filled(plain[number].get("id"), str(first + number)),
                **row,
                "task": _filled(plain[number].get("task"), self._task),
                "metadata": _metadata(plain[number], self._others),
            }
            for number, row in numbered
        ]
        if self._answers is not None:
            rows = self._answers.taken(rows)
        if not self._prompts.writes:
            return rows
        numbers = [number for number, _ in numbered]
        return self._prompts.written(rows, numbers, rows_of(source), first)

    def _table(self, chunk: "pa.Table", first: int) -> "pa.Table | None":
        """The rows as columns, where nothing has to be done value by value."""
        if self._prompts.writes:
            return None
        understood = chunk
        if self._published is not None:
            if not self._published.names:
                return None
            understood = columnar.renamed(chunk, self._published.names)
        found: pa.Table | None = None
        metadata = columnar.RowMetadata(self._others, lambda row: _metadata(row, self._others))
        common: Any = {"first": first, "task": self._task, "metadata": metadata}
        if self._found.row is _prompt:
            found = columnar.prompt_table(understood, chunk, **common)
        elif self._found.row is _prompt_alone:
            found = columnar.lone_prompt_table(understood, chunk, **common)
        elif self._found.row is _text_row:
            found = columnar.text_table(chunk, **common)
        if found is None or self._answers is None:
            return found
        return self._answers.taken_of_table(found)

    def _row(self, record: Mapping[str, Any]) -> Row | None:
        readable = record if self._published is None else self._published.read(record)
        return None if readable is None else self._found.row(readable)


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


def _format_of(present: set[str], form: RowFormat, where: str) -> "_Format":
    mapped = {*form.columns.values()}
    # What a user maps says more than columns that are there as well.
    for columns in (mapped, present) if mapped else (present,):
        for one in _FORMATS:
            # A mapped prompt alone is completed by columns that have their name already.
            waits = columns is not present and one.row is _prompt_alone
            if columns.issuperset(one.required) and not waits:
                return one
    raise _unknown(present, where)


def _used(found: "_Format", published: PublishedFormat | None) -> set[str]:
    used = {"id", "task", "metadata"}
    if published is None:
        return {*found.required, *found.optional, *used}
    return used | {*published.required, *published.uses} - _RECOGNISED_BY


def _hidden(form: RowFormat, published: PublishedFormat | None) -> set[str]:
    own = {"answer", "completion", "chosen", "rejected", "responses"}
    mapped = {source for source, target in form.columns.items() if target in own}
    return own | mapped | ({*published.answers} if published else set())


def _metadata(record: Mapping[str, Any], others: Sequence[str]) -> Any:
    own = record.get("metadata")
    carried = {name: record[name] for name in others if record.get(name) is not None}
    if not carried:
        return "{}" if own is None else _filled(_json_of(own), "{}")
    if own in (None, ""):
        return _json_of(carried)
    try:
        parsed = json.loads(own) if isinstance(own, str) else own
    except ValueError:
        parsed = None
    # What is no object is named by the schema.
    return _json_of({**carried, **parsed}) if isinstance(parsed, dict) else own


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


def _prompt(record: Mapping[str, Any]) -> Row:
    answer, completion = _text(record.get("answer")), _completion_text(record.get("completion"))
    return {
        "prompt": stored(_text(record.get("prompt"))),
        "answer": _filled(answer, completion),
        "completion": _filled(completion, answer),
    }


def _prompt_alone(record: Mapping[str, Any]) -> Row:
    return {"prompt": stored(_text(record.get("prompt"))), "answer": "", "completion": ""}


def _conversation(record: Mapping[str, Any]) -> Row:
    return {
        "messages": stored(record.get("messages")),
        **_optional_columns(record, "mask", "max_tokens"),
    }


def _text_row(record: Mapping[str, Any]) -> Row:
    return {"text": record.get("text"), **_optional_columns(record, "max_tokens")}


def _pair_with_prompt(record: Mapping[str, Any]) -> Row:
    chosen = turns_of(record.get("chosen"))
    # Some data sets have a prompt and repeat it in the pair.
    if chosen and chosen[0].get("role") != "assistant":
        return _pair_without_prompt(record)
    return {
        **{name: stored(record.get(name)) for name in ("prompt", "chosen", "rejected")},
        **_optional_columns(record, "margin", "max_tokens"),
    }


def _pair_without_prompt(record: Mapping[str, Any]) -> Row:
    chosen, rejected = record.get("chosen"), record.get("rejected")
    one, other = turns_of(chosen), turns_of(rejected)
    if one and other:
        # At least one turn is left for the answer, so that equal pairs are detected.
        shared = min(_num_shared(one, other), len(one) - 1, len(other) - 1)
        prompt: Any = one[:shared]
        chosen, rejected = one[shared:], other[shared:]
    elif isinstance(chosen, str) and isinstance(rejected, str):
        common = chosen[: _num_shared(chosen, rejected)]
        # Not within a word, since both answers may begin with the same letters.
        shared = max((index + 1 for index, char in enumerate(common) if char.isspace()), default=0)
        # White space belongs to the answers: a prompt that ends with it would split a token.
        prompt = common[:shared].rstrip()
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        prompt = None
    values = {"prompt": stored(prompt), "chosen": stored(chosen), "rejected": stored(rejected)}
    return {**values, **_optional_columns(record, "margin", "max_tokens")}


def _num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    differs = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differs, min(len(one), len(other)))


def _pair_from_scores(record: Mapping[str, Any]) -> Row | None:
    responses, scores = _listed(record.get("responses")), _listed(record.get("scores"))
    if responses is None or scores is None or len(responses) != len(scores) or not scores:
        raise ValueError("needs as many scores as responses, and at least one of each")
    if not all(isinstance(score, int | float) and math.isfinite(score) for score in scores):
        raise ValueError(f"has a score that is not a finite number: {str(scores)[:80]}")
    best, worst = max(scores), min(scores)
    if best == worst:
        return None
    return {
        "prompt": stored(record.get("prompt")),
        "chosen": stored(responses[scores.index(best)]),
        "rejected": stored(responses[scores.index(worst)]),
    }


def _listed(value: Any) -> list[Any] | None:
    if isinstance(value, str):  # csv has no lists
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return value if isinstance(value, list) else None


def _optional_columns(record: Mapping[str, Any], *names: str) -> Row:
    """Optional columns, stored if present; csv gives numbers as text."""
    return {name: _number(record[name]) for name in names if record.get(name) not in (None, "")}


def _number(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _filled(value: Any, default: Any) -> Any:
    return default if value is None or value == "" else _text(value)


def _completion_text(completion: Any) -> Any:
    """The text of a completion, which may be a single assistant turn."""
    turns = turns_of(completion)
    if turns and len(turns) == 1 and turns[0]["role"] == "assistant":
        return turns[0].get("content")
    return _text(completion)


def _text(value: Any) -> Any:
    """A finite number as text; `nan` and objects are unchanged, and refused by later checks."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    return value


def _json_of(metadata: Any) -> Any:
    if isinstance(metadata, dict):
        return json.dumps(metadata, sort_keys=True, ensure_ascii=False, default=str)
    return metadata


_RECOGNISED_BY = {"reward_model", "answers", "level", "type"}
"""Columns of published formats that have more than `read` takes: rewards may want the rest."""

_PAIR = ("margin", "max_tokens")
_FORMATS = (
    _Format(("chosen", "rejected", "prompt"), _PAIR, "preference pairs", _pair_with_prompt),
    _Format(
        ("chosen", "rejected"),
        _PAIR,
        "preference pairs without a prompt, which is taken to be their shared start",
        _pair_without_prompt,
    ),
    _Format(
        ("prompt", "responses", "scores"),
        (),
        "scored responses, paired best against worst",
        _pair_from_scores,
    ),
    _Format(("messages",), ("mask", "max_tokens"), "conversations", _conversation),
    _Format(("prompt", "answer"), ("completion", "max_tokens"), "prompts with answers", _prompt),
    _Format(
        ("prompt", "completion"),
        ("max_tokens",),
        "prompts with completions, which stand for the answers too",
        _prompt,
    ),
    _Format(("text",), ("max_tokens",), "plain text, trained on whole", _text_row),
    _Format(
        ("prompt",),
        ("max_tokens",),
        "prompts without answers, for rewards that need none",
        _prompt_alone,
    ),
)
