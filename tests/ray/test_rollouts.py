"""Rollouts from their start to the weights: several turns, failures, and a replay."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms import GRPOTrainer, PPOTrainer, SFTTrainer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.environments.rewards.retries import count_retries
from nemo_rl_core.rollouts.batch import valid_rollouts
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.trainers.fit.fitting import TrainResult
from nemo_rl_core.types import Rollout
from tests.training import assert_equal_weights, replay

OFFLINE = {"cluster": {"num_threads": 1}, "save_every_num_steps": 9, "learning_rate": 0.01}
# The same as in conftest.py, so that all tests share one engine.
ONLINE = {
    **OFFLINE,
    "generation": {"max_new_tokens": 6, "kv_cache_gib": 1, "max_num_seqs": 64},
    "max_prompt_tokens": 16,
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 4,
}
PROMPTS = [{"prompt": f"{n}=", "answer": str(n)} for n in range(10, 34)]


class Countdown:
    """The policy writes one digit per turn; the environment answers with the rest of the answer.

    Small digits earn most, and a 9 cannot be scored.
    """

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any]) -> EnvironmentReturn:
        texts = [log[-1]["content"][:1] for log in message_log_batch]
        digits = [int(text) if text.isdigit() else 0 for text in texts]
        left = [int(m["answer"]) - digit for m, digit in zip(metadata, digits, strict=True)]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"{n % 10}="} for n in left],
            metadata=[{"answer": str(number)} for number in left],
            next_stop_strings=[None] * len(left),
            rewards=torch.tensor([1 - digit / 10 for digit in digits]),
            terminateds=torch.tensor([number % 7 == 0 for number in left]),
            errors=["nine" if digit == 9 else None for digit in digits],
        )

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        assert len(batch["completions"]) == len(batch["num_turns"])
        return batch, {"nothing_won": float((batch["rewards"] == 0).float().mean())}


def sometimes(prompt: str, response: str) -> float:
    """Fails for about a quarter of the completions of random weights."""
    if "7" in response:
        raise LookupError("no sevens")
    return float(len(response))


@pytest.fixture(scope="module")
def speaker(session: ClusterSession, tiny_model: Path) -> Path:
    """The tiny model after learning to write one digit at a time."""
    rows = [{"prompt": f"{n}=", "completion": str(n * 7 % 9)} for n in range(100)]
    settings = {"num_steps": 12, "global_batch_size": 16, **OFFLINE}
    return SFTTrainer.from_pretrained(tiny_model, **settings).fit(rows).checkpoint


@pytest.fixture(scope="module")
def game(session: ClusterSession, speaker: Path) -> TrainResult:
    trainer = GRPOTrainer.from_pretrained(
        speaker, num_steps_per_iteration=2, max_failed_fraction=0.5, **ONLINE
    )
    return trainer.fit(PROMPTS, reward_fn=Countdown())


@pytest.fixture(scope="module")
def failing(session: ClusterSession, tiny_model: Path) -> TrainResult:
    trainer = GRPOTrainer.from_pretrained(
        tiny_model, num_steps_per_iteration=2, max_failed_fraction=0.8, **ONLINE
    )
    return trainer.fit(PROMPTS, reward_fn=sometimes)


def recorded(result: TrainResult) -> RolloutRecords:
    return RolloutRecords(result.folder / "rollouts")


def without(metrics: dict[str, float], *names: str) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in names}


def test_turns_are_played_and_masked_and_pass_the_gate(game: TrainResult) -> None:
    rollouts = [each for step in (1, 2) for each in recorded(game).load(step)]
    several = [each for each in rollouts if each.completion.generated]
    assert len(several) > len(rollouts) / 4
    for each in several:
        by_policy = each.completion.token_mask
        # Turns of the policy alternate with two characters of the environment.
        runs = [(is_own, len(list(run))) for is_own, run in groupby(by_policy)]
        assert runs[0][0] and runs[-1][0]
        assert all(length == 2 for is_own, length in runs if not is_own)
        pairs = list(zip(each.completion.logprobs, by_policy, strict=True))
        assert all(value == 0 for value, is_own in pairs if not is_own)
        assert all(value < 0 for value, is_own in pairs if is_own)
        if each.error is None:
            assert sum(each.turn_rewards) == each.reward
    for metrics in game.metrics:
        assert metrics["token_mult_prob_error"] < 1.001
        assert metrics["num_turns"] > 1.2
    for step, metrics in enumerate(game.metrics, start=1):
        rewards = [each.reward for each in valid_rollouts(recorded(game).load(step))]
        expected = sum(reward == 0 for reward in rewards) / len(rewards)
        assert metrics["environment_nothing_won"] == pytest.approx(expected)
        assert 0.9 < metrics["sampling_importance_ratio"] < 1.1


def test_tokens_of_the_environment_do_not_enter_the_loss(game: TrainResult) -> None:
    rollouts = valid_rollouts(recorded(game).load(1))
    assert game.metrics[0]["num_valid_tokens"] == sum(
        sum(each.completion.token_mask) for each in rollouts
    )
    assert game.metrics[0]["loss"] == pytest.approx(first_loss(rollouts), abs=1e-5)


def first_loss(rollouts: Sequence[Rollout]) -> float:
    """Computes by hand: with new weights the ratio is 1, so each policy token adds its advantage.

    The reference is the policy itself, so the penalty is zero.
    """
    groups: dict[int, list[float]] = {}
    for each in rollouts:
        groups.setdefault(each.group, []).append(each.reward)
    total = count = 0.0
    for each in rollouts:
        rewards = groups[each.group]
        spread = statistics.stdev(rewards) if len(set(rewards)) > 1 else math.inf
        length = sum(each.completion.token_mask)
        total += length * (each.reward - statistics.mean(rewards)) / (spread + 1e-6)
        count += length
    return -total / count


def test_failures_are_counted_and_change_nothing_else(failing: TrainResult, tmp_path: Path) -> None:
    rollouts = recorded(failing).load(1)
    failed = [each for each in rollouts if each.error is not None]
    assert 0 < len(failed) < len(rollouts) == 16
    assert all("7" in each.text and "no sevens" in each.error for each in failed)
    metrics = failing.metrics[0]
    assert metrics["environment_mean_reward"] == metrics["reward"]
    assert metrics["num_failed_rollouts"] == len(failed)
    assert metrics["failed_fraction"] == len(failed) / 16
    counted = valid_rollouts(rollouts)
    assert metrics["reward"] == pytest.approx(statistics.mean(each.reward for each in counted))
    assert metrics["loss"] == pytest.approx(first_loss(counted), abs=1e-5)
    # As if they had never existed: the others give the same weights.
    others = RolloutRecords(tmp_path / "others")
    for step in (1, 2):
        others.save(
            step,
            valid_rollouts(recorded(failing).load(step)),
            environment_metrics=recorded(failing).environment_metrics(step),
        )
    trainer = GRPOTrainer.from_pretrained("unused", num_steps_per_iteration=2, **ONLINE)
    seen = replay(trainer, failing, others.folder, tmp_path / "work")
    ignored = ("global_step", "num_failed_rollouts", "failed_fraction")
    assert [without(m, *ignored) for m in seen] == [without(m, *ignored) for m in failing.metrics]
    assert_equal_weights(tmp_path / "work", failing.folder)


def test_a_replay_gives_the_same_weights_and_records(game: TrainResult, tmp_path: Path) -> None:
    settings = {"num_steps_per_iteration": 2, "max_failed_fraction": 0.5, **ONLINE}
    trainer = GRPOTrainer.from_pretrained("unused", **settings)
    count_retries(1)  # of another run in this process
    seen = replay(trainer, game, recorded(game).folder, tmp_path / "work")
    assert seen == [without(metrics, "global_step") for metrics in game.metrics]
    assert_equal_weights(tmp_path / "work", game.folder)
    again = RolloutRecords(tmp_path / "work" / "rollouts")
    assert [again.load(step) for step in (1, 2)] == [recorded(game).load(step) for step in (1, 2)]


class OldLogprobsFirst(GRPOTrainer):
    """Computes old logprobs in a separate pass, as needed for several optimizer steps."""

    algorithm = "grpo"

    def _updates_once(self, batch: BatchedDataDict) -> bool:
        return False


@pytest.mark.parametrize("is_off", [False, True], ids=["agreed", "one masked"])
def test_old_logprobs_of_the_step_equal_those_of_a_separate_pass(
    game: TrainResult, tmp_path: Path, is_off: bool
) -> None:
    records = RolloutRecords(tmp_path / "records")
    for step in (1, 2):
        rollouts = recorded(game).load(step)
        if is_off:  # far from the trainer's logprobs, beyond the gate's bound
            first = next(n for n, each in enumerate(rollouts) if each.error is None)
            completion = rollouts[first].completion
            wrong = replace(completion, logprobs=tuple(each - 9 for each in completion.logprobs))
            rollouts[first] = replace(rollouts[first], completion=wrong)
        environment = recorded(game).environment_metrics(step)
        records.save(step, rollouts, environment_metrics=environment)
    settings = {
        "num_steps_per_iteration": 2,
        "max_failed_fraction": 0.5,
        # From the second step, the weights differ from those that sampled.
        "gate": {"max_token_mult_prob_error": 100, "max_sequence_mult_prob_error": 1000},
        "advantage": {"kind": "reinforce_plus_plus"},
        **ONLINE,
    }
    seen = {}
    for trainer in (GRPOTrainer, OldLogprobsFirst):
        made = trainer.from_pretrained("unused", **settings)
        seen[trainer] = replay(made, game, records.folder, tmp_path / trainer.__name__)
    assert [each["num_inconsistent_sequences"] for each in seen[GRPOTrainer]] == [is_off] * 2
    for ours, theirs in zip(*seen.values(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert_equal_weights(tmp_path / "GRPOTrainer", tmp_path / "OldLogprobsFirst")


@pytest.mark.thorough
def test_ppo_learns_from_turns_and_is_replayed(
    session: ClusterSession, speaker: Path, tmp_path: Path
) -> None:
    settings = {"num_steps_per_iteration": 2, "max_failed_fraction": 0.5, **ONLINE}
    result = PPOTrainer.from_pretrained(speaker, **settings).fit(PROMPTS, reward_fn=Countdown())
    assert all(metrics["token_mult_prob_error"] < 1.001 for metrics in result.metrics)
    assert result.metrics[0]["num_turns"] > 1.2
    trainer = PPOTrainer.from_pretrained("unused", **settings)
    replay(trainer, result, recorded(result).folder, tmp_path / "work")
    assert_equal_weights(tmp_path / "work", result.folder)
