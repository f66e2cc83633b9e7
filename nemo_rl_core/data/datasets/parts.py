"""Training and validation rows of a source, and rows that are held out for validation."""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nemo_rl_core.data.chunks import select_rows
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recognized:
    """Rows in the format of their kind, and the description of the recognized format."""

    rows: Sequence[Row]
    read_as: str


@dataclass(frozen=True)
class Parts:
    """Rows of a source.

    Attributes:
        train: Rows to train on.
        validation: Rows that are never trained on; None if the source has none.
        read_as: Description of the recognized format; empty for generated rows.
    """

    train: Sequence[Row]
    validation: Sequence[Row] | None
    read_as: str = ""


def without_validation(rows: Recognized, *, fraction: float, seed: int, where: str) -> Parts:
    """Splits a source without validation rows: a seeded share is held out for validation."""
    mask = held_out_mask(rows.rows, fraction=fraction, seed=seed, where=where)
    return Parts(select_rows(rows.rows, ~mask), select_rows(rows.rows, mask), rows.read_as)


def held_out_mask(
    rows: Sequence[Row], *, fraction: float, seed: int, where: str
) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Returns a boolean mask `[N]` of a seeded fraction of the rows to hold out.

    Rows with the same prompt stay together, so that no training prompt is in the validation rows.

    Args:
        fraction: Fraction of prompts to hold out, in (0, 1); at least one prompt is on each side.
    """
    # The checks of rows import torch, which is not needed to load a recipe.
    import numpy as np

    from nemo_rl_core.data.checks import prompts_of
    from nemo_rl_core.data.digests import first_rows

    first = first_rows(rows, prompts_of)
    # The first row with a prompt identifies it; prompts are numbered in this order.
    first_indices = np.flatnonzero(first == np.arange(len(first)))
    num_prompts = len(first_indices)
    if num_prompts < 2:
        raise DataError(
            f"{where} has too few rows to hold some out for validation",
            expected="at least 2 different prompts",
            got=str(num_prompts),
            fix="provide validation data, or more rows",
        )
    count = min(max(round(fraction * num_prompts), 1), num_prompts - 1)
    # A string seed is hashed with SHA-512, like the seed of the row order.
    drawn = random.Random(f"{seed}/held out").sample(range(num_prompts), count)
    is_first_of_held_out = np.zeros(len(first), dtype=bool)
    is_first_of_held_out[first_indices[np.array(drawn, dtype=np.int64)]] = True
    is_held_out = np.asarray(is_first_of_held_out[first], dtype=bool)
    logger.warning(
        "%s: %d of %d rows are held out for validation (seed %d)",
        where,
        int(is_held_out.sum()),
        len(rows),
        seed,
    )
    return is_held_out
