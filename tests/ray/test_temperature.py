"""Another temperature, which needs a separate engine: the last test that uses one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_rl_core.algorithms.grpo.data import grpo_batch
from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.models.generation import VllmGeneration
from nemo_rl_core.rollouts.engine import SingleTurnRollouts
from nemo_rl_core.types import Prompt

pytestmark = pytest.mark.thorough


def test_logprobs_are_those_of_the_sampling_temperature(
    session: ClusterSession,
    tiny_model: Path,
    generation_setup: GenerationSetup,
    make_policy: Callable,
    prompts: list[Prompt],
) -> None:
    config = generation_setup.config.replace(temperature=0.7)
    engine = VllmGeneration(session, replace(generation_setup, config=config))
    rollouts = SingleTurnRollouts(engine, load_tokenizer(tiny_model), seed=0)

    def sample(step: int) -> BatchedDataDict:
        scored = [
            rollout.scored(0.0)
            for rollout in rollouts.run(prompts, num_generations_per_prompt=4, step=step)
        ]
        return grpo_batch(scored)

    def difference(batch: BatchedDataDict, logprobs: BatchedDataDict) -> float:
        gap = (batch["generation_logprobs"] - logprobs["logprobs"]).abs()
        return float(gap[batch["token_mask"]].max())

    policy = make_policy(temperature=0.7)
    batch = sample(1)
    assert difference(batch, policy.get_logprobs(batch)) < 1e-4
    policy.train(batch, NLLLoss())
    engine.update_weights(policy)
    batch = sample(2)
    assert difference(batch, policy.get_logprobs(batch)) < 1e-4
    # The same weights at temperature 1 are far off: the test above can distinguish the two.
    policy.save_checkpoint(saved := _empty(tiny_model.parent / "saved"))
    plain = make_policy(model_folder=saved / "model")
    assert difference(batch, plain.get_logprobs(batch)) > 0.05


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder
