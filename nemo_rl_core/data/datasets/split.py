"""Selection of held-out validation rows."""

import logging
import random
from collections.abc import Sequence

from nemo_rl_core.data.checks import prompt_of
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

logger = logging.getLogger(__name__)


def hold_out(rows: Sequence[Row], *, fraction: float, seed: int, where: str) -> list[int]:
    """Returns the sorted indices of a seeded fraction of the rows.

    Rows with the same prompt stay together, so that no training prompt is in the validation rows.

    Args:
        rows: Rows with at least two distinct prompts.
        fraction: Fraction of prompts to hold out, in (0, 1); at least one prompt is on each side.
        seed: For the random choice.
        where: Name of the source in messages.

    Raises:
        DataError: When there are fewer than two different prompts.
    """
    asked = [prompt_of(row) for row in rows]
    prompts = list(dict.fromkeys(asked))
    if len(prompts) < 2:
        raise DataError(
            f"{where} has too few rows to hold some out for validation",
            expected="at least 2 different prompts",
            got=str(len(prompts)),
            fix="give validation data, or more rows",
        )
    count = min(max(round(fraction * len(prompts)), 1), len(prompts) - 1)
    # A string seed is hashed with SHA-512, as for the order of the rows.
    chosen = set(random.Random(f"{seed}/held out").sample(prompts, count))
    indices = [index for index, prompt in enumerate(asked) if prompt in chosen]
    logger.warning(
        "%s: %d of %d rows are held out for validation (seed %d)",
        where,
        len(indices),
        len(rows),
        seed,
    )
    return indices
