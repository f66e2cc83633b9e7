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
or in the JSON of a list. Other columns are ignored with a warning.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.data.turns import stored, turns_of
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

logger = logging.getLogger(__name__)

_KNOWN = (
    "the columns prompt and answer, or prompt and completion, messages, text, chosen and rejected, "
    "responses and scores"
)


@dataclass(frozen=True)
class _Format:
    """One line of the table above: its columns, its description, and its row converter."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    description: str
    row: Callable[[Mapping[str, Any]], Row | None]


def recognise(records: Sequence[Mapping[str, Any]], *, where: str, task: str) -> list[Row]:
    """Rows in the form of their kind, in the order of the records.

    Missing values are filled: `id` with the record's number, `completion` with the answer and
    `answer` with the completion, `task` with `task`, `metadata` with `{}`. Numbers become text;
    other values are unchanged, and `schemas.validate_rows` checks them.

    Args:
        records: Mappings from columns to values.
        where: Name of the source in messages.
        task: The task of rows without one.

    Raises:
        DataError: When the columns are of no known format (lists those), or responses do not match
            their scores (names the rows, counted from 0).
    """
    if not records:
        return []
    present = {str(key) for record in records for key, value in record.items() if value is not None}
    found = next((one for one in _FORMATS if present.issuperset(one.required)), None)
    if found is None:
        raise _unknown(present or {str(key) for record in records for key in record}, where)
    rows = []
    for number, record in enumerate(records):
        try:
            row = found.row(record)
        except ValueError as error:
            raise DataError(f"{where}: row {number} {error}", fix="mend or remove it") from None
        if row is not None:
            shared = {
                "task": _filled(record.get("task"), task),
                "metadata": _filled(_json_of(record.get("metadata")), "{}"),
            }
            rows.append({"id": _filled(record.get("id"), str(number)), **row, **shared})
    ignored = present - {*found.required, *found.optional, "id", "task", "metadata"}
    _log_format(where, found.description, num_ties=len(records) - len(rows), ignored=ignored)
    return rows


def _log_format(where: str, description: str, *, num_ties: int, ignored: set[str]) -> None:
    message = f"{where}: {description}"
    if num_ties:
        message += f"; {num_ties} rows whose scores are all equal are dropped"
    if ignored:
        message += f"; columns that are ignored: {', '.join(sorted(ignored))}"
    logger.warning("%s", message)


def _unknown(present: set[str], where: str) -> DataError:
    missing = [column for column in ("prompt", "answer") if column not in present]
    return DataError(
        f"{where} lacks the column {' and the column '.join(missing)}",
        expected=_KNOWN,
        got=", ".join(sorted(present))[:160] or "no columns",
        fix="rename the columns",
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
