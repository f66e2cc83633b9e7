"""Custom rewards and environments on real workers."""

import asyncio
from typing import Any

import pandas as pd
import pytest

from nemo_rl_core.algorithms import GRPOTrainer
from nemo_rl_core.rollouts.records import RolloutRecords

# The same as in conftest.py, so that all tests share one engine.
SETTINGS = {
    "cluster": {"num_threads": 1},
    "save_every_num_steps": 9,
    "generation": {"max_new_tokens": 6, "kv_cache_gib": 1, "max_num_seqs": 64},
    "max_prompt_tokens": 16,
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 2,
    "num_steps_per_iteration": 1,
}
pytestmark = pytest.mark.thorough


async def length(completion: str) -> float:
    await asyncio.sleep(0)
    return float(len(completion))


def even_rows(prompts, completions, number, **columns):
    """A reward with TRL's signature; returns None for rows with an odd number."""
    return [1.0 if each % 2 == 0 else None for each in number]


def test_prompts_only_with_several_weighted_functions(session: Any, tiny_model: Any) -> None:
    rows = [{"prompt": f"{n}+1=", "metadata": {"number": n}} for n in range(9)]
    result = GRPOTrainer.from_pretrained(tiny_model, **SETTINGS).fit(
        rows, reward_fn=[length, even_rows], reward_weights=[0.5, 2.0]
    )
    (metrics,) = result.metrics
    assert metrics["environment_even_rows"] == 1.0
    rollouts = pd.read_parquet(result.folder / "rollouts" / "step_000001.parquet")
    for row in rollouts.to_dict("records"):
        is_even = int(row["prompt"][0]) % 2 == 0
        assert row["reward"] == 0.5 * len(row["completion"]) + 2.0 * is_even
        assert pd.isna(row["components"][1]) is not is_even
    lengths = [len(text) for text in rollouts["completion"]]
    assert metrics["environment_length"] == pytest.approx(sum(lengths) / len(lengths))


def test_a_custom_environment_plays_two_turns_in_actors(session: Any, tiny_model: Any) -> None:
    trainer = GRPOTrainer.from_pretrained(
        tiny_model,
        **SETTINGS,
        environment={
            "kind": "python",
            "target": "tests.custom_environments:SumTool",
            "arguments": {"unit": "+", "wrong": 0.25},
        },
        environment_workers={"num_workers": 1},
        rollouts={"max_turns": 3, "max_rollout_tokens": 40},
    )
    result = trainer.fit([{"prompt": f"{n}=", "answer": str(n)} for n in range(9)])
    rollouts = RolloutRecords(result.folder / "rollouts").load(1)
    for rollout in rollouts:
        first, second = rollout.turn_rewards
        assert (first, second in (0.25, 1.0)) == (0.0, True)
        roles, texts = (
            tuple(each[key] for each in rollout.messages[:4]) for key in ("role", "content")
        )
        assert roles == ("user", "assistant", "environment", "assistant")
        assert texts[2] == f"{sum(int(each) for each in texts[1] if each.isdigit())}+"
    assert "environment_right_fraction" in result.metrics[0]
