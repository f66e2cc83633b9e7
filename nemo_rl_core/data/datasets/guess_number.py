"""Generated rows of the number-guessing game."""

import json
import random

from nemo_rl_core.config.generated_data import GuessNumberData
from nemo_rl_core.games.guess_number import NumberGuess, best_guess, num_guesses
from nemo_rl_core.types import Row


def load(config: GuessNumberData, *, seed: int) -> tuple[list[Row], list[Row]]:
    """Generates rows with distinct bounds; order and secrets depend only on the seed.

    A row's metadata is `{"game": STATE, "max_turns": guesses of a binary search + spare_turns}`;
    its answer and completion are an optimal next guess. After an opening, the state is that after
    the last turn, and the prompt is the JSON of the turns so far.
    """
    generator = random.Random(seed)
    bounds = [
        (low, high)
        for low in range(config.max_number + 1)
        for high in range(low + config.min_range - 1, config.max_number + 1)
    ]
    sampled_bounds = generator.sample(bounds, config.num_train + config.num_validation)
    positions = [
        NumberGuess(generator.randint(low, high), low, high) for low, high in sampled_bounds
    ]
    train = [
        _row(position, _opening(position, generator, config.max_opening), config.spare_turns)
        for position in positions[: config.num_train]
    ]
    validation = positions[config.num_train :]
    return train, [_row(position, [], config.spare_turns) for position in validation]


def _opening(
    position: NumberGuess, generator: random.Random, max_opening: int
) -> list[tuple[int, NumberGuess]]:
    """Returns wrong guesses, each with the position after it."""
    played: list[tuple[int, NumberGuess]] = []
    for _ in range(generator.randint(0, max_opening) if max_opening else 0):
        wrong = [n for n in range(position.low, position.high + 1) if n != position.secret]
        if not wrong:
            break
        guess = generator.choice(wrong)
        reached = position.after(guess)
        assert reached is not None
        played.append((guess, reached))
        position = reached
    return played


def _row(start: NumberGuess, opening: list[tuple[int, NumberGuess]], spare_turns: int) -> Row:
    position = opening[-1][1] if opening else start
    low, high = position.low, position.high
    guess = str(best_guess(low, high))
    return {
        "id": start.text.removesuffix("="),
        "prompt": _prompt(start, opening),
        "answer": guess,
        "completion": guess,
        "task": "guess_number",
        "metadata": json.dumps(
            {"game": position.state, "max_turns": num_guesses(low, high) + spare_turns}
        ),
    }


def _prompt(start: NumberGuess, opening: list[tuple[int, NumberGuess]]) -> str:
    turns = [{"role": "user", "content": start.text}]
    for guess, reached in opening:
        turns.append({"role": "assistant", "content": str(guess)})
        turns.append({"role": "user", "content": reached.text})
    return json.dumps(turns) if opening else start.text
