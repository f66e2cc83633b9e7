"""Engines on dedicated bundles: several that stream, one over two ranks, and training."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms import AsyncGRPOTrainer, GRPOTrainer
from nemo_rl_core.algorithms.grpo.data import grpo_batch
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.models.generation.streaming import StreamingGeneration
from nemo_rl_core.rollouts.engine import SingleTurnRollouts
from nemo_rl_core.rollouts.stream import RolloutStream
from nemo_rl_core.trainers.fit.fitting import TrainResult
from nemo_rl_core.types import Completion, Prompt
from tests.training import assert_equal_weights

pytestmark = pytest.mark.thorough

LONG = 100


def with_engines(setup: GenerationSetup, **sizes: Any) -> GenerationSetup:
    """Completions of exactly 100 tokens, by engines of that number and size."""
    values = {**setup.config.model_dump(), "max_new_tokens": LONG, **sizes}
    values.pop("num_engines")
    config = VllmGenerationConfig.model_validate(values)
    return replace(setup, config=config, max_model_len=16 + LONG, stop_token_ids=())


@pytest.fixture(scope="module")
def expected(
    session: ClusterSession, generation_setup: GenerationSetup, prompts: list[Prompt]
) -> Iterator[list[tuple[int, ...]]]:
    """The tokens of one engine that shares the trainer's bundles."""
    engine = StreamingGeneration(session, with_engines(generation_setup))
    yield [each.token_ids for each in completed(engine, prompts)]


def requests_of(prompts: list[Prompt]) -> BatchedDataDict:
    width = max(len(each.token_ids) for each in prompts)
    ids = [[*each.token_ids] + [0] * (width - len(each.token_ids)) for each in prompts]
    return BatchedDataDict(
        {
            "input_ids": torch.tensor(ids),
            "input_lengths": torch.tensor([len(each.token_ids) for each in prompts]),
            "seeds": torch.arange(len(prompts)) + 5,
        }
    )


def completed(engine: StreamingGeneration, prompts: list[Prompt]) -> list[Completion]:
    engine.submit(range(len(prompts)), requests_of(prompts))
    completions: dict[int, Completion] = {}
    deadline = time.monotonic() + 300
    while len(completions) < len(prompts) and time.monotonic() < deadline:
        completions |= dict(engine.poll(wait_seconds=1))
    return [completions[name] for name in range(len(prompts))]


def test_two_engines_give_the_tokens_of_one(
    session: ClusterSession,
    generation_setup: GenerationSetup,
    prompts: list[Prompt],
    expected: list[tuple[int, ...]],
    make_policy: Callable[..., Any],
    tiny_model: Path,
) -> None:
    engine = StreamingGeneration(session, with_engines(generation_setup, placement={"own": 2}))
    assert (engine.num_engines, engine.session.cluster.world_size) == (2, 1)
    engine.submit(range(len(prompts)), requests_of(prompts))
    assert engine._balance.busy == [0, 1]
    found: dict[int, Completion] = {}
    while len(found) < len(prompts):
        found |= dict(engine.poll(wait_seconds=1))
    assert engine._balance.busy == []
    assert [found[name].token_ids for name in range(len(prompts))] == expected
    # New weights reach both as one version, in the middle of their generation; nothing is lost.
    policy = make_policy(max_tokens_per_microbatch=4096)
    rollouts = SingleTurnRollouts(engine, load_tokenizer(tiny_model), seed=0)
    with RolloutStream(engine, rollouts.episode, None, seed=0) as stream:
        stream.begin(prompts, num_generations_per_prompt=2, step=1)
        engine.update_weights(policy, weight_version=7)
        assert 1 <= engine.agreement < 1.001
        taken = stream.take(1)
        stream.begin(prompts, num_generations_per_prompt=1, step=2)
        after = stream.take(2)
    assert {len(each.completion.token_ids) for each in taken} == {LONG}
    assert {v for each in taken for v in each.completion.weight_versions} <= {0, 7}
    assert {v for each in after for v in each.completion.weight_versions} == {7}
    batch = grpo_batch([each.scored(0.0) for each in after])
    gap = batch["generation_logprobs"] - policy.get_logprobs(batch)["logprobs"]
    assert gap[batch["token_mask"]].abs().max() < 1e-4
    engine.keeps_completions = False
    # Dropped requests leave no engine busy and are not returned.
    engine.submit([100, 101], requests_of(prompts[:2]))
    engine.cancel([100, 101])
    assert engine._balance.busy == []
    assert [each.token_ids for each in completed(engine, prompts)]


def test_the_ranks_of_an_engine_take_requests_and_weights_between_the_same_steps(
    session: ClusterSession,
    generation_setup: GenerationSetup,
    prompts: list[Prompt],
    expected: list[tuple[int, ...]],
    make_policy: Callable[..., Any],
) -> None:
    setup = with_engines(generation_setup, placement={"own": 2}, tensor_parallel_size=2)
    engine = StreamingGeneration(session, setup)
    assert engine.num_engines == 1
    assert [each.token_ids for each in completed(engine, prompts)] == expected
    # Requests and weights arrive while it steps.
    policy = make_policy(max_tokens_per_microbatch=4096)
    for name, prompt in enumerate(prompts):
        engine.submit([name], requests_of([prompt]))
        if name == len(prompts) // 2:
            engine.update_weights(policy, weight_version=3)
    found: dict[int, Completion] = {}
    while len(found) < len(prompts):
        found |= dict(engine.poll(wait_seconds=1))
    assert {len(each.token_ids) for each in found.values()} == {LONG}
    assert set(found[len(prompts) - 1].weight_versions) == {3}
    assert 1 <= engine.agreement < 1.001


ROWS = [{"prompt": f"{n}+{n % 7}=", "answer": str(n + n % 7)} for n in range(10, 34)]
SETTINGS: dict[str, Any] = {
    "cluster": {"num_threads": 1},
    "max_prompt_tokens": 16,
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 4,
    "num_steps_per_iteration": 3,
    "save_every_num_steps": 9,
    "learning_rate": 0.01,
    "loss": {"importance": {"kind": "truncated"}},
}


def fitted(kind: type[GRPOTrainer], model: Path, own: int, **settings: Any) -> TrainResult:
    placement = {"own": own} if own else "colocated"
    sampling = {"max_new_tokens": 6, "max_num_seqs": 64, "placement": placement}
    trainer = kind.from_pretrained(model, generation=sampling, **SETTINGS, **settings)
    return trainer.fit(ROWS, reward_fn=lambda prompt, response: float(response.count("7")))


def test_dedicated_engines_train_bitwise_identically(
    session: ClusterSession, tiny_model: Path
) -> None:
    dedicated = fitted(GRPOTrainer, tiny_model, own=1)
    assert_equal_weights(dedicated.folder, fitted(GRPOTrainer, tiny_model, own=0).folder)


def test_two_dedicated_engines_run_asynchronously(
    session: ClusterSession, tiny_model: Path
) -> None:
    result = fitted(AsyncGRPOTrainer, tiny_model, own=2, asynchronous={"max_staleness": 1})
    assert [each["num_failed_rollouts"] for each in result.metrics] == [0.0] * 3
    for metrics in result.metrics:
        assert 1 <= metrics["handover_mult_prob_error"] < 1.001
        assert metrics["staleness_max"] <= 1
