"""Kind of a data set's rows, and refusal of rows that an algorithm cannot train on."""

from collections.abc import Sequence

from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

_WORDS = {
    "prompts": "prompts with answers",
    "lone_prompts": "prompts without answers",
    "conversations": "conversations (messages)",
    "text": "plain text",
    "preferences": "preference pairs (chosen and rejected)",
}
_FIXES = {
    "prompts": "for a recipe of pairs, sample them with pairs: {kind: rollouts}, or use rows with "
    "the columns chosen and rejected",
    "lone_prompts": "add a column answer or completion; without one, remove the section sft, or "
    "train with an algorithm that samples",
    "conversations": "train on them with sft, or use rows with the columns prompt and answer",
    "text": "train on it with sft, or use rows with the columns prompt and answer",
    "preferences": "train on them with dpo or reward_model and pairs: {kind: data}, or rename the "
    "column chosen to completion for sft",
}


def kind_of_row(row: Row) -> str:
    """Returns the kind of a data set's rows, derived from one of them.

    Returns:
        `prompts`, `lone_prompts` (without answers), `conversations`, `text` or `preferences`.
    """
    from nemo_rl_core.data.frames import row_kind

    kind = row_kind(row)
    return "lone_prompts" if kind == "prompts" and not row.get("completion") else kind


def described_kind(kind: str) -> str:
    """Returns the description of a kind for messages."""
    return _WORDS[kind]


def refuse_other_kinds(kind: str, trains_on: Sequence[str], *, part: str = "train") -> None:
    """Refuses rows that the stages of a recipe cannot train or validate on."""
    if kind in trains_on:
        return
    expected = " or ".join(_WORDS[accepted] for accepted in trains_on)
    if part == "train":
        use, fix = "train on", _FIXES[kind]
    else:
        use = "validate on"
        fix = f"use {expected} in data.validation, and put questions into evaluation.data"
    raise DataError(
        f"the {part} rows are {_WORDS[kind]}, which this recipe cannot {use}",
        expected=expected,
        got=_WORDS[kind],
        fix=fix,
    )
