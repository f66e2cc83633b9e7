"""The rows of a source, and what they were taken for."""

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_core.data.chunks import taken
from nemo_rl_core.types import Row


@dataclass(frozen=True)
class Parts:
    """The rows of a source.

    Attributes:
        train: Rows to train on.
        validation: Rows that are never trained on; None if the source has none.
        read_as: What the columns were taken for; empty for generated rows.
    """

    train: Sequence[Row]
    validation: Sequence[Row] | None
    read_as: str = ""


def without_validation(parts: Parts, *, fraction: float, seed: int, where: str) -> Parts:
    """Parts with a seeded share of the training rows held out for validation.

    Raises:
        DataError: When there are fewer than two different prompts.
    """
    # The checks of rows import torch's collation, which a recipe's load does not need.
    from nemo_rl_core.data.datasets.split import held_out_mask

    is_held = held_out_mask(parts.train, fraction=fraction, seed=seed, where=where)
    return Parts(taken(parts.train, ~is_held), taken(parts.train, is_held), parts.read_as)
