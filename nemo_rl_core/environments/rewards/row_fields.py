"""Fields that a completion can be scored by: texts, columns of its row, names of verl."""

import json
from collections.abc import Mapping
from typing import Any, Final

from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Rollout

Fields = Mapping[str, Any]
"""What a completion can be scored by, by name."""
COLUMNS: Final = ("answer", "task", "id", "metadata")
TEXTS: Final = ("prompt", "completion", "response", "completion_ids")
"""Fields that are no columns; a row's own columns of these names are in its `metadata` alone."""


def fields_of(rollout: Rollout) -> dict[str, Any]:
    """What a completion can be scored by; without `answer`, where the row has none."""
    prompt = rollout.prompt
    fields = given_fields(prompt.text, rollout.text, json.loads(prompt.metadata))
    fields |= {"task": prompt.task, "completion_ids": list(rollout.completion.token_ids)}
    # Without an answer, or in an episode without an id, the column is not there.
    fields |= {"id": prompt.id} if prompt.id else {}
    return fields | ({"answer": prompt.answer} if prompt.answer else {})


def given_fields(prompt: str, completion: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a text and its completion, where there is no more of a row than that."""
    texts = {"prompt": prompt, "completion": completion, "response": completion}
    return {**metadata, **texts, "metadata": dict(metadata)}


def field_names(fields: Fields) -> list[str]:
    """The names that a reward function may take of this row."""
    return [name for name in dict.fromkeys([*TEXTS, *COLUMNS, *fields]) if name in fields]


def lacks_column(name: str, fields: Fields) -> RewardError:
    """The error of a row that has nothing for a required parameter."""
    return RewardError(
        f"the row has no column {name!r}, which a parameter is named after",
        expected=f"one of {', '.join(field_names(fields))}",
        got=name,
        fix="name one of these, give the parameter a default, or add the column to the data",
    )


def verl_fields(fields: Fields) -> dict[str, Any]:
    """verl's names: a row's own values of these names, else this project's columns."""
    model = fields.get("reward_model")
    model = model if isinstance(model, Mapping) else {}
    found = {
        "data_source": fields.get("data_source", fields.get("task")),
        "ground_truth": model.get("ground_truth", fields.get("answer")),
        "extra_info": fields.get("extra_info", fields.get("metadata")),
    }
    if "ground_truth" in fields:
        found["ground_truth"] = fields["ground_truth"]
    return {name: value for name, value in found.items() if value is not None}


def messages_of(text: str) -> list[dict[str, Any]] | None:
    """The messages of a prompt that is a conversation, which arrives as JSON."""
    if not text.startswith("["):
        return None
    try:
        turns = json.loads(text)
    except ValueError:
        return None
    is_conversation = turns and all(isinstance(turn, dict) and "role" in turn for turn in turns)
    return turns if is_conversation else None
