"""Converters of one record into a row of its kind, and the columns that each needs."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_rl_core.data.turns import stored, turns_of
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class RecordFormat:
    """One line of the table above: its columns, its description, and its row converter."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    description: str
    row: Callable[[Mapping[str, Any]], Row | None]


def prompt_row(record: Mapping[str, Any]) -> Row:
    """A prompt with an answer and a completion, each of which stands for a missing other."""
    answer, completion = _text(record.get("answer")), _completion_text(record.get("completion"))
    return {
        "prompt": stored(_text(record.get("prompt"))),
        "answer": text_or(answer, completion),
        "completion": text_or(completion, answer),
    }


def lone_prompt_row(record: Mapping[str, Any]) -> Row:
    """A prompt without an answer."""
    return {"prompt": stored(_text(record.get("prompt"))), "answer": "", "completion": ""}


def _conversation(record: Mapping[str, Any]) -> Row:
    return {
        "messages": stored(record.get("messages")),
        **_optional_columns(record, "mask", "max_tokens"),
    }


def text_row(record: Mapping[str, Any]) -> Row:
    """Plain text, trained on whole."""
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


def text_or(value: Any, default: Any) -> Any:
    """A value as text, or the default where there is none."""
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


def json_of(metadata: Any) -> Any:
    """Metadata as JSON; what is no mapping stays as it is."""
    if isinstance(metadata, dict):
        return json.dumps(metadata, sort_keys=True, ensure_ascii=False, default=str)
    return metadata


_PAIR = ("margin", "max_tokens")
ROW_FORMATS = (
    RecordFormat(("chosen", "rejected", "prompt"), _PAIR, "preference pairs", _pair_with_prompt),
    RecordFormat(
        ("chosen", "rejected"),
        _PAIR,
        "preference pairs without a prompt, which is taken to be their shared start",
        _pair_without_prompt,
    ),
    RecordFormat(
        ("prompt", "responses", "scores"),
        (),
        "scored responses, paired best against worst",
        _pair_from_scores,
    ),
    RecordFormat(("messages",), ("mask", "max_tokens"), "conversations", _conversation),
    RecordFormat(
        ("prompt", "answer"), ("completion", "max_tokens"), "prompts with answers", prompt_row
    ),
    RecordFormat(
        ("prompt", "completion"),
        ("max_tokens",),
        "prompts with completions, which stand for the answers too",
        prompt_row,
    ),
    RecordFormat(("text",), ("max_tokens",), "plain text, trained on whole", text_row),
    RecordFormat(
        ("prompt",),
        ("max_tokens",),
        "prompts without answers, for rewards that need none",
        lone_prompt_row,
    ),
)
