"""Selection of held-out validation rows."""

import logging
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_rl_core.data.checks import prompts_of
from nemo_rl_core.data.digests import first_rows, hashes_of_rows
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

logger = logging.getLogger(__name__)


def hold_out(rows: Sequence[Row], *, fraction: float, seed: int, where: str) -> list[int]:
    """Returns the sorted indices of a seeded fraction of the rows; see `held_out_mask`."""
    is_held = held_out_mask(rows, fraction=fraction, seed=seed, where=where)
    return [int(index) for index in np.flatnonzero(is_held)]


def held_out_mask(
    rows: Sequence[Row], *, fraction: float, seed: int, where: str
) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Returns which rows `[N]` are held out: a seeded fraction of them.

    Rows with the same prompt stay together, so that no training prompt is in the validation rows.

    Args:
        rows: Rows with at least two distinct prompts.
        fraction: Fraction of prompts to hold out, in (0, 1); at least one prompt is on each side.
        seed: For the random choice.
        where: Name of the source in messages.

    Raises:
        DataError: When there are fewer than two different prompts.
    """
    first = first_rows(rows, prompts_of, hashes_of_rows(rows, prompts_of))
    # A prompt is known by the first row that asks it, and prompts count in that order.
    asked_first = np.flatnonzero(first == np.arange(len(first)))
    num_prompts = len(asked_first)
    if num_prompts < 2:
        raise DataError(
            f"{where} has too few rows to hold some out for validation",
            expected="at least 2 different prompts",
            got=str(num_prompts),
            fix="give validation data, or more rows",
        )
    count = min(max(round(fraction * num_prompts), 1), num_prompts - 1)
    # A string seed is hashed with SHA-512, as for the order of the rows.
    drawn = random.Random(f"{seed}/held out").sample(range(num_prompts), count)
    is_held = np.zeros(len(first), dtype=bool)
    is_held[asked_first[np.array(drawn, dtype=np.int64)]] = True
    is_held = np.asarray(is_held[first])
    logger.warning(
        "%s: %d of %d rows are held out for validation (seed %d)",
        where,
        int(is_held.sum()),
        len(rows),
        seed,
    )
    return np.asarray(is_held, dtype=bool)
