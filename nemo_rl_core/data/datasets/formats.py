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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.data.datasets.columns import chosen_columns, with_answers, with_prompts
from nemo_rl_core.data.datasets.known import FORMATS, PublishedFormat, published_format
from nemo_rl_core.data.turns import stored, turns_of
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

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

    rows: list[Row]
    read_as: str


def recognise(
    records: Sequence[Mapping[str, Any]], *, where: str, task: str, form: RowFormat | None = None
) -> Recognised:
    """Rows in the form of their kind, in the order of the records.

    Missing values are filled: `id` with the record's number, `completion` with the answer and
    `answer` with the completion, `task` with `task`. Prompts carry the columns that are not
    understood in `metadata`, where rewards read them. Numbers become text; other values are
    unchanged, and `schemas.validate_rows` checks them.

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
    if not records:
        return Recognised([], "no rows")
    plain = chosen_columns(records, form, where)
    present = _present(plain)
    name = published_format(plain, present, form, where)
    published = None if name is None else FORMATS[name]
    readable: Sequence[Mapping[str, Any] | None] = plain
    understood = present
    if published is not None:
        readable = _understood(plain, published, where)
        understood = _present(record for record in readable if record)
    found = _format_of(understood, form, where)
    numbered = _converted(readable, found, where)
    is_prompt = found.row in (_prompt, _prompt_alone)
    used = _used(found, published)
    others = sorted(present - used)
    rows = [
        {
            "id": _filled(plain[number].get("id"), str(number)),
            **row,
            "task": _filled(plain[number].get("task"), form.task or task),
            "metadata": _metadata(plain[number], others if is_prompt else ()),
        }
        for number, row in numbered
    ]
    pattern = form.answer_pattern or (published.answer_pattern if published else None)
    if pattern is not None:
        if not is_prompt:
            raise DataError(
                f"{where}: data.answer_pattern needs rows with answers",
                got=found.description,
                fix="leave answer_pattern out, or map columns to prompt and answer",
            )
        rows = with_answers(rows, pattern, where)
    kept = [(number, row) for (number, _), row in zip(numbered, rows, strict=True)]
    rows = with_prompts(kept, records, form, _hidden(form, published), where)
    read_as = found.description if published is None else f"{name}: {published.description}"
    num_dropped = len(records) - len(rows)
    _log_format(where, read_as, num_ties=num_dropped, others=others, kept=is_prompt)
    return Recognised(rows, read_as)


def _understood(
    records: Sequence[Mapping[str, Any]], published: PublishedFormat, where: str
) -> list[Row | None]:
    """The columns that are understood, of each record; None for rows that are left out."""
    return [row for _, row in _each(records, published.read, where)]


def _converted(
    records: Sequence[Mapping[str, Any] | None], found: "_Format", where: str
) -> list[tuple[int, Row]]:
    rows = _each(records, lambda record: None if record is None else found.row(record), where)
    return [(number, row) for number, row in rows if row is not None]


def _each(
    records: Sequence[Any], read: Callable[[Any], Row | None], where: str
) -> list[tuple[int, Row | None]]:
    """Every row as it is read; all that do not fit are named together."""
    found: list[tuple[int, Row | None]] = []
    faults: list[tuple[int, str]] = []
    for number, record in enumerate(records):
        try:
            found.append((number, read(record)))
        except ValueError as error:
            faults.append((number, str(error)))
    if faults:
        number, text = faults[0]
        others = [str(each) for each, _ in faults[1:6]]
        more = f"; {len(faults) - 1} more do not fit: rows {', '.join(others)}" if others else ""
        raise DataError(f"{where}: row {number} {text}{more}", fix="mend or remove these rows")
    return found


def _present(records: Iterable[Mapping[str, Any]]) -> set[str]:
    """The columns that have a value somewhere."""
    found: set[str] = set()
    for record in records:
        if found.issuperset(record):
            continue
        found.update(str(key) for key, value in record.items() if value is not None)
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
