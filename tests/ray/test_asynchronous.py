"""Sampling ahead: weights that change in the middle of completions, and a trainer that goes on."""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_core.algorithms import AsyncGRPOTrainer, GRPOTrainer
from nemo_rl_core.algorithms.grpo.data import grpo_batch
from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.infra.lineage import Manifest
from nemo_rl_core.models.generation.streaming import StreamingGeneration
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.rollouts.single_turn import SingleTurnRollouts
from nemo_rl_core.rollouts.stream import RolloutStream
from nemo_rl_core.trainers.base import Job
from nemo_rl_core.trainers.callbacks import Callback
from nemo_rl_core.trainers.fitting import TrainResult
from nemo_rl_core.types import Prompt, Rollout

pytestmark = pytest.mark.slow

LONG = 200
G = 2
ROWS = [{"prompt": f"{n}+{n % 7}=", "answer": str(n + n % 7)} for n in range(10, 34)]
SETTINGS: dict[str, Any] = {
    "cluster": {"num_threads": 1},
    "generation": {"max_new_tokens": 6, "kv_cache_gib": 1, "max_num_seqs": 64},
    "max_prompt_tokens": 16,
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 4,
    "num_steps_per_iteration": 4,
    "save_every_num_steps": 9,
    # Hands weights over between two steps, too, and must leave the samples as they are.
    "validate_every_num_steps": 1,
    "learning_rate": 0.01,
    "loss": {"importance": {"kind": "truncated"}},
}


def length(prompt: str, response: str) -> float:
    return response.count("7") + 0.1 * len(response)


@pytest.fixture(scope="module")
def setup(generation_setup: GenerationSetup) -> GenerationSetup:
    """Completions of exactly 200 tokens, so that there is a middle."""
    config = generation_setup.config.model_copy(update={"max_new_tokens": LONG})
    return replace(generation_setup, config=config, max_model_len=16 + LONG, stop_token_ids=())


@pytest.fixture
def engine(session: ClusterSession, setup: GenerationSetup) -> StreamingGeneration:
    return StreamingGeneration(session, setup)


@pytest.fixture
def rollouts(engine: StreamingGeneration, tiny_model: Path) -> SingleTurnRollouts:
    return SingleTurnRollouts(engine, load_tokenizer(tiny_model), seed=0)


@pytest.fixture
def stream(engine: StreamingGeneration, rollouts: SingleTurnRollouts) -> RolloutStream:
    return RolloutStream(engine, rollouts.dialogue, None, seed=0)


def batch_of(rollouts: list[Rollout]) -> BatchedDataDict:
    return grpo_batch([rollout.scored(0.0) for rollout in rollouts])


def worker_pid(engine: StreamingGeneration) -> int:
    import ray

    worker = engine._workers._workers[0]
    return int(ray.get(worker.__ray_call__.remote(lambda _: os.getpid())))


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
        # Two steps share the engine's batches here, which changes how sums are rounded.
        gap = torch.tensor(one.completion.logprobs) - torch.tensor(other.completion.logprobs)
        assert gap.abs().max() < 1e-5
    assert streamed[1][0].completion.token_ids != streamed[0][0].completion.token_ids


def test_every_token_is_of_the_weights_that_it_names(
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


def test_what_does_not_come_is_asked_for_again_and_then_given_up(
    session: ClusterSession,
    setup: GenerationSetup,
    engine: StreamingGeneration,
    rollouts: SingleTurnRollouts,
    prompts: list[Prompt],
) -> None:
    stream = RolloutStream(engine, rollouts.dialogue, None, seed=0, timeout_seconds=1e-4)
    stream.begin(prompts, num_generations_per_prompt=1, step=1)
    found = stream.take(1)
    assert [each.group for each in found] == list(range(len(prompts)))
    failed = [each for each in found if each.error is not None]
    assert failed
    assert all("twice" in str(each.error) and each.reward is None for each in failed)
    # What was given up does not come back to whoever asks next.
    patient = RolloutStream(StreamingGeneration(session, setup), rollouts.dialogue, None, seed=0)
    patient.begin(prompts, num_generations_per_prompt=1, step=1)
    assert [each.error for each in patient.take(1)] == [None] * len(prompts)


def test_a_lost_engine_owes_nothing(
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
    found = stream.take(1)
    assert engine.num_restarts == 1
    assert worker_pid(engine) != pid
    assert [each.completion.token_ids for each in found] == [
        each.completion.token_ids for each in expected
    ]
    assert {version for each in found for version in each.completion.weight_versions} == {5}


def fitted(kind: type[GRPOTrainer], model: Path, max_staleness: int | None = None) -> TrainResult:
    ahead = None if max_staleness is None else {"max_staleness": max_staleness}
    trainer = kind.from_pretrained(model, asynchronous=ahead, **SETTINGS)
    return trainer.fit(ROWS, reward_fn=length)


@pytest.fixture(scope="module")
def by_turns(session: ClusterSession, tiny_model: Path) -> TrainResult:
    return fitted(GRPOTrainer, tiny_model)


@pytest.fixture(scope="module")
def ahead(session: ClusterSession, tiny_model: Path) -> TrainResult:
    return fitted(AsyncGRPOTrainer, tiny_model, max_staleness=2)


def weights(result: TrainResult) -> dict[str, torch.Tensor]:
    return load_file(result.folder / "model" / "model.safetensors")


def assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not one[name].equal(other[name])] == []


def test_without_staleness_the_weights_are_those_of_training_by_turns(
    by_turns: TrainResult, tiny_model: Path
) -> None:
    assert_equal_weights(
        weights(fitted(AsyncGRPOTrainer, tiny_model, max_staleness=0)), weights(by_turns)
    )


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


class Watch(Callback):
    """Keeps the figures of every step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        self.seen.append(dict(metrics))


def test_a_replay_gives_the_weights_that_time_has_made(ahead: TrainResult, tmp_path: Path) -> None:
    parents = {parent.stage: Path(parent.path) for parent in Manifest.read(ahead.folder).parents}
    start = parents["prepare_model"] / "model"
    (work := tmp_path / "work").mkdir()
    job = Job(
        train=parents["prepare_data train"],
        start=start,
        work=work,
        reference=start,
        replay=ahead.folder / "rollouts",
    )
    trainer = AsyncGRPOTrainer.from_pretrained(start, asynchronous={"max_staleness": 2}, **SETTINGS)
    watch = Watch()
    trainer.run(job, callbacks=[watch])
    assert_equal_weights(load_file(work / "model" / "model.safetensors"), weights(ahead))
    assert all(0 <= each["staleness"] <= each["staleness_max"] <= 2 for each in watch.seen)


@pytest.mark.parametrize(
    ("kind", "asynchronous"), [(GRPOTrainer, {"max_staleness": 1}), (AsyncGRPOTrainer, None)]
)
def test_a_trainer_of_the_other_kind_is_refused(
    kind: type[GRPOTrainer], asynchronous: Any, tiny_model: Path
) -> None:
    trainer = kind.from_pretrained(tiny_model, asynchronous=asynchronous, **SETTINGS)
    with pytest.raises(ConfigError, match="take the other trainer"):
        trainer.fit(ROWS, reward_fn=length)
