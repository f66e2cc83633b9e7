"""Fields that a reward function can use: texts, columns of the row, and verl's names."""

import json
from collections.abc import Mapping
from typing import Any, Final

from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Rollout

Fields = Mapping[str, Any]
"""Arguments of reward functions by name."""
COLUMNS: Final = ("answer", "task", "id", "metadata")
TEXTS: Final = ("prompt", "completion", "response", "completion_ids", "messages")
"""Fields that are not columns; columns of the row with these names are only in `metadata`."""


def fields_of(rollout: Rollout) -> dict[str, Any]:
    """Returns the fields of a rollout; without `answer` if the row has none."""
    prompt = rollout.prompt
    turns = messages_of(prompt.text) or [{"role": "user", "content": prompt.text}]
    messages = rollout.messages or (*turns, {"role": "assistant", "content": rollout.text})
    fields = given_fields(prompt.text, rollout.text, json.loads(prompt.metadata))
    fields |= {"task": prompt.task, "messages": list(messages)}
    fields |= {"completion_ids": list(rollout.completion.token_ids)}
    # The columns are left out if the row has no answer, or the episode no id.
    fields |= {"id": prompt.id} if prompt.id else {}
    return fields | ({"answer": prompt.answer} if prompt.answer else {})


def given_fields(prompt: str, completion: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a prompt and completion without a row."""
    texts = {"prompt": prompt, "completion": completion, "response": completion}
    return {**metadata, **texts, "metadata": dict(metadata)}


def field_names(fields: Fields) -> list[str]:
    """Returns the names that a reward function may use with this row."""
    return [name for name in dict.fromkeys([*TEXTS, *COLUMNS, *fields]) if name in fields]


def lacks_column(name: str, fields: Fields) -> RewardError:
    """Returns the error for a row without the column of a required parameter."""
    return RewardError(
        f"the row has no column {name!r} for the parameter of that name",
        expected=f"one of {', '.join(field_names(fields))}",
        got=name,
        fix="rename the parameter, give it a default, or add the column to the data",
    )


def verl_fields(fields: Fields) -> dict[str, Any]:
    """Returns the fields of verl's names: the row's values if it has any, else our columns."""
    model = fields.get("reward_model")
    model = model if isinstance(model, Mapping) else {}
    values = {
        "data_source": fields.get("data_source", fields.get("task")),
        "ground_truth": model.get("ground_truth", fields.get("answer")),
        "extra_info": fields.get("extra_info", fields.get("metadata")),
    }
    if "ground_truth" in fields:
        values["ground_truth"] = fields["ground_truth"]
    return {name: value for name, value in values.items() if value is not None}


def messages_of(text: str) -> list[dict[str, Any]] | None:
    """Parses a prompt that is a conversation in JSON; None for other prompts."""
    if not text.startswith("["):
        return None
    try:
        turns = json.loads(text)
    except ValueError:
        return None
    is_conversation = turns and all(isinstance(turn, dict) and "role" in turn for turn in turns)
    return turns if is_conversation else None
