"""Preference pairs and their reference logprobs, as files of a data set."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from nemo_rl_core.data.lengths import refuse_longer
from nemo_rl_core.data.loader import load_records, save_frame
from nemo_rl_core.data.loss_masks import SupervisedExample
from nemo_rl_core.data.pairs import PreferencePair, tokenized_pairs
from nemo_rl_core.data.pretrained import load_tokenizer, pair_length
from nemo_rl_core.errors import DataError


def save_pairs(pairs: Sequence[PreferencePair], folder: Path) -> None:
    """Writes a folder of pairs; equal pairs give equal bytes."""
    frame = pd.DataFrame(
        [
            {
                "id": pair.id,
                "chosen_token_ids": list(pair.chosen.token_ids),
                "chosen_loss_mask": list(pair.chosen.loss_mask),
                "rejected_token_ids": list(pair.rejected.token_ids),
                "rejected_loss_mask": list(pair.rejected.loss_mask),
                "margin": pair.margin,
            }
            for pair in pairs
        ]
    )
    save_frame(frame, folder)


def load_pairs(
    folder: Path, tokenizer: Any, *, reference_logprobs: Path | None = None
) -> list[PreferencePair]:
    """Loads the pairs of a folder, from tokens or from text.

    Args:
        folder: A folder that `save_pairs` wrote, or a data set folder of preferences.
        reference_logprobs: A folder that `save_logprobs` wrote for the same pairs, or None.
    """
    rows = load_records(folder)
    if rows and "chosen_token_ids" in rows[0]:
        pairs = [
            PreferencePair(
                row["id"], _stored(row, "chosen"), _stored(row, "rejected"), row["margin"]
            )
            for row in rows
        ]
    else:
        pairs = tokenized_pairs(folder, tokenizer)
    return pairs if reference_logprobs is None else _with_logprobs(pairs, reference_logprobs)


def load_pairs_for(
    model_folder: Path, folder: Path, *, name: str, reference_logprobs: Path | None = None
) -> list[PreferencePair]:
    """Loads the pairs that a model is trained or validated on."""
    tokenizer = load_tokenizer(model_folder)
    pairs = load_pairs(folder, tokenizer, reference_logprobs=reference_logprobs)
    lengths = (max(len(pair.chosen.token_ids), len(pair.rejected.token_ids)) for pair in pairs)
    refuse_longer(lengths, pair_length(model_folder), name=name)
    return pairs


def _stored(row: dict[str, Any], side: str) -> SupervisedExample:
    return SupervisedExample(
        token_ids=tuple(int(token) for token in row[f"{side}_token_ids"]),
        loss_mask=tuple(bool(trained) for trained in row[f"{side}_loss_mask"]),
    )


def save_logprobs(pairs: Sequence[PreferencePair], folder: Path) -> None:
    """Writes the reference logprobs of pairs; all pairs must have them."""
    rows = []
    for pair in pairs:
        assert pair.reference_logprobs is not None, f"pair {pair.id} has no reference logprobs"
        chosen, rejected = pair.reference_logprobs
        rows.append({"id": pair.id, "chosen": list(chosen), "rejected": list(rejected)})
    save_frame(pd.DataFrame(rows), folder)


def _with_logprobs(pairs: Sequence[PreferencePair], folder: Path) -> list[PreferencePair]:
    rows = load_records(folder)
    if [row["id"] for row in rows] != [pair.id for pair in pairs]:
        raise DataError(
            "the cached reference logprobs belong to other pairs",
            expected=f"the ids of {len(pairs)} pairs, in the same order",
            got=f"{len(rows)} rows",
            fix="compute them again for these pairs",
        )
    return [
        replace(
            pair,
            reference_logprobs=(
                tuple(map(float, row["chosen"])),
                tuple(map(float, row["rejected"])),
            ),
        )
        for pair, row in zip(pairs, rows, strict=True)
    ]
