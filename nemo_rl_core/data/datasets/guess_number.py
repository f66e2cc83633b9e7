"""Numbers to guess, each between bounds of its own."""

import json
import random

from nemo_rl_core.config.data import GuessNumberData
from nemo_rl_core.games.guess_number import NumberGuess, best_guess, num_guesses
from nemo_rl_core.types import Row


def load(config: GuessNumberData, *, seed: int) -> tuple[list[Row], list[Row]]:
    """Different bounds, in an order that depends on the seed alone, as do the secrets.

    A row's metadata is `{"game": STATE, "num_turns": guesses of a binary search + spare_turns}`;
    its answer and completion are an optimal first guess.
    """
    generator = random.Random(seed)
    bounds = [
        (low, high)
        for low in range(config.max_number + 1)
        for high in range(low + config.min_range - 1, config.max_number + 1)
    ]
    drawn = generator.sample(bounds, config.num_train + config.num_validation)
    positions = [NumberGuess(generator.randint(low, high), low, high) for low, high in drawn]
    rows = [_row(position, config.spare_turns) for position in positions]
    return rows[: config.num_train], rows[config.num_train :]


def _row(position: NumberGuess, spare_turns: int) -> Row:
    low, high = position.low, position.high
    guess = str(best_guess(low, high))
    return {
        "id": f"{low}-{high}",
        "prompt": position.text,
        "answer": guess,
        "completion": guess,
        "task": "guess_number",
        "metadata": json.dumps(
            {"game": position.state, "num_turns": num_guesses(low, high) + spare_turns}
        ),
    }
