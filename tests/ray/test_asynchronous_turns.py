"""Asynchronous GRPO of conversations whose tokens stay with the engines."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms import AsyncGRPOTrainer, GRPOTrainer
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.models.generation.streaming import StreamingGeneration
from nemo_rl_core.rollouts.episode import Bounds
from nemo_rl_core.rollouts.multi_turn import MultiTurnRollouts
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.rollouts.stream import RolloutStream
from nemo_rl_core.trainers.fit.fitting import TrainResult
from nemo_rl_core.types import Prompt
from tests.conversations import ROOM, Chat
from tests.ray.ahead import COMMON, LONG, NUM_STEPS, ROWS, worker_pid
from tests.training import assert_equal_weights, replay
from tests.unit.algorithms.grpo.test_remote_training import read_locally

pytestmark = pytest.mark.thorough

G = 2
SETTINGS: dict[str, Any] = {**COMMON, "rollouts": ROOM}


class Patient(Chat):
    """Waits a little; calls a test's hook before its third answer."""

    def __init__(self) -> None:
        self.num_asked: list[int] = []
        self.before_the_third: Callable[[], None] = int

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any]) -> EnvironmentReturn:
        self.num_asked.append(len(message_log_batch))
        if len(self.num_asked) == 3:
            self.before_the_third()
        time.sleep(0.02)
        return super().step(message_log_batch, metadata)


@pytest.fixture
def chat() -> Patient:
    return Patient()


@pytest.fixture
def conversations(
    streaming_engine: StreamingGeneration, tiny_model: Path, chat: Patient
) -> MultiTurnRollouts:
    bounds = Bounds(max_turns=9, max_tokens=LONG, max_new_tokens=40)
    tokenizer = load_tokenizer(tiny_model)
    return MultiTurnRollouts(streaming_engine, tokenizer, chat, seed=0, bounds=bounds)


def without_logprobs(rollouts: Sequence[Any]) -> list[Any]:
    """Drops logprobs: the engine's batches differ, which changes the rounding of sums."""
    return [
        replace(each, completion=replace(each.completion.read(), logprobs=())) for each in rollouts
    ]


def test_conversations_of_a_stream_equal_those_of_one_call_per_turn(
    streaming_engine: StreamingGeneration,
    conversations: MultiTurnRollouts,
    chat: Patient,
    prompts: list[Prompt],
) -> None:
    at_once = [
        replace(each, completion=replace(each.completion.read(), weight_versions=()))
        for each in conversations.run(prompts, num_generations_per_prompt=G, step=1)
    ]
    with RolloutStream(streaming_engine, conversations.episode, chat, seed=0) as stream:
        for step in (1, 2):
            stream.begin(prompts, num_generations_per_prompt=G, step=step)
        remote, later = stream.take(1), stream.take(2)
    assert isinstance(remote, RemoteRollouts)
    assert [
        replace(each, completion=replace(each.completion, weight_versions=()))
        for each in without_logprobs(remote)
    ] == [replace(each, completion=replace(each.completion, logprobs=())) for each in at_once]
    assert {len(each.turn_rewards) for each in at_once} > {1}
    for one, other in zip(remote, at_once, strict=True):
        gap = torch.tensor(one.completion.logprobs) - torch.tensor(other.completion.logprobs)
        assert gap.abs().max() < 1e-5
    assert without_logprobs(later) != without_logprobs(remote)


def test_a_killed_engine_resumes_from_the_last_finished_turn(
    streaming_engine: StreamingGeneration,
    conversations: MultiTurnRollouts,
    chat: Patient,
    prompts: list[Prompt],
) -> None:
    with RolloutStream(streaming_engine, conversations.episode, chat, seed=0) as stream:
        stream.begin(prompts, num_generations_per_prompt=G, step=1)
        expected = without_logprobs(stream.take(1))
    num_asked, chat.num_asked = sum(chat.num_asked), []
    pid = worker_pid(streaming_engine)
    chat.before_the_third = lambda: os.kill(pid, signal.SIGKILL)
    with RolloutStream(streaming_engine, conversations.episode, chat, seed=0) as stream:
        stream.begin(prompts, num_generations_per_prompt=G, step=1)
        assert without_logprobs(stream.take(1)) == expected
    assert streaming_engine.num_restarts == 1
    assert sum(chat.num_asked) == num_asked  # no call to the environment is repeated


def fitted(
    kind: type[GRPOTrainer], model: Path, max_staleness: int | None = None, **settings: Any
) -> TrainResult:
    ahead = None if max_staleness is None else {"max_staleness": max_staleness}
    trainer = kind.from_pretrained(model, asynchronous=ahead, **SETTINGS, **settings)
    return trainer.fit(ROWS, reward_fn=Chat())


def assert_same_records(ours: TrainResult, theirs: TrainResult) -> None:
    for step in range(1, NUM_STEPS + 1):
        one, other = (
            RolloutRecords(each.folder / "rollouts").load(step) for each in (ours, theirs)
        )
        assert one == other


@pytest.mark.parametrize("further", [{}, {"dynamic_sampling": {"max_draws": 2}}])
def test_without_staleness_the_weights_equal_those_of_synchronous_training(
    session: ClusterSession, tiny_model: Path, further: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_turns = fitted(GRPOTrainer, tiny_model, **further)
    remote = fitted(AsyncGRPOTrainer, tiny_model, 0, **further)
    assert_equal_weights(remote.folder, by_turns.folder)
    read_locally(monkeypatch)
    brought = fitted(AsyncGRPOTrainer, tiny_model, 0, **further)
    assert_equal_weights(remote.folder, brought.folder)
    assert remote.metrics == brought.metrics
    assert_same_records(remote, brought)


def test_a_replay_of_conversations_gives_the_same_weights(
    session: ClusterSession, tiny_model: Path, tmp_path: Path
) -> None:
    """The replay reads all tokens here; in the run, each rank read its own."""
    ahead = fitted(AsyncGRPOTrainer, tiny_model, 2)
    trainer = AsyncGRPOTrainer.from_pretrained(
        "unused", asynchronous={"max_staleness": 2}, **SETTINGS
    )
    replay(trainer, ahead, ahead.folder / "rollouts", tmp_path / "work")
    assert_equal_weights(tmp_path / "work", ahead.folder)
