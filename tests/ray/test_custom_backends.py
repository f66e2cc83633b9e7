"""Custom backends, engines and batches with real workers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core import GRPOTrainer, train
from nemo_rl_core.algorithms import DPOLossFn, GRPOLossFn
from nemo_rl_core.backends import register_generation_backend, register_training_backend
from nemo_rl_core.backends.generation.base import _GENERATION_BACKENDS
from nemo_rl_core.backends.generation.hugging_face import HuggingFaceBackend
from nemo_rl_core.backends.training.base import _TRAINING_BACKENDS
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.generation import GENERATION_SECTIONS
from nemo_rl_core.config.training import TRAINING_SECTIONS, DTensorTraining, RegisteredTraining
from nemo_rl_core.data import BatchedDataLoader
from nemo_rl_core.data.pretrained import load_tokenizer, stop_token_ids
from nemo_rl_core.distributed import BatchedDataDict
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments import MathEnvironment
from nemo_rl_core.models import HuggingFaceGeneration, HuggingFacePolicy, MegatronPolicy
from nemo_rl_core.models.generation import VllmGeneration
from nemo_rl_core.models.generation.interfaces import GenerationInterface

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3, 9) for b in range(7)]
SMALL = {
    "cluster": {"num_threads": 1},
    "max_prompt_tokens": 16,
    "num_prompts_per_step": 2,
    "num_generations_per_prompt": 2,
    "num_steps_per_iteration": 2,
}
PROMPTS = {
    "input_ids": torch.tensor([[1, 5, 6, 7], [1, 8, 9, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
}


class ScaledTraining(RegisteredTraining, DTensorTraining):
    backend: str = "scaled"
    factor: float = 1.0


class ScaledBackend(DTensorBackend):
    """Multiplies the loss."""

    def train_step(self, batch: BatchedDataDict, loss_fn: Any) -> dict[str, float]:
        factor = self._training.factor  # type: ignore[attr-defined]

        def scaled(*arguments: Any, **counts: Any) -> Any:
            loss, metrics = loss_fn(*arguments, **counts)
            return factor * loss, metrics

        return {**super().train_step(batch, scaled), "factor": factor}


class PlainLoop(HuggingFaceBackend):
    """Transformers' loop under another name."""


class OwnEngine(GenerationInterface):
    """Samples with transformers in this process, with the weights of a policy's `state_dict`."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.stops = list(stop_token_ids(folder, load_tokenizer(folder)))
        self.num_updates = 0

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def finish_generation(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def update_weights(self, policy: Any) -> None:
        self.model.load_state_dict(policy.state_dict(), strict=False)
        self.num_updates += 1

    @torch.no_grad()
    def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict:
        """Generates one token per row."""
        ids, lengths = data["input_ids"], data["input_lengths"]
        logits = self.model(ids, attention_mask=data["attention_mask"]).logits
        logprobs = (logits / data["temperature"]).log_softmax(-1)
        last = logprobs[torch.arange(len(ids)), lengths - 1]
        drawn = last.argmax(-1) if greedy else torch.multinomial(last.exp(), 1)[:, 0]
        output = torch.nn.functional.pad(ids, (0, 1))
        all_logprobs = torch.zeros(output.shape)
        rows = torch.arange(len(ids))
        output[rows, lengths] = drawn
        all_logprobs[rows, lengths] = last[rows, drawn]
        return BatchedDataDict(
            {
                "output_ids": output,
                "generation_lengths": torch.ones_like(lengths),
                "unpadded_sequence_lengths": lengths + 1,
                "logprobs": all_logprobs,
            }
        )


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers both backends for one test only."""
    for registry in (_TRAINING_BACKENDS, _GENERATION_BACKENDS):
        monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    for table in (TRAINING_SECTIONS, GENERATION_SECTIONS):
        monkeypatch.setattr(table, "_classes", dict(table._classes))
    register_training_backend("scaled", config=ScaledTraining)(ScaledBackend)
    register_generation_backend("plain_loop")(PlainLoop)


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
def test_registered_backends_train_and_sample(session: ClusterSession, tiny_model: Path) -> None:
    result = train(
        tiny_model,
        ROWS,
        reward_fn=lambda prompt, response: float(len(response)),
        training={"backend": "scaled", "factor": 0.5},
        generation={"backend": "plain_loop", "max_new_tokens": 4},
        **SMALL,
    )
    assert [step["factor"] for step in result.metrics] == [0.5, 0.5]
    assert all(step["token_mult_prob_error"] < 1.001 for step in result.metrics)
    assert result.manifest.config["training"]["factor"] == 0.5
    assert result.manifest.config["generation"]["backend"] == "plain_loop"


@pytest.mark.slow
def test_a_custom_engine_samples_with_the_weights_of_each_step(
    session: ClusterSession, tiny_model: Path
) -> None:
    engine = OwnEngine(tiny_model)
    before = engine.model.state_dict()["model.embed_tokens.weight"].clone()
    trainer = GRPOTrainer.from_pretrained(
        tiny_model, generation=engine, max_new_tokens=4, learning_rate=0.01, **SMALL
    )
    result = trainer.fit(ROWS, reward_fn=lambda prompt, response: float(sum(map(ord, response))))
    # The gate compares both sides' logprobs: old weights would exceed its bound.
    assert all(step["token_mult_prob_error"] < 1.001 for step in result.metrics)
    assert engine.num_updates >= 2
    assert not torch.equal(before, engine.model.state_dict()["model.embed_tokens.weight"])


@pytest.mark.thorough
def test_a_running_engine_is_passed_to_a_trainer(session: ClusterSession, tiny_model: Path) -> None:
    engine = HuggingFaceGeneration(tiny_model, session, max_new_tokens=3)
    trainer = GRPOTrainer.from_pretrained(tiny_model, generation=engine, **SMALL)
    assert trainer.settings.generation.max_new_tokens == 3
    result = trainer.fit(ROWS, reward_fn=lambda prompt, response: float(len(response)))
    assert all(step["completion_length_max"] <= 3 for step in result.metrics)
    engine.shutdown()


@pytest.mark.thorough
def test_the_batches_of_the_documents_go_through_a_policys_methods(
    session: ClusterSession, tiny_model: Path
) -> None:
    policy = HuggingFacePolicy(tiny_model, session, max_new_tokens=4, learning_rate=1e-3)
    batch = BatchedDataDict(PROMPTS)
    all_logprobs = policy.get_logprobs(batch)["logprobs"]
    assert all_logprobs.shape == (2, 3)
    assert all_logprobs[1, 2] == 0
    generations = policy.generate(batch)
    logprobs = policy.get_logprobs(generations)["logprobs"]
    assert logprobs == pytest.approx(generations["logprobs"][:, 1:], abs=1e-4)
    assert torch.equal(policy.get_reference_logprobs(generations)["logprobs"], logprobs)
    generations["advantages"] = torch.tensor([1.0, 1.0])
    metrics = policy.train(generations, GRPOLossFn())
    assert metrics["loss"] == pytest.approx(-1.0, abs=1e-5)  # ratio 1, and no KL yet
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    policy.shutdown()

    policy = HuggingFacePolicy(tiny_model, session)
    pair = {"pair_ids": torch.tensor([0, 0]), "is_chosen": torch.tensor([True, False])}
    loss = policy.train(BatchedDataDict({**PROMPTS, **pair}), DPOLossFn())
    assert loss["loss"] == pytest.approx(math.log(2), abs=1e-6)
    policy.shutdown()


@pytest.mark.thorough
def test_a_pipeline_is_composed_of_its_parts(
    session: ClusterSession, tiny_model: Path, engine: VllmGeneration
) -> None:
    policy = HuggingFacePolicy(model_name=str(tiny_model), cluster=session)
    generator = engine
    environment = MathEnvironment()
    dataloader = BatchedDataLoader(ROWS[:4], batch_size=2, tokenizer=load_tokenizer(tiny_model))
    for batch in dataloader:
        generations = generator.generate(batch)
        rewards = environment.step(generations)
        metrics = policy.train(generations, rewards)
        assert generations["answer"] == batch["answer"]
        assert len(generations["completions"]) == len(rewards) == 2
        assert math.isfinite(metrics["loss"])
        assert metrics["num_valid_tokens"] == generations["generation_lengths"].sum()
    environment.close()
    policy.shutdown()


@pytest.mark.thorough
def test_a_megatron_policy_generates_from_what_it_has_learnt(
    session: ClusterSession, tiny_model: Path
) -> None:
    policy = MegatronPolicy(tiny_model, session, max_new_tokens=4, learning_rate=0.01)
    batch = BatchedDataDict(PROMPTS)
    first = policy.generate(batch, greedy=False)
    assert policy.get_logprobs(first)["logprobs"] == pytest.approx(
        first["logprobs"][:, 1:], abs=1e-4
    )
    first["advantages"] = torch.tensor([1.0, 1.0])
    policy.train(first, GRPOLossFn())
    again = policy.generate(batch, greedy=False)
    # The engine has the new weights.
    assert policy.get_logprobs(again)["logprobs"] == pytest.approx(
        again["logprobs"][:, 1:], abs=1e-4
    )
    policy.shutdown()
