"""The kind of a data set's rows, and the refusal of rows that an algorithm cannot train on."""

from collections.abc import Sequence
from pathlib import Path

from nemo_rl_core.errors import DataError

_WORDS = {
    "prompts": "prompts with answers",
    "lone_prompts": "prompts without answers",
    "conversations": "conversations (messages)",
    "text": "plain text",
    "preferences": "preference pairs (chosen and rejected)",
}
_FIXES = {
    "prompts": "for a recipe of pairs, sample them with pairs: {kind: rollouts}, or give rows with "
    "the columns chosen and rejected",
    "lone_prompts": "add a column answer or completion; without one, leave the section sft out, or "
    "train with an algorithm that samples",
    "conversations": "train on them with sft, or give rows with the columns prompt and answer",
    "text": "train on it with sft, or give rows with the columns prompt and answer",
    "preferences": "train on them with dpo or reward_model and pairs: {kind: data}, or rename the "
    "column chosen to completion for sft",
}


def kind_of_rows(folder: Path) -> str:
    """Returns the kind of the rows in a data set folder.

    Returns:
        `prompts`, `lone_prompts` (without answers), `conversations`, `text` or `preferences`.
    """
    import pyarrow.parquet as pq

    from nemo_rl_core.data.frames import row_kind
    from nemo_rl_core.data.loader import ROWS_FILE

    with pq.ParquetFile(folder / ROWS_FILE) as file:
        (first,) = next(file.iter_batches(batch_size=1)).to_pylist()
    kind = row_kind(first)
    return "lone_prompts" if kind == "prompts" and not first.get("completion") else kind


def described_kind(kind: str) -> str:
    """The kind in words."""
    return _WORDS[kind]


def refuse_other_kinds(kind: str, trains_on: Sequence[str]) -> None:
    """Refuses rows that the stages of a recipe cannot train on.

    Args:
        kind: The kind of the rows.
        trains_on: The kinds that the recipe takes.

    Raises:
        DataError: If the kind is none of them.
    """
    if kind not in trains_on:
        raise DataError(
            f"the data are {_WORDS[kind]}, which this recipe cannot train on",
            expected=" or ".join(_WORDS[each] for each in trains_on),
            got=_WORDS[kind],
            fix=_FIXES[kind],
        )
