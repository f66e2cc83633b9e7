"""Generated rows: sums of two numbers, games, and reasoning tasks from a separate process."""

import json
import os
import random
import subprocess
import sys

from nemo_rl_core.config.generated_data import (
    ArithmeticData,
    GuessNumberData,
    ReasoningGymData,
    SlidingPuzzleData,
)
from nemo_rl_core.errors import DataError
from nemo_rl_core.games.guess_number import NumberGuess, best_guess, num_guesses
from nemo_rl_core.games.sliding_puzzle import SlidingPuzzle, best_move, distances
from nemo_rl_core.types import Row


def arithmetic_rows(config: ArithmeticData, *, seed: int) -> tuple[list[Row], list[Row]]:
    """Returns distinct problems, in an order that depends only on the seed."""
    size = config.max_operand + 1
    total = config.num_train + config.num_validation
    problems = random.Random(seed).sample(range(size * size), total)
    rows = [_arithmetic_row(*divmod(problem, size)) for problem in problems]
    return rows[: config.num_train], rows[config.num_train :]


def _arithmetic_row(left: int, right: int) -> Row:
    answer = str(left + right)
    return {
        "id": f"{left}+{right}",
        "prompt": f"{left}+{right}=",
        "answer": answer,
        "completion": answer,
        "task": "arithmetic",
        "metadata": "{}",
    }


def sliding_puzzle_rows(config: SlidingPuzzleData, *, seed: int) -> tuple[list[Row], list[Row]]:
    """Samples distinct positions near the solved one, in an order that depends only on the seed.

    A row's metadata is `{"game": STATE, "max_turns": fewest moves + spare_turns}`; its answer and
    completion are an optimal first move.
    """
    num_moves = distances(config.num_rows, config.num_columns, max_moves=config.max_moves)
    unsolved = [position for position, moves in num_moves.items() if moves]
    total = config.num_train + config.num_validation
    if total > len(unsolved):
        raise DataError(
            f"there are not enough sliding puzzles of {config.size}",
            expected=f"num_train + num_validation of at most {len(unsolved)}, the number of "
            f"positions at most {config.max_moves} moves from the solved one",
            got=f"{config.num_train} + {config.num_validation}",
            fix="request fewer rows, or raise data.max_moves or data.size",
        )
    sampled = random.Random(seed).sample(unsolved, total)
    rows = [_sliding_puzzle_row(position, num_moves, config.spare_turns) for position in sampled]
    return rows[: config.num_train], rows[config.num_train :]


def _sliding_puzzle_row(
    position: SlidingPuzzle, num_moves: dict[SlidingPuzzle, int], spare_turns: int
) -> Row:
    move = str(best_move(position, num_moves))
    return {
        "id": position.text.removesuffix("="),
        "prompt": position.text,
        "answer": move,
        "completion": move,
        "task": "sliding_puzzle",
        "metadata": json.dumps(
            {"game": position.state, "max_turns": num_moves[position] + spare_turns}
        ),
    }


def guess_number_rows(config: GuessNumberData, *, seed: int) -> tuple[list[Row], list[Row]]:
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
        _guess_number_row(
            position, _opening(position, generator, config.max_opening), config.spare_turns
        )
        for position in positions[: config.num_train]
    ]
    validation = positions[config.num_train :]
    return train, [_guess_number_row(position, [], config.spare_turns) for position in validation]


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


def _guess_number_row(
    start: NumberGuess, opening: list[tuple[int, NumberGuess]], spare_turns: int
) -> Row:
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


def reasoning_gym_rows(config: ReasoningGymData, *, seed: int) -> tuple[list[Row], list[Row]]:
    """Samples distinct questions of every task, in equal parts and interleaved.

    They are sampled in a separate process: several tasks iterate over sets of strings, so their
    questions depend on the interpreter's hash seed (word_ladder, isomorphic_strings, ransom_note
    ...). A seed must give the same rows in every run, and the hash seed can only be set when a
    process starts.

    Returns:
        Training rows and validation rows. `metadata` is JSON with `task`, `options` and `entry`,
        from which `environments.rewards.reasoning_gym` calls the task's scorer.
    """
    search_path = os.pathsep.join(path or os.curdir for path in sys.path)
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "nemo_rl_core.data.datasets.reasoning_gym_draw"],
        input=json.dumps({"config": config.model_dump(), "seed": seed}),
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": search_path},
        check=False,
    )
    if child.returncode:
        raise DataError(
            "the process that samples reasoning-gym questions died",
            got=f"exit code {child.returncode}: {(child.stderr.strip() or 'no output')[-200:]}",
            fix="try the tasks of data.tasks one by one; a negative code -9 means out of memory",
        )
    result = json.loads(child.stdout)
    if "error" in result:
        raise DataError(*result["error"])
    train, validation = result["rows"]
    return train, validation
