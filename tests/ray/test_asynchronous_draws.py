"""Dynamic sampling ahead: the draws of later steps follow each other while a step is trained."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms import AsyncGRPOTrainer, GRPOTrainer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.errors import RewardError
from nemo_rl_core.models.generation.streaming import StreamingGeneration
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.trainers.callbacks import Callback
from nemo_rl_core.trainers.fitting import TrainResult
from nemo_rl_core.types import Rollout
from tests.training import Watch, assert_equal_weights, replay

pytestmark = pytest.mark.slow

NUM_STEPS = 4
ROWS = [{"prompt": f"{n}+{n % 7}=", "answer": str(n + n % 7)} for n in range(10, 34)]
SETTINGS: dict[str, Any] = {
    "cluster": {"num_threads": 1},
    "generation": {"max_new_tokens": 6, "kv_cache_gib": 1, "max_num_seqs": 64},
    "max_prompt_tokens": 16,
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 4,
    "num_steps_per_iteration": NUM_STEPS,
    "save_every_num_steps": 2,
    "learning_rate": 0.01,
    "loss": {"importance": {"kind": "truncated"}},
    "dynamic_sampling": {"max_draws": 4},
}


def seven(prompt: str, response: str) -> float:
    """Equal in many groups of a model with random weights."""
    return float("7" in response)


def fitted(model: Path, max_staleness: int | None, **options: Any) -> TrainResult:
    settings = {**SETTINGS, **options.pop("settings", {})}
    kind = GRPOTrainer if max_staleness is None else AsyncGRPOTrainer
    ahead = None if max_staleness is None else {"max_staleness": max_staleness}
    trainer = kind.from_pretrained(model, asynchronous=ahead, **settings)
    result: TrainResult = trainer.fit(ROWS, **{"reward_fn": seven, **options})
    return result


def recorded(result: TrainResult) -> list[list[Rollout]]:
    records = RolloutRecords(result.folder / "rollouts")
    return [records.load(step) for step in range(1, NUM_STEPS + 1)]


def asked_and_said(result: TrainResult) -> list[list[tuple[Any, ...]]]:
    return [
        [(each.prompt.id, each.group, each.completion.token_ids, each.reward) for each in rollouts]
        for rollouts in recorded(result)
    ]


@pytest.fixture(scope="module")
def by_turns(session: ClusterSession, tiny_model: Path) -> TrainResult:
    return fitted(tiny_model, None)


def test_without_staleness_the_draws_are_those_of_training_by_turns(
    by_turns: TrainResult, tiny_model: Path
) -> None:
    draws = [metrics["num_draws"] for metrics in by_turns.metrics]
    assert max(draws) > 1  # else it would show nothing
    in_step = fitted(tiny_model, 0)
    assert_equal_weights(in_step.folder, by_turns.folder)
    assert asked_and_said(in_step) == asked_and_said(by_turns)
    for ours, theirs in zip(in_step.metrics, by_turns.metrics, strict=True):
        for name in ("num_draws", "reward", "zero_variance_fraction", "num_valid_tokens", "loss"):
            assert ours[name] == theirs[name], name


def worker_pid(engine: StreamingGeneration) -> int:
    import ray

    worker = engine._workers._workers[0]
    return int(ray.get(worker.__ray_call__.remote(lambda _: os.getpid())))


class Faults(Callback):
    """The engine's worker is lost after step 1, and the run after step 3, past its save."""

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        if step == 1:
            os.kill(worker_pid(trainer.sampler.generation), signal.SIGKILL)
        if step == 3:
            raise RuntimeError("the run is lost")


def test_a_run_that_is_lost_and_resumed_is_the_undisturbed_one(
    by_turns: TrainResult, tiny_model: Path
) -> None:
    with pytest.raises(RuntimeError, match="the run is lost"):
        fitted(tiny_model, 0, callbacks=[Faults()], name="lost between draws")
    watch = Watch()
    result = fitted(tiny_model, 0, callbacks=[watch], name="lost between draws")
    assert watch.steps == [3, 4]
    assert [metrics["num_engine_restarts"] for metrics in result.metrics] == [0, 1, 0, 0]
    assert_equal_weights(result.folder, by_turns.folder)
    assert asked_and_said(result) == asked_and_said(by_turns)


def test_draws_ahead_are_as_old_as_allowed_and_are_replayed_to_the_bit(
    session: ClusterSession, tiny_model: Path, tmp_path: Path
) -> None:
    ahead = fitted(tiny_model, 2)
    draws = [metrics["num_draws"] for metrics in ahead.metrics]
    assert 1 < max(draws) <= 4
    for step, (rollouts, metrics) in enumerate(zip(recorded(ahead), ahead.metrics, strict=True), 1):
        groups: dict[int, set[float | None]] = {}
        for each in rollouts:
            groups.setdefault(each.group, set()).add(each.reward)
        assert 1 <= len(groups) <= 4
        assert all(rewards == {0.0, 1.0} for rewards in groups.values())
        assert max(groups) < 4 * metrics["num_draws"]
        versions = {v for each in rollouts for v in each.completion.weight_versions}
        assert step - 3 <= min(versions) <= max(versions) <= step - 1
        assert metrics["staleness_max"] <= 2
    trainer = AsyncGRPOTrainer.from_pretrained(
        "unused", asynchronous={"max_staleness": 2}, **SETTINGS
    )
    replay(trainer, ahead, ahead.folder / "rollouts", tmp_path / "work")
    assert_equal_weights(tmp_path / "work", ahead.folder)


class Hopeless:
    """Fails on step 3, which the engine samples while step 2 is trained."""

    def __init__(self) -> None:
        self.prompts: set[str] = set()

    def __call__(self, prompt: str, response: str) -> float:
        self.prompts.add(prompt)
        if len(self.prompts) > 8:  # two steps of four
            raise ValueError("no answer sheet")
        return float(len(response) + response.count("7"))


@pytest.mark.thorough
def test_a_step_whose_draw_cannot_be_scored_stops_the_run_when_it_comes(
    session: ClusterSession, tiny_model: Path
) -> None:
    watch = Watch()
    with pytest.raises(RewardError, match="16 of 16 rollouts could not be scored"):
        fitted(tiny_model, 1, reward_fn=Hopeless(), callbacks=[watch])
    assert watch.steps == [1, 2]


class Digits:
    """Two turns; the reward is that of `seven`, over both."""

    first_stop_strings = tuple("0123456789")

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        turns = [sum(each["role"] == "assistant" for each in log) for log in message_log_batch]
        said = ["".join(each["content"] for each in log[1:]) for log in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "+"}] * len(turns),
            metadata=list(metadata),
            next_stop_strings=[list(self.first_stop_strings)] * len(turns),
            rewards=torch.tensor(
                [float(turn == 2 and "7" in text) for turn, text in zip(turns, said, strict=True)]
            ),
            terminateds=torch.tensor([turn == 2 for turn in turns]),
        )

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {"rows": float(len(batch["rewards"]))}


@pytest.mark.thorough
def test_games_are_drawn_again_ahead_as_well(session: ClusterSession, tiny_model: Path) -> None:
    games = {"rollouts": {"max_turns": 4, "max_rollout_tokens": 24}}
    results = [
        fitted(tiny_model, each, reward_fn=Digits(), settings=games) for each in (None, 0, 1)
    ]
    assert max(metrics["num_draws"] for metrics in results[0].metrics) > 1
    assert_equal_weights(results[1].folder, results[0].folder)
    assert asked_and_said(results[1]) == asked_and_said(results[0])
    for result in results:
        # Of each draw by itself.
        assert [metrics["environment_rows"] for metrics in result.metrics] == [16.0] * NUM_STEPS
