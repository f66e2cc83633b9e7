"""Which rows are held out for validation."""

import logging
import random
from collections.abc import Sequence

from nemo_rl_core.data.checks import asked
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

logger = logging.getLogger(__name__)


def hold_out(rows: Sequence[Row], *, fraction: float, seed: int, where: str) -> list[int]:
    """The places of a seeded share of the rows, sorted.

    Rows with the same prompt stay together, so that nothing asked in training is asked again.

    Args:
        rows: With at least two different prompts.
        fraction: Of the prompts that are held out, in (0, 1); at least one is, and one is not.
        seed: Of the draw.
        where: What to call the source in messages.

    Raises:
        DataError: When there are fewer than two different prompts.
    """
    prompts = list(dict.fromkeys(asked(row) for row in rows))
    if len(prompts) < 2:
        raise DataError(
            f"{where} has too few rows to hold some out for validation",
            expected="at least 2 different prompts",
            got=str(len(prompts)),
            fix="give validation data, or more rows",
        )
    count = min(max(round(fraction * len(prompts)), 1), len(prompts) - 1)
    # A text is hashed with SHA-512 first, as for the order of the rows.
    chosen = set(random.Random(f"{seed}/held out").sample(prompts, count))
    places = [place for place, row in enumerate(rows) if asked(row) in chosen]
    logger.warning(
        "%s: %d of %d rows are held out for validation (seed %d)",
        where,
        len(places),
        len(rows),
        seed,
    )
    return places
