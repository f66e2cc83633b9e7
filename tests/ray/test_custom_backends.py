"""Custom backends, engines and batches with real workers."""

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core import GRPOTrainer, PPOTrainer, train
from nemo_rl_core.algorithms import DPOLossFn, GRPOLossFn
from nemo_rl_core.backends import register_generation_backend, register_training_backend
from nemo_rl_core.backends.generation.base import _GENERATION_BACKENDS, GenerationBackend
from nemo_rl_core.backends.generation.hugging_face import HuggingFaceBackend
from nemo_rl_core.backends.training.base import _TRAINING_BACKENDS
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.generation import GENERATION_SECTIONS
from nemo_rl_core.config.training import TRAINING_SECTIONS, DTensorTraining, RegisteredTraining
from nemo_rl_core.data import BatchedDataLoader
from nemo_rl_core.data.pretrained import load_tokenizer, stop_token_ids
from nemo_rl_core.distributed import BatchedDataDict
from nemo_rl_core.distributed.batched_data_dict import collate
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments import MathEnvironment
from nemo_rl_core.functional.custom_loss import CheckedLoss
from nemo_rl_core.models import HuggingFaceGeneration, HuggingFacePolicy, MegatronPolicy
from nemo_rl_core.models.generation import VllmGeneration
from nemo_rl_core.models.generation.interfaces import GenerationInterface
from tests.unit.trainers.test_own_policy import PolicyWithReference

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


class CustomGenerationBackend(GenerationBackend):  # type: ignore[misc]
    """The class of document 002, completed as a reader would; draws one token per prompt."""

    def setup(self, config: dict[str, Any]) -> None:  # type: ignore[override]
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(config["model_name"])
        self.tokenizer = AutoTokenizer.from_pretrained(config["model_name"])

    @torch.no_grad()
    def generate(self, prompts: Any, sampling_params: Any) -> list[Any]:  # type: ignore[override]
        responses = []
        for prompt, seed in zip(prompts, sampling_params["seeds"], strict=True):
            logits = self.model(torch.tensor([prompt])).logits[0, -1]
            logprobs = (logits / (sampling_params["temperature"] or 1)).log_softmax(-1)
            generator = torch.Generator().manual_seed(seed)
            drawn = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
            responses.append({"token_ids": [drawn], "logprobs": [logprobs[drawn]]})
        return responses

    def update_weights(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.model.load_state_dict(state_dict)

    def shutdown(self) -> None:
        """Nothing to release."""


class OfTexts(CustomGenerationBackend):
    """Returns texts instead of tokens and logprobs."""

    def generate(self, prompts: Any, sampling_params: Any) -> list[Any]:  # type: ignore[override]
        made = super().generate(prompts, sampling_params)
        return [self.tokenizer.decode(each["token_ids"]) for each in made]


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
        self.model.load_state_dict(policy.state_dict())
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
    register_generation_backend("custom")(CustomGenerationBackend)
    register_generation_backend("of_texts")(OfTexts)


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
@pytest.mark.usefixtures("registered")
def test_the_documents_backend_samples_with_the_weights_of_each_step(
    session: ClusterSession, tiny_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def metrics(backend: str) -> list[dict[str, float]]:
        trainer = GRPOTrainer.from_pretrained(
            tiny_model, generation={"backend": backend}, learning_rate=0.01, **SMALL
        )
        return trainer.fit(ROWS, reward_fn=lambda prompt, response: float(len(response))).metrics

    for step in metrics("custom"):
        assert step["token_mult_prob_error"] < 1.001
        assert "num_compared_sequences" not in step
    for step in metrics("of_texts"):
        assert step["num_compared_sequences"] == 0
        assert "token_mult_prob_error" not in step
    logged = capfd.readouterr().err
    assert logged.count("of_texts returns no logprobs: nothing checks its weights") == 1
    assert logged.count("the gate has nothing to compare") == 1


@pytest.mark.thorough
def test_ppo_trains_a_custom_policy_with_a_critic_in_workers(
    session: ClusterSession, tiny_model: Path
) -> None:
    policy = PolicyWithReference(str(tiny_model))
    trainer = PPOTrainer(policy, max_new_tokens=4, critic={"learning_rate": 0.01}, **SMALL)
    result = trainer.fit(ROWS, reward_fn=lambda prompt, response: float(len(response)))
    assert result.metrics[1]["value_loss"] > 0
    assert result.metrics[1]["critic_grad_norm"] > 0
    assert (result.folder / "model" / "model.safetensors").is_file()


SCRIPT = """
import sys
from nemo_rl_core import Callback, SFTTrainer
from tests.unit.trainers.test_own_policy import ROWS, CustomPolicy as Documented


class CustomPolicy(Documented):
    def save_checkpoint(self, path):
        self.model.save_pretrained(path / "model")

    def load_checkpoint(self, path):
        self.__init__(str(path / "model"))


class Interrupts(Callback):
    def on_step_end(self, trainer, step, metrics):
        if step == 2 and "interrupt" in sys.argv:
            raise SystemExit("interrupted")


if __name__ == "__main__":
    policy = CustomPolicy(sys.argv[1])
    trainer = SFTTrainer(policy, num_steps=3, global_batch_size=4, save_every_num_steps=1)
    result = trainer.fit(ROWS, name="mine", callbacks=[Interrupts()])
    print(result.lineage_id, result.manifest.config["training"]["backend"])
"""


@pytest.mark.slow
def test_a_policy_of_a_script_resumes_and_is_cached_by_name(
    tiny_model: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, str(script), str(tiny_model), *arguments],
            env={
                **os.environ,
                "NEMO_RL_HOME": str(tmp_path / "store"),
                "PYTHONPATH": str(Path(__file__).parents[2]),
            },
            capture_output=True,
            text=True,
            check=False,
        )

    interrupted, resumed, cached = run("interrupt"), run(), run()
    steps = [
        [step for step in (1, 2, 3) if f"sft {step}/3" in each.stdout + each.stderr]
        for each in (interrupted, resumed, cached)
    ]
    assert steps == [[1, 2], [2, 3], []], resumed.stderr[-2000:]
    last = resumed.stdout.splitlines()[-1]
    assert last.endswith(" __main__.CustomPolicy")
    assert cached.stdout.splitlines()[-1] == last


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


def test_running_workers_import_a_loss_from_a_folder_added_later(
    make_policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = make_policy().workers
    (tmp_path / "a_loss.py").write_text(
        "def loss(logprobs, batch, *, global_valid_seqs, global_valid_tokens):\n"
        "    return -3 * logprobs[batch['token_mask']].sum() / global_valid_tokens, {}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    loss = importlib.import_module("a_loss").loss
    policy = make_policy()
    assert policy.workers is workers
    batch = collate([(1, 5, 6), (1, 5, 7)], [(False, True, True)] * 2)
    logprobs = policy.get_logprobs(batch)["logprobs"][batch["token_mask"]]
    expected = -3 * logprobs.mean().item()
    assert policy.train(batch, CheckedLoss(loss, "a"))["loss"] == pytest.approx(expected, rel=1e-5)
