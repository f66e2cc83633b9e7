"""Zebra puzzles need a solver; ours gives those that pycosat gave."""

import hashlib
import json
from itertools import product

from nemo_rl_core.games.reasoning_gym_library import load_reasoning_gym, models_of


def test_all_models_are_found() -> None:
    clauses = [[1, -2], [2, 3], [-1, -3, 4]]
    expected = {
        values
        for values in product([False, True], repeat=4)
        if all(any(values[abs(each) - 1] == (each > 0) for each in clause) for clause in clauses)
    }
    found = [tuple(each > 0 for each in model) for model in models_of(clauses)]
    assert len(found) == len(expected) == 6
    assert set(found) == expected


def test_puzzles_are_those_of_pycosat() -> None:
    """The digest was taken of reasoning-gym 0.1.25 with pycosat 0.6.6."""
    puzzles = load_reasoning_gym().create_dataset("zebra_puzzles", seed=3, size=12)
    rows = [(each["question"], each["answer"]) for each in puzzles]
    assert [answer for _, answer in rows[:4]] == ["arnold", "carol", "carol", "arnold"]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    assert digest == "396c334b6013e21dc8cda575ed569bd19089ccba93b300653e8e5da47a558687"
