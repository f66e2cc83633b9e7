"""A custom policy in a trainer: the document's class, which trains its weights itself."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core import (
    AsyncGRPOTrainer,
    DistillationTrainer,
    DPOTrainer,
    GRPOTrainer,
    PPOTrainer,
    RewardModelTrainer,
    SFTTrainer,
    train,
)
from nemo_rl_core.config.generation import GENERATION_SECTIONS
from nemo_rl_core.config.training import TRAINING_SECTIONS
from nemo_rl_core.distributed import BatchedDataDict
from nemo_rl_core.errors import ConfigError, DataError, MissingColumnError
from nemo_rl_core.models.generation.custom import CustomEngineAdapter
from nemo_rl_core.models.generation.interfaces import GenerationInterface
from nemo_rl_core.models.interfaces import PolicyInterface
from nemo_rl_core.models.policy.custom import CustomPolicyAdapter

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
def test_grpo_samples_from_the_policy_itself(tiny_model: Path) -> None:
    result = train(
        CustomPolicy(str(tiny_model)),
        ROWS,
        reward_fn=lambda prompt, completion: float(len(completion)),
        loss={"kl": None},
        **ROLLOUTS,
    )
    assert [step["token_mult_prob_error"] for step in result.metrics] == [1.0, 1.0]
    assert result.metrics[0]["completion_length_max"] <= 4
    assert result.metrics[0]["reward"] > 0


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


def test_ppo_with_a_custom_policy_and_critic(tiny_model: Path) -> None:
    policy, critic = CustomPolicy(str(tiny_model)), Critic(str(tiny_model))
    before = critic._head.weight.clone()
    result = PPOTrainer(policy, critic=critic, kl=None, **ROLLOUTS).fit(
        ROWS, reward_fn=lambda prompt, completion: float(len(completion))
    )
    assert [step["token_mult_prob_error"] for step in result.metrics] == [1.0, 1.0]
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
    return CustomEngineAdapter(source, config, stop_token_ids=(2,))


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
    expected = unpadded[0, 2, first["output_ids"][0, 3]]
    assert first["logprobs"][0, 3].item() == pytest.approx(expected.item(), abs=1e-5)
    assert (first["logprobs"][:, :3] == 0).all()


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
    """An engine that accepts no weights."""

    update_weights = None  # type: ignore[assignment]


def test_settings_that_a_custom_policy_does_not_read_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="nothing reads dtype, learning_rate"):
        SFTTrainer(OnlyTrains(), dtype="bfloat16", sft={"learning_rate": 1e-5})
    with pytest.raises(ConfigError, match="ppo takes a custom policy and a custom critic"):
        PPOTrainer(Samples(), kl=None)
    with pytest.raises(ConfigError, match="the critic OnlyTrains has no get_values"):
        PPOTrainer(Samples(), critic=OnlyTrains(), kl=None)
    with pytest.raises(ConfigError, match=r"OnlyTrains.get_values\(batch\): values of sequences"):
        RewardModelTrainer(OnlyTrains())
    with pytest.raises(ConfigError, match=r"OnlyTrains\.get_reference_topk_logprobs"):
        DistillationTrainer(OnlyTrains())
    with pytest.raises(ConfigError, match="does not accept a custom policy: the engine samples"):
        AsyncGRPOTrainer(OnlyTrains(), asynchronous={})
    with pytest.raises(ConfigError, match="does not sample, so it accepts no engine"):
        SFTTrainer.from_pretrained("m", generation=Recited())
    with pytest.raises(ConfigError, match="nothing reads top_k"):
        engine_of(Recited(), top_k=3)
    with pytest.raises(ConfigError, match="would sample from the weights that training began"):
        engine_of(Frozen())
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
