"""Engines prove themselves: completions from wrong weights never reach a rollout."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms import AsyncGRPOTrainer
from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.generation import HuggingFaceGenerationConfig
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.errors import ConsistencyError
from nemo_rl_core.models.generation import VllmGeneration
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.policy import Policy
from nemo_rl_core.models.validation.logprobs import as_training_batch
from nemo_rl_core.trainers.callbacks import Callback

pytestmark = pytest.mark.slow

PROMPTS = BatchedDataDict(
    {
        "input_ids": torch.tensor([[5, 6, 7, 8], [9, 4, 0, 0], [3, 8, 3, 0]]),
        "input_lengths": torch.tensor([4, 2, 3]),
        "seeds": torch.arange(3),
    }
)


def mixture_of_experts(folder: Path, tokenizer_of: Path, *, expert_size: int) -> Path:
    """Creates a transformers folder: two layers of four experts, two of which see each token."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    tokenizer = load_tokenizer(tokenizer_of)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=expert_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if "experts" in name:  # otherwise rounding would hide their share in the logits
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def largest_difference(engine: Generation, policy: Policy) -> float:
    output = engine.generate(PROMPTS, greedy=False)
    batch = as_training_batch(output)
    gap = output["logprobs"][:, 1:] - policy.get_logprobs(batch)["logprobs"]
    return float(gap[batch["token_mask"]].abs().max())


# 48 is not a multiple of 32, to which vLLM pads experts on a CPU.
@pytest.mark.parametrize("expert_size", [64, pytest.param(48, marks=pytest.mark.thorough)])
def test_experts_are_correct_for_every_way_of_loading_weights(
    expert_size: int, session: ClusterSession, generation_setup: GenerationSetup, tmp_path: Path
) -> None:
    model = mixture_of_experts(
        tmp_path / "model", generation_setup.model_folder, expert_size=expert_size
    )
    setup = TrainingSetup(
        model_folder=model,
        optimizer=OptimizerConfig(learning_rate=0.03),
        max_tokens_per_microbatch=512,
    )
    policy = Policy(session, setup)
    engine = VllmGeneration(session, replace(generation_setup, model_folder=model), name="experts")
    assert largest_difference(engine, policy) < 1e-4
    for _ in range(2):
        policy.train(as_training_batch(engine.generate(PROMPTS, greedy=False)), NLLLoss())
        assert largest_difference(engine, policy) > 0.01
        engine.update_weights(policy)
        assert largest_difference(engine, policy) < 1e-4
    policy.save_checkpoint(_empty(tmp_path / "saved"))
    engine.load_weights(tmp_path / "saved" / "model")
    assert largest_difference(engine, policy) < 1e-4
    engine.shutdown()


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def in_engine(engine: Generation, function: Callable[[Any], None]) -> None:
    engine._workers.run_all_workers_single_data("__ray_call__", function)


@pytest.fixture
def transformers_engine(
    session: ClusterSession, generation_setup: GenerationSetup
) -> Iterator[Generation]:
    setup = replace(generation_setup, config=HuggingFaceGenerationConfig(max_new_tokens=6))
    engine = Generation(session, setup, name="transformers")
    yield engine
    engine.shutdown()


def corrupt_transformers(backend: Any) -> None:
    with torch.no_grad():
        backend._model.model.norm.weight.mul_(3)


def corrupt_every_update_of_transformers(backend: Any) -> None:
    take = backend.take_weights

    def take_and_corrupt(named_tensors: Iterator[Any]) -> None:
        take(named_tensors)
        corrupt_transformers(backend)

    backend.take_weights = take_and_corrupt


def test_an_engine_that_was_loaded_wrongly_generates_nothing(
    transformers_engine: Generation, tiny_model: Path
) -> None:
    in_engine(transformers_engine, corrupt_transformers)
    with pytest.raises(ConsistencyError, match="engine and transformers disagree") as caught:
        transformers_engine.generate(PROMPTS, greedy=True)
    assert "worst: sequence" in str(caught.value.got)
    transformers_engine.load_weights(tiny_model)
    assert len(transformers_engine.generate(PROMPTS, greedy=True)["output_ids"]) == 3


def test_an_engine_proves_the_first_weights_that_a_policy_sends(
    session: ClusterSession, transformers_engine: Generation, make_policy: Callable[..., Policy]
) -> None:
    policy = make_policy()
    in_engine(transformers_engine, corrupt_every_update_of_transformers)
    with pytest.raises(ConsistencyError, match="engine and the trainer disagree"):
        transformers_engine.update_weights(policy)
    # Nobody reuses such an engine: the next one of its name is new.
    again = Generation(session, transformers_engine._setup, name="transformers")
    again.update_weights(policy)
    assert again.prove(policy) == pytest.approx(1, abs=1e-4)


def corrupt_vllm(backend: Any) -> None:
    with torch.no_grad():
        backend._model().get_parameter("model.norm.weight").mul_(3)


def corrupt_vllm_once(backend: Any) -> None:
    backend._between_steps(lambda: corrupt_vllm(backend))


def corrupt_every_update_of_vllm(backend: Any) -> None:
    reload = backend._reload

    def reload_and_corrupt(named_tensors: list[Any], *, source: str) -> None:
        reload(named_tensors, source=source)
        corrupt_vllm(backend)

    backend._reload = reload_and_corrupt


class Corruption(Callback):
    """Changes one tensor in the engine after two training steps."""

    def __init__(self, corrupt: Callable[[Any], None]) -> None:
        self._corrupt = corrupt
        self.metrics: list[dict[str, float]] = []

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        self.metrics.append(dict(metrics))
        if step == 2:
            in_engine(trainer.sampler.generation, self._corrupt)


@pytest.mark.parametrize(
    ("corrupt", "other"),
    [
        pytest.param(corrupt_every_update_of_vllm, "the trainer", marks=pytest.mark.thorough),
        (corrupt_vllm_once, "the same engine before"),
    ],
)
def test_one_corrupted_tensor_of_an_engine_that_samples_ahead_stops_the_run_in_that_step(
    corrupt: Callable[[Any], None], other: str, session: ClusterSession, tiny_model: Path
) -> None:
    trainer = AsyncGRPOTrainer.from_pretrained(
        tiny_model,
        asynchronous={"max_staleness": 1},
        cluster={"num_threads": 1},
        generation={"max_new_tokens": 6, "kv_cache_gib": 1, "max_num_seqs": 64},
        max_prompt_tokens=16,
        num_prompts_per_step=4,
        num_generations_per_prompt=4,
        num_steps_per_iteration=5,
        learning_rate=0.01,
        loss={"importance": {"kind": "truncated"}},
    )
    rows = [{"prompt": f"{n}+{n % 7}=", "answer": str(n + n % 7)} for n in range(10, 34)]
    seen = Corruption(corrupt)
    with pytest.raises(ConsistencyError, match=f"engine and {other} disagree") as caught:
        trainer.fit(rows, reward_fn=lambda prompt, response: len(response), callbacks=[seen])
    assert "worst: sequence" in str(caught.value.got)
    assert len(seen.metrics) == 2
    for metrics in seen.metrics:
        assert 1 <= metrics["handover_mult_prob_error"] < 1.001
        assert 1 <= metrics.get("token_mult_prob_error", 1) < 1.001
