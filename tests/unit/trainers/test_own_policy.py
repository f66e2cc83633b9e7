"""A custom policy in a trainer: the document's class, which trains its weights itself."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl_core import (
    DistillationTrainer,
    DPOTrainer,
    GRPOTrainer,
    PPOTrainer,
    RewardModelTrainer,
    SFTTrainer,
    train,
)
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.config.generation import GENERATION_SECTIONS
from nemo_rl_core.config.training import TRAINING_SECTIONS
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed import BatchedDataDict
from nemo_rl_core.errors import ConfigError, ConsistencyError, DataError, MissingColumnError
from nemo_rl_core.models.columns import joined_outputs
from nemo_rl_core.models.generation.custom import CustomEngineAdapter
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.generation.interfaces import GenerationInterface
from nemo_rl_core.models.interfaces import PolicyInterface
from nemo_rl_core.models.policy.custom import CustomPolicyAdapter
from nemo_rl_core.rollouts.batch import with_logprobs_of
from nemo_rl_core.rollouts.engine import SingleTurnRollouts
from nemo_rl_core.types import Prompt

ROWS = [
    {"prompt": f"{a}+{b}=", "answer": str(a + b), "completion": str(a + b)}
    for a in range(3, 9)
    for b in range(7)
]
PAIRS = [{"prompt": r["prompt"], "chosen": r["answer"], "rejected": "0"} for r in ROWS]
ROLLOUTS = {
    "max_new_tokens": 4,
    "max_prompt_tokens": 16,
    "num_prompts_per_step": 3,
    "num_generations_per_prompt": 2,
    "num_steps_per_iteration": 2,
}


class CustomPolicy(PolicyInterface):
    """The class of document 004, with an optimizer."""

    def __init__(self, model_path: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model_path)
        self.model_name = model_path
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict:
        input_ids = data["input_ids"]
        outputs = self.model.generate(
            input_ids,
            max_new_tokens=data.get("max_new_tokens", 100),
            do_sample=not greedy,
            temperature=data.get("temperature", 0.7),
        )
        lengths = [len(o) - len(i) for o, i in zip(outputs, input_ids, strict=True)]
        return BatchedDataDict(
            {
                "output_ids": outputs,
                "generation_lengths": torch.tensor(lengths),
                "unpadded_sequence_lengths": torch.tensor([len(o) for o in outputs]),
            }
        )

    def get_logprobs(self, data: Any) -> BatchedDataDict:
        with torch.no_grad():
            outputs = self.model(data["input_ids"])
            logprobs = torch.log_softmax(outputs.logits, dim=-1)
        return BatchedDataDict({"logprobs": logprobs})

    def train(self, data: Any, loss_fn: Any) -> dict[str, Any]:
        loss = loss_fn(self.model, data)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {"loss": loss.item()}


class PolicyWithReference(CustomPolicy):
    """Also compares with the initial model, and saves its weights."""

    def __init__(self, model_path: str) -> None:
        super().__init__(model_path)
        self._reference = CustomPolicy(model_path)

    def get_reference_logprobs(self, data: Any) -> BatchedDataDict:
        return self._reference.get_logprobs(data)

    def save_checkpoint(self, path: Path) -> None:
        self.model.save_pretrained(path / "model")


@pytest.fixture(autouse=True)
def _tables_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (TRAINING_SECTIONS, GENERATION_SECTIONS):
        monkeypatch.setattr(table, "_classes", dict(table._classes))


@pytest.mark.slow
def test_sft_trains_a_custom_policy(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    policy = CustomPolicy(str(tiny_model))
    result = SFTTrainer(policy, num_steps=6, global_batch_size=8).fit(ROWS)
    losses = [step["loss"] for step in result.metrics]
    assert losses[-1] < 0.95 * losses[0]
    assert "CustomPolicy has no save_checkpoint" in capfd.readouterr().err
    assert result.manifest.config["training"]["backend"] == f"{__name__}.CustomPolicy"


@pytest.mark.slow
def test_dpo_uses_the_custom_reference_and_keeps_the_weights(tiny_model: Path) -> None:
    policy = PolicyWithReference(str(tiny_model))
    trainer = DPOTrainer(policy, num_steps_per_iteration=2, num_pairs_per_step=4)
    result = trainer.train(PAIRS)
    assert result.metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert result.metrics[1]["loss"] < math.log(2)
    assert (result.checkpoint / "model.safetensors").is_file()


@pytest.mark.slow
def test_grpo_samples_from_the_policy_itself(
    tiny_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = train(
        CustomPolicy(str(tiny_model)),
        ROWS,
        reward_fn=lambda prompt, completion: float(len(completion)),
        loss={"kl": None},
        **ROLLOUTS,
    )
    # It returns no logprobs, so there is nothing to compare.
    assert [step["num_compared_sequences"] for step in result.metrics] == [0, 0]
    assert not result.metrics[0].keys() & {"token_mult_prob_error", "kl_generation_trainer"}
    assert capfd.readouterr().err.count("the gate has nothing to compare") == 1
    assert result.metrics[0]["completion_length_max"] <= 4
    assert result.metrics[0]["reward"] > 0


def test_batches_have_the_columns_of_the_document_next_to_ours(tiny_model: Path) -> None:
    class Recorder(CustomPolicy):
        def train(self, data: Any, loss_fn: Any) -> dict[str, Any]:
            batches.append(data)
            part = data.slice(0, 2)  # also in parts of a step
            return super().train(part, loss_fn)

    batches: list[BatchedDataDict] = []
    trainer = SFTTrainer(Recorder(str(tiny_model)), num_steps=1, global_batch_size=4)
    trainer.fit(ROWS)
    (batch,) = batches
    assert batch["attention_mask"].sum(dim=1).tolist() == batch["input_lengths"].tolist()
    assert batch["__extra__"] == [{}] * batch.size


def test_the_loss_of_a_model_derives_its_attention_mask(tiny_model: Path) -> None:
    losses: list[float] = []

    class Trimmed(CustomPolicy):
        def train(self, data: Any, loss_fn: Any) -> dict[str, Any]:
            wide = dict(data, input_ids=torch.nn.functional.pad(data["input_ids"], (0, 2)))
            wide["token_mask"] = torch.nn.functional.pad(data["token_mask"], (0, 2))
            masked = {name: each for name, each in data.items() if name != "attention_mask"}
            losses.extend(loss_fn(self.model, each).item() for each in (data, masked, wide))
            return {}

    SFTTrainer(Trimmed(str(tiny_model)), num_steps=1, global_batch_size=4).fit(ROWS)
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-5)


def test_a_run_is_known_by_the_state_of_its_policy(tiny_model: Path) -> None:
    slow, again = CustomPolicy(str(tiny_model)), CustomPolicy(str(tiny_model))
    fast = CustomPolicy(str(tiny_model))
    fast._optimizer.param_groups[0]["lr"] = 1e-2

    def trained(policy: CustomPolicy) -> Path:
        trainer = SFTTrainer(policy, num_steps=1, global_batch_size=4)
        first = trainer.fit(ROWS, name="mine")
        assert trainer.fit(ROWS, name="mine").folder == first.folder  # although it has changed
        return first.folder

    assert trained(slow) == trained(again) != trained(fast)


class Critic(CustomPolicy):
    """A scalar head on a transformers model."""

    def __init__(self, model_path: str) -> None:
        super().__init__(model_path)
        torch.manual_seed(1)  # some heads learn little in six steps
        self._head = torch.nn.Linear(self.model.config.hidden_size, 1)
        parameters = [*self.model.parameters(), *self._head.parameters()]
        self._optimizer = torch.optim.AdamW(parameters, lr=1e-2)

    def _values(self, data: Any) -> torch.Tensor:
        hidden = self.model(data["input_ids"], output_hidden_states=True).hidden_states[-1]
        return self._head(hidden)[..., 0]

    def get_values(self, data: Any) -> BatchedDataDict:
        return BatchedDataDict({"values": self._values(data).detach()})

    def train(self, data: Any, loss_fn: Any) -> dict[str, Any]:
        loss, _ = loss_fn(self._values(data), data)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return {}


class Student(CustomPolicy):
    """Has a teacher that prefers the token 5."""

    def get_reference_topk_logprobs(self, data: Any, k: int) -> BatchedDataDict:
        ids = torch.stack([torch.full_like(data["input_ids"][:, 1:], 5 + n) for n in range(k)], -1)
        logprobs = torch.tensor([0.9] + [0.1 / k] * (k - 1)).log().expand(ids.shape)
        return BatchedDataDict({"topk_ids": ids, "topk_logprobs": logprobs})


@pytest.mark.slow
def test_a_custom_reward_model_is_trained(tiny_model: Path) -> None:
    trainer = RewardModelTrainer(Critic(str(tiny_model)), num_steps=6, num_pairs_per_step=8)
    losses = [step["loss"] for step in trainer.fit(PAIRS).metrics]
    assert losses[-1] < 0.5 * losses[0]
    by_model = type("ByModel", (Critic,), {"train": CustomPolicy.train})(str(tiny_model))
    with pytest.raises(ConfigError, match="the loss reads values, which it cannot ask"):
        RewardModelTrainer(by_model, num_steps=1, num_pairs_per_step=8).fit(PAIRS)


@pytest.mark.slow
def test_a_custom_student_is_distilled_from_its_teacher(tiny_model: Path) -> None:
    student = Student(str(tiny_model))
    few = {name: value for name, value in ROLLOUTS.items() if name != "num_steps_per_iteration"}
    trainer = DistillationTrainer(student, **few, num_steps=8, distillation={"top_k": 3})
    losses = [step["loss"] for step in trainer.fit(ROWS).metrics]
    assert losses[-1] < 0.8 * losses[0]
    with pytest.raises(ConfigError, match="cannot be combined with reference"):
        DistillationTrainer(student, **few).fit(ROWS, reference=tiny_model)


def test_all_logprobs_of_a_reference_are_a_teacher(tiny_model: Path) -> None:
    policy = PolicyWithReference(str(tiny_model))
    few = {name: value for name, value in ROLLOUTS.items() if name != "num_steps_per_iteration"}
    DistillationTrainer(policy, **few, num_steps=1, distillation={"top_k": 3}).fit(ROWS)
    adapter = CustomPolicyAdapter(policy, temperature=0.5)
    best = adapter.get_reference_topk_logprobs(BatchedDataDict(PROMPTS), 2)
    logits = policy._reference.model(PROMPTS["input_ids"]).logits[1, 0]
    values, ids = (logits / 0.5).log_softmax(-1).topk(2)
    assert best["topk_ids"][1, 0].tolist() == ids.tolist()
    assert best["topk_logprobs"][1, 0] == pytest.approx(values.detach(), abs=1e-5)
    assert (best["topk_logprobs"][0, 2] == 0).all()  # padding
    policy.get_reference_logprobs = lambda data: {"logprobs": torch.zeros(2, 3)}  # type: ignore[method-assign,assignment]
    with pytest.raises(ConfigError, match="does not show the teacher's likeliest tokens"):
        adapter.get_reference_topk_logprobs(BatchedDataDict(PROMPTS), 2)


def test_distillation_refuses_a_backend_without_logprobs() -> None:
    class OfTexts(Generation):
        config: Any = SimpleNamespace(backend="of_texts")

        def __init__(self) -> None: ...
        def update_weights(self, policy: Any) -> None: ...

        def prove(self, policy: Any) -> float:
            return agreement

    sampler: Any = SimpleNamespace(generation=OfTexts())
    trainer = DistillationTrainer("m")
    trainer.policy = Student.__new__(Student)
    agreement = 1.0
    trainer._update_weights(sampler, last_step=0)
    agreement = math.nan
    with pytest.raises(ConfigError, match="the engine of_texts returns no logprobs"):
        trainer._update_weights(sampler, last_step=0)


def test_ppo_with_a_custom_policy_and_critic(tiny_model: Path) -> None:
    policy, critic = CustomPolicy(str(tiny_model)), Critic(str(tiny_model))
    before = critic._head.weight.clone()
    result = PPOTrainer(policy, critic=critic, kl=None, **ROLLOUTS).fit(
        ROWS, reward_fn=lambda prompt, completion: float(len(completion))
    )
    assert [step["num_compared_sequences"] for step in result.metrics] == [0, 0]
    assert {"policy_source", "critic_source"} <= result.manifest.config.keys()
    assert result.metrics[0]["value_loss"] > 0
    assert not torch.equal(critic._head.weight, before)


class Recited(GenerationInterface):
    """Answers 5 and the stop token 2, and records the policies of its weights."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def finish_generation(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to release."""

    def update_weights(self, policy: Any) -> None:
        self.given.append(policy)

    def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict:
        ids, lengths = data["input_ids"], data["input_lengths"]
        output = torch.nn.functional.pad(ids, (0, 3))
        for row, length in enumerate(lengths.tolist()):
            output[row, length : length + 3] = torch.tensor([5, 2, 7])
        return BatchedDataDict(
            {
                "output_ids": output,
                "generation_lengths": torch.full_like(lengths, 3),
                "unpadded_sequence_lengths": lengths + 3,
                "logprobs": torch.zeros(output.shape),
            }
        )


PROMPTS = {
    "input_ids": torch.tensor([[1, 5, 6, 0], [1, 5, 6, 7]]),
    "input_lengths": torch.tensor([3, 4]),
    "seeds": torch.tensor([0, 1]),
}


def engine_of(source: Any, **settings: Any) -> CustomEngineAdapter:
    from nemo_rl_core.config.generation import HuggingFaceGenerationConfig

    config = HuggingFaceGenerationConfig(**{"max_new_tokens": 8, **settings})
    setup = GenerationSetup(Path("unused"), config, max_model_len=64, stop_token_ids=(2,))
    return CustomEngineAdapter(source, setup)


def test_a_completion_ends_with_its_first_stop_token_or_at_its_limit() -> None:
    output = engine_of(Recited()).generate(BatchedDataDict(PROMPTS))
    assert output["generation_lengths"].tolist() == [2, 2]
    assert output["truncated"].tolist() == [False, False]
    limits = {"max_new_tokens": torch.tensor([1, 8])}
    output = engine_of(Recited()).generate(BatchedDataDict({**PROMPTS, **limits}))
    assert output["unpadded_sequence_lengths"].tolist() == [4, 6]
    assert output["truncated"].tolist() == [True, False]


def test_a_policy_gets_no_padding_and_reruns_draw_the_same(tiny_model: Path) -> None:
    policy = CustomPolicy(str(tiny_model))
    engine = engine_of(CustomPolicyAdapter(policy))
    first, again = (engine.generate(BatchedDataDict(PROMPTS)) for _ in range(2))
    assert torch.equal(first["output_ids"], again["output_ids"])
    unpadded = policy.get_logprobs({"input_ids": first["output_ids"][:1, :4]})["logprobs"]
    assert "logprobs" not in first
    prompt = Prompt("p", "", (1, 5, 6), "", "")
    rollouts = SingleTurnRollouts(engine, load_tokenizer(tiny_model), seed=0)
    drawn = rollouts.run([prompt], num_generations_per_prompt=2, step=1)
    assert not rollouts.has_logprobs
    assert math.isnan(drawn[0].completion.logprobs[0])
    completion = with_logprobs_of(CustomPolicyAdapter(policy), drawn)[0].completion
    expected = unpadded[0, 2, completion.token_ids[0]]
    assert completion.logprobs[0] == pytest.approx(expected.item(), abs=1e-5)


def test_an_engine_gets_all_prompts_in_one_call_and_a_policy_those_of_one_length() -> None:
    calls: list[list[list[int]]] = []

    class Recorded(Recited):
        def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict:
            calls.append(data["attention_mask"].tolist())
            return super().generate(data)

    class RecordedPolicy(OnlyTrains):
        def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict:
            return Recorded().generate(data)

    class Unaware(Recited):
        def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict:
            ids = data["input_ids"]
            padded = BatchedDataDict(
                {"input_ids": ids, "input_lengths": torch.full((len(ids),), ids.shape[1])}
            )
            return super().generate(padded)

    output = engine_of(Recorded()).generate(BatchedDataDict(PROMPTS))
    assert calls == [[[1, 1, 1, 0], [1, 1, 1, 1]]]
    engine_of(CustomPolicyAdapter(RecordedPolicy())).generate(BatchedDataDict(PROMPTS))
    assert calls[1:] == [[[1, 1, 1]], [[1, 1, 1, 1]]]
    assert output["output_ids"][0, :5].tolist() == [1, 5, 6, 5, 2]
    with pytest.raises(DataError, match="does not begin with the prompts") as refused:
        engine_of(Unaware()).generate(BatchedDataDict(PROMPTS))
    assert "padding is on the right" in str(refused.value)


def test_logprobs_of_some_calls_only_are_dropped() -> None:
    class Sometimes(OnlyTrains):
        def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict:
            output = Recited().generate(data)
            if data["input_lengths"][0] == 3:
                del output["logprobs"]
            return output

    output = engine_of(CustomPolicyAdapter(Sometimes())).generate(BatchedDataDict(PROMPTS))
    assert "logprobs" not in output
    assert output["unpadded_sequence_lengths"].tolist() == [5, 6]
    # A restarted engine with no rows does not know yet that there are no logprobs.
    empty = Recited().generate(BatchedDataDict(PROMPTS)).slice(0, 0)
    del output["truncated"]
    assert joined_outputs([output, empty])["output_ids"].tolist() == output["output_ids"].tolist()


def test_an_output_without_its_columns_is_refused() -> None:
    class Silent(Recited):
        def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict:
            return BatchedDataDict({"output_ids": data["input_ids"]})

    class Forgetful(Recited):
        def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict:
            output = super().generate(data)
            return BatchedDataDict({**output, "output_ids": output["output_ids"] + 1})

    with pytest.raises(MissingColumnError, match="'generation_lengths', 'unpadded_sequence_le"):
        engine_of(Silent()).generate(BatchedDataDict(PROMPTS))
    with pytest.raises(DataError, match="does not begin with the prompts"):
        engine_of(Forgetful()).generate(BatchedDataDict(PROMPTS))


class OnlyTrains(PolicyInterface):
    """The minimal class of document 000."""

    model_name = "m"

    def train(self, data: Any, loss_fn: Any) -> dict[str, Any]:
        return {"loss": 0.0}


class Samples(OnlyTrains):
    """Has the methods that GRPO and PPO call without a reference."""

    def generate(self, data: Any, greedy: bool = False) -> Any: ...
    def get_logprobs(self, data: Any) -> Any: ...


class Frozen(Recited):
    """An engine that accepts no weights, and returns no logprobs."""

    update_weights = None  # type: ignore[assignment]

    def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict:
        output = super().generate(data)
        del output["logprobs"]
        return output


class ByStateDict(Recited):
    """Takes the weights as a state dict."""

    def update_weights(self, state_dict: Any) -> None:
        self.given.append(state_dict)


class CustomGeneration(GenerationInterface):
    """The class of document 004, with its three methods, completed as a reader would."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict:
        ids, rows = data["input_ids"], torch.arange(len(data["input_ids"]))
        logits = self.model(ids, attention_mask=data["attention_mask"]).logits[:, -1]
        all_logprobs = (logits / data["temperature"]).log_softmax(-1)
        drawn = torch.multinomial(all_logprobs.exp(), 1)[:, 0]
        lengths = torch.full((len(ids),), ids.shape[1])
        logprobs = torch.nn.functional.pad(all_logprobs[rows, drawn][:, None], (ids.shape[1], 0))
        return BatchedDataDict(
            {
                "output_ids": torch.cat([ids, drawn[:, None]], dim=1),
                "generation_lengths": torch.ones_like(lengths),
                "unpadded_sequence_lengths": lengths + 1,
                "logprobs": logprobs,
                "__extra__": {"temperature": data["temperature"], "rows": data["__extra__"]},
            }
        )

    def prepare_for_generation(self) -> None:
        """Nothing to prepare."""

    def finish_generation(self) -> None:
        """Nothing to release."""


def test_an_engine_with_three_methods_trains_as_long_as_it_agrees(tiny_model: Path) -> None:
    def trained(policy: CustomPolicy, model: Any) -> list[float]:
        engine = CustomGeneration(model)
        settings = {**ROLLOUTS, "num_steps_per_iteration": 3, "max_new_tokens": 1}
        trainer = GRPOTrainer(policy, generation=engine, loss={"kl": None}, **settings)
        result = trainer.fit(
            ROWS, reward_fn=lambda prompt, completion: float(sum(map(ord, completion)))
        )
        return [step["token_mult_prob_error"] for step in result.metrics]

    policy = CustomPolicy(str(tiny_model))
    policy._optimizer.param_groups[0]["lr"] = 0.03
    initial = copy.deepcopy(policy.model)
    assert trained(policy, policy.model) == pytest.approx([1.0] * 3, abs=1e-4)
    policy.model.load_state_dict(initial.state_dict())
    with pytest.raises(ConsistencyError, match="the rollout engine and the trainer disagree"):
        trained(policy, initial)


def test_an_engine_gets_a_policy_or_its_weights_by_the_name_of_its_parameter(
    tiny_model: Path,
) -> None:
    policy = CustomPolicy(str(tiny_model))
    policy.state_dict = policy.model.state_dict  # type: ignore[attr-defined]
    by_policy, by_weights = Recited(), ByStateDict()
    for engine in (by_policy, by_weights):
        engine_of(engine).update_weights(CustomPolicyAdapter(policy))
    assert by_policy.given == [policy]
    assert by_weights.given[0].keys() == policy.model.state_dict().keys()


def test_settings_that_a_custom_policy_does_not_read_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="nothing reads dtype, learning_rate"):
        SFTTrainer(OnlyTrains(), dtype="bfloat16", sft={"learning_rate": 1e-5})
    with pytest.raises(ConfigError, match="ppo takes a custom critic only with a custom policy"):
        PPOTrainer("m", critic=Critic.__new__(Critic))
    with pytest.raises(ConfigError, match="'vllm' takes weights from a training backend's workers"):
        GRPOTrainer(Samples(), loss={"kl": None}, generation={"backend": "vllm"})
    with pytest.raises(ConfigError, match=r"Samples has no state_dict\(\), which ByStateDict"):
        GRPOTrainer(Samples(), loss={"kl": None}, generation=ByStateDict())
    with pytest.raises(ConfigError, match="the critic OnlyTrains has no get_values"):
        PPOTrainer(Samples(), critic=OnlyTrains(), kl=None)
    with pytest.raises(ConfigError, match=r"OnlyTrains.get_values\(batch\): values of sequences"):
        RewardModelTrainer(OnlyTrains())
    with pytest.raises(ConfigError, match=r"OnlyTrains\.get_reference_topk_logprobs"):
        DistillationTrainer(OnlyTrains())
    with pytest.raises(ConfigError, match="does not sample, so it accepts no engine"):
        SFTTrainer.from_pretrained("m", generation=Recited())
    with pytest.raises(ConfigError, match="nothing reads top_k"):
        engine_of(Recited(), top_k=3)
    with pytest.raises(ConfigError, match="Frozen takes no weights and returns no logprobs"):
        engine_of(Frozen()).generate(BatchedDataDict(PROMPTS))
    with pytest.raises(ConfigError, match="OnlyTrains has no generate"):
        engine_of(CustomPolicyAdapter(OnlyTrains()))
    nameless = type("Nameless", (Samples,), {"model_name": None})
    with pytest.raises(ConfigError, match="has no model to train") as refused:
        GRPOTrainer(nameless(), loss={"kl": None}).fit(ROWS)
    assert "GRPOTrainer(policy, model=FOLDER)" in str(refused.value)


@pytest.mark.parametrize(
    ("trainer", "settings", "methods"),
    [
        (GRPOTrainer, {}, ["generate", "get_logprobs", "get_reference_logprobs"]),
        (GRPOTrainer, {"loss": {"kl": None}}, ["generate", "get_logprobs"]),
        (GRPOTrainer, {"generation": Recited(), "loss": {"kl": None}}, ["get_logprobs"]),
        (PPOTrainer, {}, ["generate", "get_logprobs", "get_reference_logprobs"]),
        (DistillationTrainer, {}, ["generate", "get_reference_topk_logprobs"]),
        (SFTTrainer, {}, []),
        (SFTTrainer, {"validate_every_num_steps": 5}, ["get_logprobs"]),
        (DPOTrainer, {"loss": {"kind": "simpo"}}, []),
        (DPOTrainer, {"loss": {"kind": "kto"}}, ["get_logprobs", "get_reference_logprobs"]),
        (DPOTrainer, {}, ["get_reference_logprobs"]),
        (RewardModelTrainer, {}, ["get_values"]),
    ],
)
def test_all_missing_methods_of_a_policy_are_named_by_the_constructor(
    trainer: Any, settings: dict[str, Any], methods: list[str]
) -> None:
    if not methods:
        trainer(OnlyTrains(), **settings)
        return
    with pytest.raises(ConfigError, match="calls methods that OnlyTrains does not have") as caught:
        trainer(OnlyTrains(), **settings)
    expected = str(caught.value.expected).split("; ")
    assert [each.partition("(")[0] for each in expected] == [f"OnlyTrains.{m}" for m in methods]


def test_the_setting_that_needs_a_reference_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "def loss(logprobs, batch, *, global_valid_seqs, global_valid_tokens): ..."
    (tmp_path / "loss_with_reference.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    target = "loss_with_reference:loss"
    custom = {"kind": "function", "target": target, "needs_reference": True}
    for loss, setting in ((custom, "loss.needs_reference"), ({}, "loss.kl")):
        with pytest.raises(ConfigError) as refused:
            GRPOTrainer(Samples(), loss=loss)
        assert str(refused.value.expected).endswith(f"logprobs of the reference, for {setting}")


def test_a_loss_with_a_reference_requires_one(tiny_model: Path) -> None:
    batch = BatchedDataDict(PROMPTS)
    with pytest.raises(ConfigError, match="CustomPolicy does not have"):
        CustomPolicyAdapter(CustomPolicy(str(tiny_model))).get_reference_logprobs(batch)


def test_logprobs_of_another_temperature_follow_from_all_logits(tiny_model: Path) -> None:
    policy = CustomPolicy(str(tiny_model))
    logprobs = CustomPolicyAdapter(policy, temperature=0.5).get_logprobs(BatchedDataDict(PROMPTS))[
        "logprobs"
    ]
    logits = policy.model(PROMPTS["input_ids"]).logits / 0.5
    expected = logits.log_softmax(-1)[:, :-1].gather(-1, PROMPTS["input_ids"][:, 1:, None])[..., 0]
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert logprobs == pytest.approx(torch.where(mask, expected, 0.0).detach(), abs=1e-5)
