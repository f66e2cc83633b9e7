"""Generated sliding puzzles, sampled from all positions within some moves of the solved one."""

import json
import random

from nemo_rl_core.config.generated_data import SlidingPuzzleData
from nemo_rl_core.errors import DataError
from nemo_rl_core.games.sliding_puzzle import SlidingPuzzle, best_move, distances
from nemo_rl_core.types import Row


def load(config: SlidingPuzzleData, *, seed: int) -> tuple[list[Row], list[Row]]:
    """Generates rows with distinct positions, in an order that depends only on the seed.

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
    rows = [_row(position, num_moves, config.spare_turns) for position in sampled]
    return rows[: config.num_train], rows[config.num_train :]


def _row(position: SlidingPuzzle, num_moves: dict[SlidingPuzzle, int], spare_turns: int) -> Row:
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
