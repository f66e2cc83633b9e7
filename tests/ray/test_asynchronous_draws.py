"""Dynamic sampling of asynchronous GRPO: draws of later steps continue during training."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms import AsyncGRPOTrainer, GRPOTrainer
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.errors import RewardError
from nemo_rl_core.models.generation.streaming import StreamingGeneration
from nemo_rl_core.rollouts.engine import CompletionRequest, joined_requests
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.trainers.callbacks import Callback
from nemo_rl_core.trainers.fit.fitting import TrainResult
from nemo_rl_core.types import Prompt, Rollout
from tests.ray.ahead import COMMON, NUM_STEPS, ROWS, worker_pid
from tests.training import Watch, assert_equal_weights, replay

pytestmark = pytest.mark.thorough

SETTINGS: dict[str, Any] = {
    **COMMON,
    "save_every_num_steps": 2,
    "dynamic_sampling": {"max_draws": 4},
}


def seven(prompt: str, response: str) -> float:
    """Often equal within a group of a model with random weights."""
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


def test_without_staleness_the_draws_equal_those_of_synchronous_training(
    by_turns: TrainResult, tiny_model: Path
) -> None:
    draws = [metrics["num_draws"] for metrics in by_turns.metrics]
    assert max(draws) > 1  # otherwise the test would show nothing
    in_step = fitted(tiny_model, 0)
    assert_equal_weights(in_step.folder, by_turns.folder)
    assert asked_and_said(in_step) == asked_and_said(by_turns)
    for ours, theirs in zip(in_step.metrics, by_turns.metrics, strict=True):
        for name in ("num_draws", "reward", "zero_variance_fraction", "num_valid_tokens", "loss"):
            assert ours[name] == theirs[name], name


class Faults(Callback):
    """Loses the engine's worker after step 1, and the run after step 3, past its save."""

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        if step == 1:
            os.kill(worker_pid(trainer.sampler.generation), signal.SIGKILL)
        if step == 3:
            raise RuntimeError("the run is lost")


def test_a_lost_and_resumed_run_equals_an_undisturbed_one(
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


def test_asynchronous_draws_are_as_old_as_allowed_and_replay_bitwise(
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


def test_a_step_with_a_failed_draw_stops_the_run_when_it_is_reached(
    session: ClusterSession, tiny_model: Path
) -> None:
    watch = Watch()
    with pytest.raises(RewardError, match="16 of 16 rollouts could not be scored"):
        fitted(tiny_model, 1, reward_fn=Hopeless(), callbacks=[watch])
    assert watch.steps == [1, 2]


class Busy(Callback):
    """Keeps the trainer busy for a second after each step."""

    def __init__(self) -> None:
        self.hours: list[tuple[float, float]] = []

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        began = time.monotonic()
        time.sleep(1)
        self.hours.append((began, time.monotonic()))


def test_rewards_are_computed_while_the_trainer_is_busy(
    session: ClusterSession, tiny_model: Path
) -> None:
    called_at: list[float] = []

    def slow_reward(prompts: list[str], responses: list[str]) -> list[float]:
        called_at.append(time.monotonic())
        time.sleep(0.1)
        return [float(len(each)) for each in responses]

    busy = Busy()
    settings = {"dynamic_sampling": None}
    fitted(tiny_model, 1, reward_fn=slow_reward, callbacks=[busy], settings=settings)
    calls = [sum(moment < end for moment in called_at) for _, end in busy.hours]
    # The rewards of step 3 follow step 2 or its recording; the last rewards follow step 3.
    assert calls[0] < calls[1] < calls[2] == calls[3]


def test_the_engine_has_its_requests_before_the_trainer_checks_its_weights(
    session: ClusterSession, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def noted(name: str) -> None:
        original = getattr(StreamingGeneration, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(StreamingGeneration, name, call)

    for name in ("_transfer_weights", "submit", "_checked"):
        noted(name)
    fitted(tiny_model, 0, settings={"dynamic_sampling": None})
    of_steps = ["_transfer_weights", "submit", "_checked"] * NUM_STEPS
    # Each transfer of a validation, here one at the end, is checked immediately.
    assert calls[: len(of_steps)] == of_steps
    assert calls[len(of_steps) :] in ([], ["_transfer_weights", "_checked"])


class Digits:
    """Two turns; the reward is `seven` over both."""

    first_stop_strings = tuple("0123456789")

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        turns = [sum(each["role"] == "assistant" for each in log) for log in message_log_batch]
        texts = ["".join(each["content"] for each in log[1:]) for log in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "+"}] * len(turns),
            metadata=list(metadata),
            next_stop_strings=[list(self.first_stop_strings)] * len(turns),
            rewards=torch.tensor(
                [float(turn == 2 and "7" in text) for turn, text in zip(turns, texts, strict=True)]
            ),
            terminateds=torch.tensor([turn == 2 for turn in turns]),
        )

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {"rows": float(len(batch["rewards"]))}


def test_dynamic_sampling_of_games_samples_ahead(session: ClusterSession, tiny_model: Path) -> None:
    games = {"rollouts": {"max_turns": 4, "max_rollout_tokens": 24}}
    results = [
        fitted(tiny_model, each, reward_fn=Digits(), settings=games) for each in (None, 0, 1)
    ]
    assert max(metrics["num_draws"] for metrics in results[0].metrics) > 1
    assert_equal_weights(results[1].folder, results[0].folder)
    assert asked_and_said(results[1]) == asked_and_said(results[0])
    for result in results:
        # Computed for each draw separately.
        assert [metrics["environment_rows"] for metrics in result.metrics] == [16.0] * NUM_STEPS


def test_requests_of_earlier_steps_come_first(
    session: ClusterSession, generation_setup: GenerationSetup, prompts: list[Prompt]
) -> None:
    config = generation_setup.config.model_copy(update={"max_num_seqs": 1, "max_new_tokens": 200})
    setup = replace(generation_setup, config=config, max_model_len=216, stop_token_ids=())
    engine = StreamingGeneration(session, setup)
    requests = joined_requests(
        [CompletionRequest(each.token_ids, seed=7) for each in prompts[:6]]
    ).batch()
    later, earlier = list(range(6)), [10, 11]
    engine.submit(later, BatchedDataDict({**requests, "priorities": torch.full((6,), 2)}))
    engine.submit(
        earlier, BatchedDataDict({**requests.slice(0, 2), "priorities": torch.full((2,), 1)})
    )
    order: list[int] = []
    while len(order) < 8:
        order += [name for name, _ in engine.poll(wait_seconds=1.0)]
    assert [name for name in order if name in later] == later
    assert [name for name in order if name in earlier] == earlier
    assert order.index(11) < order.index(5)  # in order of arrival it would be the last
