"""Asynchronous GRPO: weights change in the middle of completions while the trainer continues."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms import AsyncGRPOTrainer, GRPOTrainer
from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.errors import ConfigError, WorkerError
from nemo_rl_core.models.generation.streaming import StreamingGeneration
from nemo_rl_core.rollouts.engine import SingleTurnRollouts
from nemo_rl_core.rollouts.episode import Bounds
from nemo_rl_core.rollouts.multi_turn import MultiTurnRollouts
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.rollouts.stream import RolloutStream
from nemo_rl_core.trainers.callbacks import Callback
from nemo_rl_core.trainers.fit.fitting import TrainResult
from nemo_rl_core.types import Prompt
from tests.ray.ahead import COMMON, LONG, ROWS, batch_of, worker_pid
from tests.training import assert_equal_weights, replay
from tests.unit.algorithms.grpo.test_remote_training import read_locally

pytestmark = pytest.mark.slow

G = 2
# Also sends weights between two steps, which must not change the samples.
SETTINGS: dict[str, Any] = {**COMMON, "validate_every_num_steps": 1}


def length(prompt: str, response: str) -> float:
    return response.count("7") + 0.1 * len(response)


@pytest.fixture
def engine(streaming_engine: StreamingGeneration) -> StreamingGeneration:
    return streaming_engine


def test_a_stream_gives_the_rollouts_of_the_engine(
    rollouts: SingleTurnRollouts, stream: RolloutStream, prompts: list[Prompt]
) -> None:
    at_once = rollouts.run(prompts, num_generations_per_prompt=G, step=1)
    for step in (1, 2):
        stream.begin(prompts, num_generations_per_prompt=G, step=step)
    streamed = [stream.take(step) for step in (1, 2)]
    assert [replace(each, completion=None) for each in streamed[0]] == [
        replace(each, completion=None) for each in at_once
    ]
    for one, other in zip(streamed[0], at_once, strict=True):
        assert one.completion.token_ids == other.completion.token_ids
        assert one.completion.weight_versions == (0,) * LONG
        # Two steps share the engine's batches here, which changes the rounding of sums.
        gap = torch.tensor(one.completion.logprobs) - torch.tensor(other.completion.logprobs)
        assert gap.abs().max() < 1e-5
    assert streamed[1][0].completion.token_ids != streamed[0][0].completion.token_ids


def test_every_token_comes_from_the_weight_version_it_names(
    engine: StreamingGeneration, stream: RolloutStream, prompts: list[Prompt], make_policy: Callable
) -> None:
    stream.begin(prompts, num_generations_per_prompt=1, step=1)
    lesson = batch_of(stream.take(1))
    for attempt in range(2, 8):  # until the update hits the middle, which depends on the machine
        policy = make_policy(max_tokens_per_microbatch=4096)
        engine.update_weights(policy, weight_version=3)
        stream.begin(prompts, num_generations_per_prompt=1, step=attempt)
        time.sleep(0.05 * attempt)
        policy.train(lesson, NLLLoss())
        engine.update_weights(policy, weight_version=4)
        made = batch_of(stream.take(attempt))
        versions = made["weight_versions"]
        if set(versions[made["token_mask"]].tolist()) == {3, 4}:
            break
    assert made["token_mask"].sum() == len(prompts) * LONG
    new = policy.get_logprobs(made)["logprobs"]
    old = make_policy(max_tokens_per_microbatch=4096).get_logprobs(made)["logprobs"]
    for version, logprobs, others in ((3, old, new), (4, new, old)):
        of_version = made["token_mask"] & (versions == version)
        assert of_version.any()
        gap = (made["generation_logprobs"] - logprobs).abs()
        assert gap[of_version].max() < 1e-4
        assert (made["generation_logprobs"] - others).abs()[of_version].max() > 0.01


def test_missing_completions_are_requested_again_and_then_dropped(
    session: ClusterSession,
    long_setup: GenerationSetup,
    engine: StreamingGeneration,
    rollouts: SingleTurnRollouts,
    prompts: list[Prompt],
) -> None:
    with RolloutStream(engine, rollouts.episode, None, seed=0, timeout_seconds=1e-4) as stream:
        stream.begin(prompts, num_generations_per_prompt=1, step=1)
        completed = stream.take(1)
    assert [each.group for each in completed] == list(range(len(prompts)))
    failed = [each for each in completed if each.error is not None]
    assert failed
    assert all("twice" in str(each.error) and each.reward is None for each in failed)
    # Dropped requests do not reach later callers.
    again = StreamingGeneration(session, long_setup)
    with RolloutStream(again, rollouts.episode, None, seed=0) as patient:
        patient.begin(prompts, num_generations_per_prompt=1, step=1)
        assert [each.error for each in patient.take(1)] == [None] * len(prompts)


@pytest.mark.thorough
def test_a_lost_engine_has_no_outstanding_requests(
    session: ClusterSession,
    engine: StreamingGeneration,
    stream: RolloutStream,
    prompts: list[Prompt],
    make_policy: Callable,
) -> None:
    policy = make_policy()
    engine.update_weights(policy, weight_version=5)
    stream.begin(prompts, num_generations_per_prompt=G, step=1)
    expected = stream.take(1)
    stream.begin(prompts, num_generations_per_prompt=G, step=1)
    pid = worker_pid(engine)
    threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
    completed = stream.take(1)
    assert engine.num_restarts == 1
    assert worker_pid(engine) != pid
    assert [each.completion.token_ids for each in completed] == [
        each.completion.token_ids for each in expected
    ]
    assert {version for each in completed for version in each.completion.weight_versions} == {5}


@pytest.mark.thorough
def test_an_engine_that_is_stuck_is_replaced(
    session: ClusterSession, long_setup: GenerationSetup, prompts: list[Prompt], tiny_model: Path
) -> None:
    config = long_setup.config.model_copy(update={"generate_timeout_seconds": 30})
    engine = StreamingGeneration(session, replace(long_setup, config=config))
    rollouts = SingleTurnRollouts(engine, load_tokenizer(tiny_model), seed=0)
    expected = rollouts.run(prompts, num_generations_per_prompt=1, step=1)
    with RolloutStream(engine, rollouts.episode, None, seed=0) as stream:
        stream.begin(prompts, num_generations_per_prompt=1, step=1)
        os.kill(worker_pid(engine), signal.SIGSTOP)
        completed = stream.take(1)
    assert engine.num_restarts == 1
    assert [each.completion.token_ids for each in completed] == [
        each.completion.token_ids for each in expected
    ]


def break_a_weight(backend: Any) -> None:
    """Removes the columns of a matrix, so that the next step of the engine raises."""
    runner = backend._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    norm = dict(runner.get_model().named_parameters())["model.norm.weight"]
    backend.intact = norm.data
    norm.data = norm.data[:1].repeat(3)


def restore_the_weight(backend: Any) -> None:
    runner = backend._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    dict(runner.get_model().named_parameters())["model.norm.weight"].data = backend.intact


def test_an_error_of_an_engine_is_reported_once(
    session: ClusterSession,
    long_setup: GenerationSetup,
    engine: StreamingGeneration,
    rollouts: SingleTurnRollouts,
    prompts: list[Prompt],
) -> None:
    import ray

    expected = rollouts.run(prompts, num_generations_per_prompt=1, step=1)
    worker = engine._workers._workers[0]
    ray.get(worker.__ray_call__.remote(break_a_weight))
    with RolloutStream(engine, rollouts.episode, None, seed=0) as stream:
        stream.begin(prompts, num_generations_per_prompt=1, step=1)
        with pytest.raises(WorkerError, match="worker 0 of 'generation' raised"):
            stream.take(1)
    ray.get(worker.__ray_call__.remote(restore_the_weight))
    # The same worker works for the next user: nothing is left of the failure.
    engine = StreamingGeneration(session, long_setup)
    with RolloutStream(engine, rollouts.episode, None, seed=0) as stream:
        stream.begin(prompts, num_generations_per_prompt=1, step=1)
        completed = stream.take(1)
    assert engine._workers._workers[0] is worker
    assert [each.completion.token_ids for each in completed] == [
        each.completion.token_ids for each in expected
    ]


class Chat:
    """Answers `1=` until the policy has had four turns; a turn of the policy ends at a digit."""

    first_stop_strings = tuple("0123456789")

    def __init__(self) -> None:
        self.asked_at: list[float] = []
        self.num_over = 0
        self.is_asked = False

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any]) -> EnvironmentReturn:
        self.asked_at.append(time.monotonic())
        self.is_asked = True
        time.sleep(0.05)  # so that some are still running when the test looks
        self.is_asked = False
        turns = [sum(each["role"] == "assistant" for each in log) for log in message_log_batch]
        self.num_over += sum(turn == 4 for turn in turns)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "1="}] * len(turns),
            metadata=list(metadata),
            next_stop_strings=[list(self.first_stop_strings)] * len(turns),
            rewards=torch.tensor([log[-1]["content"].count("7") for log in message_log_batch]),
            terminateds=torch.tensor([turn == 4 for turn in turns]),
        )

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        return batch, {"calls_at_once": float(self.is_asked)}


def test_conversations_continue_while_nobody_waits(
    engine: StreamingGeneration, tiny_model: Path, prompts: list[Prompt]
) -> None:
    chat = Chat()
    bounds = Bounds(max_turns=9, max_tokens=LONG, max_new_tokens=40)
    tokenizer = load_tokenizer(tiny_model)
    rollouts = MultiTurnRollouts(engine, tokenizer, chat, seed=0, bounds=bounds)
    expected = rollouts.run(prompts, num_generations_per_prompt=G, step=1)
    num_turns = {len(each.turn_rewards) for each in expected}
    assert num_turns == {4}  # otherwise the count would not prove that all are done
    chat.num_over = 0
    with RolloutStream(engine, rollouts.episode, chat, seed=0) as stream:
        stream.begin(prompts, num_generations_per_prompt=G, step=1)
        deadline = time.monotonic() + 500
        while chat.num_over < len(expected) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert chat.num_over == len(expected)
        completed = stream.take(1)
    assert [each.completion.token_ids for each in completed] == [
        each.completion.token_ids for each in expected
    ]
    assert [(each.messages, each.turn_rewards, each.group, each.sample) for each in completed] == [
        (each.messages, each.turn_rewards, each.group, each.sample) for each in expected
    ]


def fitted(
    kind: type[GRPOTrainer], model: Path, max_staleness: int | None = None, **settings: Any
) -> TrainResult:
    ahead = None if max_staleness is None else {"max_staleness": max_staleness}
    trainer = kind.from_pretrained(model, asynchronous=ahead, **SETTINGS, **settings)
    return trainer.fit(ROWS, reward_fn=length)


@pytest.fixture(scope="module")
def by_turns(session: ClusterSession, tiny_model: Path) -> TrainResult:
    return fitted(GRPOTrainer, tiny_model)


@pytest.fixture(scope="module")
def ahead(session: ClusterSession, tiny_model: Path) -> TrainResult:
    return fitted(AsyncGRPOTrainer, tiny_model, max_staleness=2)


def test_without_staleness_the_weights_equal_those_of_synchronous_training(
    by_turns: TrainResult, tiny_model: Path
) -> None:
    in_step = fitted(AsyncGRPOTrainer, tiny_model, max_staleness=0)
    assert_equal_weights(in_step.folder, by_turns.folder)


@pytest.mark.parametrize("advantage", ["group_normalized", "reinforce_plus_plus"])
def test_remote_and_fetched_tokens_train_bitwise_identically(
    session: ClusterSession, tiny_model: Path, advantage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"max_staleness": 0, "advantage": {"kind": advantage}}
    remote = fitted(AsyncGRPOTrainer, tiny_model, **settings)
    read_locally(monkeypatch)
    brought = fitted(AsyncGRPOTrainer, tiny_model, **settings)
    assert_equal_weights(remote.folder, brought.folder)
    assert remote.metrics == brought.metrics
    for step in range(1, 5):
        ours, theirs = (
            RolloutRecords(result.folder / "rollouts").load(step) for result in (remote, brought)
        )
        assert ours == theirs


def test_samples_are_as_old_as_allowed_and_no_older(ahead: TrainResult) -> None:
    records = RolloutRecords(ahead.folder / "rollouts")
    ages = {}
    for step in range(1, 5):
        made = records.load(step)
        assert [(each.group, each.sample) for each in made] == [
            (group, sample) for group in range(4) for sample in range(4)
        ]
        versions = {v for each in made for v in each.completion.weight_versions}
        ages[step] = step - 1 - min(versions)
        assert max(versions) <= step - 1
    assert ages[1] == 0
    assert max(ages.values()) <= 2


def test_engine_and_trainer_agree_at_every_weight_update(ahead: TrainResult) -> None:
    for metrics in ahead.metrics:
        assert 1 <= metrics["handover_mult_prob_error"] < 1.001
        # Missing if no token was sampled with the trainer's weights.
        assert 1 <= metrics.get("token_mult_prob_error", 1) < 1.001


def replayed(result: TrainResult, work: Path, **settings: Any) -> list[dict[str, float]]:
    trainer = AsyncGRPOTrainer.from_pretrained("unused", **settings)
    return replay(trainer, result, result.folder / "rollouts", work)


def test_a_replay_gives_the_same_weights(ahead: TrainResult, tmp_path: Path) -> None:
    seen = replayed(ahead, tmp_path / "work", asynchronous={"max_staleness": 2}, **SETTINGS)
    assert_equal_weights(tmp_path / "work", ahead.folder)
    assert all(0 <= each["staleness"] <= each["staleness_max"] <= 2 for each in seen)
    # The replay reads all tokens here; in the run, each rank read its own.
    for ours, theirs in zip(seen, ahead.metrics, strict=True):
        assert ours.items() <= theirs.items()


class Busy(Callback):
    """Keeps the trainer busy after each step; the engine's worker may be lost in the meantime."""

    def __init__(self, kill_in: int) -> None:
        self._kill_in = kill_in
        self.hours: list[tuple[float, float]] = []

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        began = time.monotonic()
        if step == self._kill_in:
            time.sleep(0.2)
            os.kill(worker_pid(trainer.sampler.generation), signal.SIGKILL)
        time.sleep(1)
        self.hours.append((began, time.monotonic()))


@pytest.mark.thorough
@pytest.mark.parametrize("kill_in", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_turns_are_taken_while_the_trainer_is_busy(
    session: ClusterSession, tiny_model: Path, tmp_path: Path, kill_in: int
) -> None:
    settings = {
        **SETTINGS,
        "asynchronous": {"max_staleness": 1},
        "generation": {**SETTINGS["generation"], "max_new_tokens": 40},
        "rollouts": {"max_turns": 9, "max_rollout_tokens": LONG},
    }
    settings.pop("validate_every_num_steps")
    chat, busy = Chat(), Busy(kill_in)
    trainer = AsyncGRPOTrainer.from_pretrained(tiny_model, **settings)
    result = trainer.fit(ROWS, reward_fn=chat, callbacks=[busy])
    answered = [sum(begin < moment < end for moment in chat.asked_at) for begin, end in busy.hours]
    # While the trainer is busy after a step, the rollouts of the step after the next are produced.
    assert answered[2] > 0
    assert kill_in == 2 or answered[1] > 0
    assert answered[3] == 0
    restarts = [metrics["num_engine_restarts"] for metrics in result.metrics]
    assert restarts == [0, 0, float(kill_in == 2), 0]
    assert [metrics["num_failed_rollouts"] for metrics in result.metrics] == [0, 0, 0, 0]
    assert all(metrics["staleness_max"] <= 1 for metrics in result.metrics)
    again = replayed(result, tmp_path / "work", **settings)
    assert_equal_weights(tmp_path / "work", result.folder)
    # The environment was called with full draws, and never during another call.
    for metrics in [*result.metrics, *again]:
        assert metrics["environment_calls_at_once"] == 0
        assert metrics["sampling_importance_ratio"] > 0


@pytest.mark.parametrize(
    ("kind", "asynchronous"), [(GRPOTrainer, {"max_staleness": 1}), (AsyncGRPOTrainer, None)]
)
def test_a_trainer_of_the_other_kind_is_refused(
    kind: type[GRPOTrainer], asynchronous: Any, tiny_model: Path
) -> None:
    trainer = kind.from_pretrained(tiny_model, asynchronous=asynchronous, **SETTINGS)
    with pytest.raises(ConfigError, match="use the other trainer"):
        trainer.fit(ROWS, reward_fn=length)
