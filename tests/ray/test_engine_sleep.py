"""Turns on the GPU: the engine wakes after new weights, and sleeps before training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from nemo_rl_core.algorithms import GRPOTrainer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.generation.remote_completions import RemoteCompletions
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.rollouts.sampler import Sampler

pytestmark = pytest.mark.thorough

PROMPTS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3, 9) for b in range(5)]
TWO_STEPS: dict[str, Any] = {
    "cluster": {"num_threads": 1},
    "max_prompt_tokens": 16,
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 2,
    "num_steps_per_iteration": 2,
    "validate_every_num_steps": 2,
    "learning_rate": 0.01,
}


class NotedGeneration(Generation):
    """The engine, with a list of its calls."""

    calls: ClassVar[list[str]] = []

    def update_weights(self, policy: Policy) -> None:
        self.calls.append("weights")
        super().update_weights(policy)

    def prepare_for_generation(self) -> None:
        self.calls.append("wake")
        super().prepare_for_generation()

    def complete(self, *args: Any, **options: Any) -> RemoteCompletions:
        sleeps = options["releases_memory"]
        self.calls.append("wake, generate, sleep" if sleeps else "generate")
        return super().complete(*args, **options)

    def finish_generation(self, **options: Any) -> None:
        super().finish_generation(**options)
        self.calls.append("sleep")


class NotedSampler(Sampler):
    _engine_class = NotedGeneration


class NotedTrainer(GRPOTrainer):
    algorithm = "grpo"
    settings_class = GRPOTrainer.settings_class
    sampler_class = NotedSampler

    def _train_step(self, batch: Any) -> dict[str, float]:
        metrics = super()._train_step(batch)
        NotedGeneration.calls.append("trained")
        return metrics


@pytest.mark.parametrize(
    "generation",
    [
        {"backend": "vllm", "max_new_tokens": 6, "kv_cache_gib": 1, "max_num_seqs": 64},
        {"backend": "hf", "max_new_tokens": 6},
    ],
    ids=["vllm", "hf"],
)
def test_the_engine_is_awake_only_while_it_generates(
    generation: dict[str, Any], session: ClusterSession, tiny_model: Path
) -> None:
    NotedGeneration.calls.clear()
    trainer = NotedTrainer.from_pretrained(
        tiny_model,
        generation=generation,
        **TWO_STEPS,
    )
    trainer.fit(PROMPTS, reward_fn=lambda prompt, response: response.count("7") + 0.1)
    step = ["weights", "wake, generate, sleep", "trained"]  # remote completions take one call
    validation = ["weights", "wake", "generate", "sleep"]
    # At the start, since an engine is awake when it has started, and again at the end for the next
    # stage.
    assert NotedGeneration.calls == ["sleep", *2 * step, *validation, "sleep"]


def test_a_sleeping_engine_wakes_for_requests(
    engine: Generation, prompts: list[Any], make_policy: Callable[..., Policy]
) -> None:
    ids = torch.tensor([list(prompts[0].token_ids)])
    batch = BatchedDataDict({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    expected = engine.generate(batch, greedy=True)
    engine.finish_generation()
    engine.finish_generation()
    again = engine.generate(batch, greedy=True)
    assert torch.equal(again["logprobs"], expected["logprobs"])
    engine.finish_generation()
    engine.update_weights(make_policy())  # the same weights as before
    again = engine.generate(batch, greedy=True)
    assert torch.equal(again["logprobs"], expected["logprobs"])


def test_a_run_does_not_depend_on_the_device_of_the_idle_trainer(
    session: ClusterSession, tiny_model: Path
) -> None:
    weights = []
    for offload in ("none", "all"):
        trainer = GRPOTrainer.from_pretrained(
            tiny_model,
            training={"offload_for_generation": offload},
            generation={"backend": "hf", "max_new_tokens": 6},
            **TWO_STEPS,
        )
        result = trainer.fit(PROMPTS, reward_fn=lambda prompt, response: response.count("7") + 0.1)
        weights.append((result.checkpoint / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert weights[0] != (tiny_model / "model.safetensors").read_bytes()
