"""Recipes with data and code of users, each run with one command.

The table of all stories is in tests/reference/README.md.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from nemo_rl_core.rollouts.records import RolloutRecords

Run = Any

REWARD = '''
def correct(completion, answer):
    """1 for the answer of the row, and a little for a short completion."""
    return 1.0 if completion.strip() == answer else 1.0 / (10 + len(completion))
'''


@pytest.mark.thorough
def test_gsm8k_with_a_reward_that_needs_the_answer(
    recipe: dict[str, Any],
    run_recipe: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, operands in (("train", range(1, 9)), ("test", range(11, 13))):
        rows = [
            {"question": f"{a}+{b}=", "answer": f"<<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"}
            for a in operands
            for b in range(1, 9)
        ]
        pd.DataFrame(rows).to_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "my_rewards.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    story = {
        "model": recipe["model"],
        "cluster": recipe["cluster"],
        "generation": recipe["generation"],
        "sft": None,
        "data": {
            "kind": "file",
            "train": str(tmp_path / "train.parquet"),
            "validation": str(tmp_path / "test.parquet"),
            "max_prompt_tokens": 16,
        },
        "environment": {"kind": "function", "target": "my_rewards:correct"},
        "grpo": {**recipe["grpo"], "num_iterations": 1, "num_steps_per_iteration": 2},
        "evaluation": {"num_samples_per_prompt": 1, "environment": {"kind": "exact"}},
    }
    finished = run_recipe(story, tmp_path / "store")
    assert finished.exit_code == 0, finished.output[-3000:]
    (folder,) = (finished.store / "artifacts").glob("grpo_iteration-*")
    assert json.loads((folder / "manifest.json").read_text())["config"]["reward_content"]
    correct: dict[str, Any] = {}
    exec(REWARD, correct)
    for rollout in RolloutRecords(folder / "rollouts").load(1):
        answer = str(sum(int(each) for each in rollout.prompt.text.rstrip("=").split("+")))
        assert rollout.prompt.answer == answer
        assert rollout.reward == pytest.approx(correct["correct"](rollout.text, answer))
