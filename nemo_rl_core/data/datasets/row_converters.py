"""Converters of one record into a row, and the columns that they need."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from nemo_rl_core.data.datasets.content import (
    CONTENT,
    answer_or_letter,
    contains,
    prompt_with_content,
    with_system,
)
from nemo_rl_core.data.datasets.dialogues import as_dialogue
from nemo_rl_core.data.json_values import json_default, parsed
from nemo_rl_core.data.turns import FLAG, is_trained, num_shared, stored, turns_of
from nemo_rl_core.types import Row


@dataclass(frozen=True)
class RecordFormat:
    """Columns of a row format, its description, and its row converter."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    description: str
    row: Callable[[Mapping[str, Any]], Row | None]

    @property
    def is_prompt(self) -> bool:
        """Whether rows are prompts, which keep other columns in `metadata`."""
        return self.row in (prompt_row, prompt_only_row)


_EXACT = 2**53
"""Largest float up to which every integer is exact."""


def prompt_row(record: Mapping[str, Any]) -> Row:
    """Converts a prompt with an answer and a completion; either replaces the other if missing."""
    answer, completion = answer_or_letter(record), _completion_text(record.get("completion"))
    if isinstance(answer, list) and len(answer) == 1:  # as in allenai/Dolci-RL
        answer = answer[0]
    answer = _text(answer)
    return {
        "prompt": stored(_text(prompt_with_content(record))),
        "answer": text_or(answer, completion),
        "completion": text_or(completion, answer),
    }


def prompt_only_row(record: Mapping[str, Any]) -> Row:
    """Converts a prompt without an answer."""
    return {"prompt": stored(_text(prompt_with_content(record))), "answer": "", "completion": ""}


def _conversation(record: Mapping[str, Any]) -> Row:
    turns = turns_of(as_dialogue(record.get("messages")))
    if turns and (system := record.get("system")):
        turns = with_system(turns, system)
    return {
        "messages": stored(turns or record.get("messages")),
        **_optional_columns(record, "mask", "max_tokens"),
    }


def text_row(record: Mapping[str, Any]) -> Row:
    """Converts plain text, all of which is trained on."""
    return {"text": record.get("text"), **_optional_columns(record, "max_tokens")}


def pair_without_prompt(record: Mapping[str, Any]) -> Row:
    """Converts two answers with their shared start as prompt."""
    pair = [as_dialogue(record.get(name)) for name in ("chosen", "rejected")]
    if not all(isinstance(answer, str) for answer in pair):
        return _pair(record)
    prompt, chosen, rejected = _split(*pair)
    return _pair({**record, "prompt": prompt, "chosen": chosen, "rejected": rejected})


def _pair(record: Mapping[str, Any]) -> Row:
    prompt = prompt_with_content(record)
    pair = [as_dialogue(_answer(record.get(name))) for name in ("chosen", "rejected")]
    one, other = (turns_of(answer) for answer in pair)
    if one and other and one[0].get("role") != "assistant":
        # At least one turn remains for the answer, so that equal pairs are detected.
        shared = min(num_shared(one, other), len(one) - 1, len(other) - 1)
        prompt = _full_prompt(prompt, one[:shared], record.get("system"))
        pair = [one[shared:], other[shared:]]
    names = ("prompt", "chosen", "rejected")
    values = {name: stored(value) for name, value in zip(names, (prompt, *pair), strict=True)}
    return {**values, **_optional_columns(record, "margin", "max_tokens")}


def _answer(value: Any) -> Any:
    """Returns the text of an answer in a single turn, the format of LLaMA-Factory."""
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        raise ValueError(
            "has lists of texts in chosen or rejected, but a pair has one text each (data.columns: "
            "{chosen.0: chosen, rejected.0: rejected} uses the first)"
        )
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
        value = value[0] if "from" in value[0] else value
    if isinstance(value, Mapping):
        return value.get("value", value.get("content"))
    return value


def _full_prompt(prompt: Any, shared: list[Any], system: Any) -> Any:
    """Returns the turns that both answers repeat, after earlier turns of the prompt."""
    turns = turns_of(prompt)
    if turns and turns[-len(shared) :] == shared:
        return turns
    texts = [text for turn in turns or () if (text := turn.get("content")) != system]
    shared_text = "\n\n".join(str(turn.get("content")) for turn in shared)
    if not contains(shared_text, texts if turns else prompt):
        raise ValueError(
            "has a prompt that the conversations chosen and rejected do not repeat "
            "(data.drop_columns: [prompt] uses their shared turns instead)"
        )
    return with_system(shared, system) if system else shared


def _split(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Returns the shared start of two texts, and the rest of each."""
    common = chosen[: num_shared(chosen, rejected)]
    # Split at white space, since both answers may begin with the same letters.
    shared = max((index + 1 for index, char in enumerate(common) if char.isspace()), default=0)
    # White space goes to the answers: a prompt that ends with it would split a token.
    prompt = common[:shared].rstrip()
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]


def _pair_from_scores(record: Mapping[str, Any]) -> Row | None:
    # In a csv, lists are JSON.
    responses, scores = (parsed(record.get(name), list) for name in ("responses", "scores"))
    are_lists = isinstance(responses, list) and isinstance(scores, list)
    if not are_lists or len(responses) != len(scores) or not scores:
        raise ValueError("needs one score per response, and at least one response")
    if not all(isinstance(score, int | float) and math.isfinite(score) for score in scores):
        raise ValueError(f"has a score that is not a finite number: {str(scores)[:80]}")
    best, worst = max(scores), min(scores)
    if best == worst:
        return None
    return {
        "prompt": stored(prompt_with_content(record)),
        "chosen": stored(responses[scores.index(best)]),
        "rejected": stored(responses[scores.index(worst)]),
    }


def _optional_columns(record: Mapping[str, Any], *names: str) -> Row:
    filled = {name: record[name] for name in names if record.get(name) not in (None, "")}
    return {name: parsed(value, object) for name, value in filled.items()}


def text_or(value: Any, default: Any) -> Any:
    """Returns a value as text, or the default if it is None or empty."""
    return default if value is None or value == "" else _text(value)


def _completion_text(completion: Any) -> Any:
    turns = turns_of(completion)
    if turns and len(turns) > 1:
        raise ValueError(
            "has a completion of several turns, which only the column messages can contain: write "
            "the turns of the prompt and of the completion there"
        )
    if turns and len(turns) == 1 and turns[0]["role"] == "assistant":
        others = turns[0].keys() - {"role", "content", FLAG}
        if others or not is_trained(turns[0]):
            raise ValueError(
                f"has a completion with {', '.join(sorted(others)) or f'{FLAG}: false'}, which "
                "only the column messages can contain"
            )
        return turns[0].get("content")
    return _text(completion)


def _text(value: Any) -> Any:
    """Returns a finite number as text, an integer without a decimal point.

    `nan` and objects are unchanged; later checks refuse them.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return str(int(value))
    is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    if is_number and math.isfinite(value):
        return str(value)
    return value


def json_of(metadata: Any) -> Any:
    """Returns metadata as JSON; values that are not mappings are unchanged."""
    if not isinstance(metadata, dict):
        return metadata
    for name, value in metadata.items():
        try:
            json.dumps(value, default=json_default)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{error}: column {name!r} (data.drop_columns: [{name}] removes it)"
            ) from error
    return json.dumps(metadata, sort_keys=True, ensure_ascii=False, default=json_default)


_PAIR = ("margin", "max_tokens", *CONTENT)
ROW_FORMATS = (
    RecordFormat(("chosen", "rejected", "prompt"), _PAIR, "preference pairs", _pair),
    RecordFormat(
        ("chosen", "rejected"),
        _PAIR,
        "preference pairs without a prompt, which is assumed to be their shared start",
        pair_without_prompt,
    ),
    RecordFormat(
        ("prompt", "responses", "scores"),
        CONTENT,
        "scored responses, of which the best and the worst make a pair",
        _pair_from_scores,
    ),
    RecordFormat(("messages",), ("mask", "max_tokens", "system"), "conversations", _conversation),
    RecordFormat(
        ("prompt", "answer"),
        ("completion", "max_tokens", *CONTENT),
        "prompts with answers",
        prompt_row,
    ),
    RecordFormat(
        ("prompt", "completion"),
        ("max_tokens", *CONTENT),
        "prompts with completions, which are also the answers",
        prompt_row,
    ),
    RecordFormat(("text",), ("max_tokens",), "plain text, all of it trained on", text_row),
    RecordFormat(
        ("prompt",),
        ("max_tokens", *CONTENT),
        "prompts without answers, for rewards that need none",
        prompt_only_row,
    ),
)
