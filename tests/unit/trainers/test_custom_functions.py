"""Custom losses and advantages in trainers and recipes, without workers."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from nemo_rl_core import (
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    RewardModelTrainer,
    SFTConfig,
    SFTTrainer,
)
from nemo_rl_core.algorithms.grpo.advantage_config import LeaveOneOut
from nemo_rl_core.algorithms.grpo.asynchronous import AsyncGRPOTrainer
from nemo_rl_core.algorithms.grpo.config import Asynchronous, GRPOSettings
from nemo_rl_core.algorithms.grpo.loss_config import CustomPolicyLoss, GSPOLoss
from nemo_rl_core.algorithms.sft.config import SFTSettings
from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.config.generation import GENERATION_SECTIONS, HuggingFaceGenerationConfig
from nemo_rl_core.config.training import TRAINING_SECTIONS, MegatronTraining
from nemo_rl_core.errors import ConfigError, StoreError
from nemo_rl_core.functional.advantages import group_normalized
from nemo_rl_core.functional.loss_check import example_batch
from nemo_rl_core.functional.masked import masked_sum, valid_token_mask, zero_masked
from nemo_rl_core.functional.policy_gradient import clipped_surrogate, token_ratio
from nemo_rl_core.functional.preference import pair_rows
from nemo_rl_core.functional.value import gae
from nemo_rl_core.trainers.custom_functions import is_importable
from nemo_rl_core.trainers.fit.inputs import fit_call
from nemo_rl_core.trainers.fit.repeating import Repetition, repeat
from nemo_rl_core.trainers.fit.request import FitRequest, TrainerForFit
from tasks.local_run.preflight import preflight
from tasks.plan_tasks.dpo import plan_dpo
from tasks.plan_tasks.grpo import plan_grpo
from tasks.plan_tasks.ppo import plan_ppo
from tasks.plan_tasks.sft import plan_sft
from tasks.recipes.dpo import DPORecipe
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.ppo import PPORecipe
from tasks.recipes.sft import SFTRecipe
from tests.unit.trainers.test_own_policy import (
    PAIRS,
    ROLLOUTS,
    ROWS,
    Critic,
    CustomPolicy,
    PolicyWithReference,
)

SFT = {"num_steps": 2, "global_batch_size": 8}
DPO = {"num_steps_per_iteration": 2, "num_pairs_per_step": 4}


def nll(logprobs: Tensor, batch: Any, *, global_valid_seqs: Any, global_valid_tokens: Any) -> Any:
    mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    return masked_sum(-logprobs, mask, denominator=global_valid_tokens), {}


an_object = partial(nll)


def dpo(logprobs: Tensor, batch: Any, *, global_valid_seqs: Any, global_valid_tokens: Any) -> Any:
    mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    ratios = zero_masked(logprobs - batch["reference_logprobs"], mask).sum(dim=1)
    chosen, rejected, _ = pair_rows(batch["pair_ids"], batch["is_chosen"])
    margins = 0.1 * (ratios[chosen] - ratios[rejected])
    loss = -torch.nn.functional.logsigmoid(margins).sum() / (global_valid_seqs / 2)
    return loss, {"pairs": (margins * 0 + 1).sum() / (global_valid_seqs / 2)}


def clipped(logprobs: Tensor, batch: Any, **counts: Any) -> Any:
    mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    ratio = token_ratio(zero_masked(logprobs, mask), zero_masked(batch["prev_logprobs"], mask))
    values = clipped_surrogate(ratio, batch["advantages"], clip_low=0.2, clip_high=0.2)
    return masked_sum(values, mask, denominator=counts["global_valid_tokens"]), {}


def reward(prompt: str, completion: str) -> float:
    return float(len(completion))


@pytest.fixture(autouse=True)
def _tables_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (TRAINING_SECTIONS, GENERATION_SECTIONS):
        monkeypatch.setattr(table, "_classes", dict(table._classes))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Writes the module `my_functions` of the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def written(source: str) -> None:
        sys.modules.pop("my_functions", None)
        (tmp_path / "my_functions.py").write_text(source)

    yield written
    sys.modules.pop("my_functions", None)


def losses_of(trainer: Any, rows: Any, **options: Any) -> list[float]:
    return [step["loss"] for step in trainer.fit(rows, **options).metrics]


def test_sft_with_a_custom_loss_is_that_of_the_same_formula(tiny_model: Path) -> None:
    custom = SFTTrainer(CustomPolicy(str(tiny_model)), loss_fn=nll, **SFT)
    builtin = SFTTrainer(CustomPolicy(str(tiny_model)), **SFT)
    result = custom.fit(ROWS)
    assert [step["loss"] for step in result.metrics] == losses_of(builtin, ROWS)
    named = result.manifest.config
    assert named["sft"]["loss"]["target"] == f"{__name__}:nll" and named["loss_fn_source"]


def test_dpo_with_a_custom_loss_is_that_of_the_same_formula(tiny_model: Path) -> None:
    trainer = DPOTrainer(PolicyWithReference(str(tiny_model)), loss_fn=dpo, **DPO)
    result = trainer.fit(PAIRS)
    builtin = DPOTrainer(PolicyWithReference(str(tiny_model)), **DPO)
    losses = [step["loss"] for step in result.metrics]
    assert losses == pytest.approx(losses_of(builtin, PAIRS), abs=1e-6)
    assert [step["pairs"] for step in result.metrics] == [1.0, 1.0]


def test_grpo_with_a_custom_loss_and_advantage(tiny_model: Path) -> None:
    def of_sequences(rewards: Tensor, groups: Tensor) -> Tensor:
        return group_normalized(rewards, groups)

    def of_tokens(rewards: Tensor, groups: Tensor, token_mask: Tensor) -> Tensor:
        return group_normalized(rewards, groups)[:, None].expand(token_mask.shape)

    def run(**options: Any) -> list[float]:
        policy = CustomPolicy(str(tiny_model))
        trainer = GRPOTrainer(policy, **{"loss": {"kl": None}, **ROLLOUTS, **options})
        return losses_of(trainer, ROWS, reward_fn=reward)

    builtin = run()
    assert run(loss={}, loss_fn=clipped, advantage_fn=of_sequences) == builtin
    assert run(loss={}, loss_fn=clipped, advantage_fn=of_tokens) == builtin


def test_ppo_with_a_custom_loss_and_advantage(tiny_model: Path) -> None:
    def advantages(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return gae(rewards, values, mask, gamma=1.0, lam=0.95)

    def run(**options: Any) -> list[dict[str, float]]:
        policy, critic = CustomPolicy(str(tiny_model)), Critic(str(tiny_model))
        trainer = PPOTrainer(policy, critic=critic, kl=None, **ROLLOUTS, **options)
        metrics = trainer.fit(ROWS, reward_fn=reward).metrics
        return [{name: step[name] for name in ("loss", "value_loss")} for step in metrics]

    assert run(loss_fn=clipped, advantage_fn=advantages) == run()


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "grpo", "ppo"])
def test_an_example_batch_has_the_columns_of_a_run(algorithm: str, tiny_model: Path) -> None:
    seen: set[str] = set()

    def loss(logprobs: Tensor, batch: Any, **counts: Any) -> Any:
        seen.update(batch)
        return nll(logprobs, batch, **counts)

    model, options = str(tiny_model), {**ROLLOUTS, "num_steps_per_iteration": 1}
    if algorithm == "sft":
        SFTTrainer(CustomPolicy(model), loss_fn=loss, **SFT).fit(ROWS)
    elif algorithm == "dpo":
        DPOTrainer(PolicyWithReference(model), loss_fn=loss, **DPO).fit(PAIRS)
    elif algorithm == "grpo":
        grpo = {**options, "loss": {"needs_reference": True}}
        trainer = GRPOTrainer(PolicyWithReference(model), loss_fn=loss, **grpo)
        trainer.fit(ROWS, reward_fn=reward)
    else:
        ppo = PPOTrainer(PolicyWithReference(model), critic=Critic(model), loss_fn=loss, **options)
        ppo.fit(ROWS, reward_fn=reward)
    assert example_batch(algorithm).keys() <= seen


def test_a_wrong_loss_moves_no_weight(tiny_model: Path) -> None:
    policy = CustomPolicy(str(tiny_model))
    before = [parameter.clone() for parameter in policy.model.parameters()]

    def mean(logprobs: Tensor, batch: Any, **counts: Any) -> Any:
        mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
        return masked_sum(-logprobs, mask, denominator=mask.sum()), {}

    with pytest.raises(ConfigError, match="depends on the number of micro-batches"):
        SFTTrainer(policy, loss_fn=mean, **SFT).fit(ROWS)
    assert all(map(torch.equal, before, policy.model.parameters()))


@pytest.mark.parametrize(
    ("advantages", "problem"),
    [
        (lambda rewards, groups: rewards.tolist(), "a wrong type or shape"),
        (lambda rewards, groups: rewards[:-1], "a wrong type or shape"),
        (lambda rewards, groups: rewards / 0 * 0, "not finite numbers"),
        (lambda rewards, groups: groups, "not finite numbers"),
        (lambda rewards, reward_components: rewards, "reads a column that this run does not have"),
        (lambda rewards, colour: rewards, "parameters that are not columns"),
        (lambda rewards, **columns: rewards, "parameters that are not columns"),
        (lambda rewards, *columns: rewards, "parameters that are not columns"),
    ],
)
def test_a_wrong_advantage_is_refused_by_name(
    advantages: Any, problem: str, tiny_model: Path
) -> None:
    with pytest.raises(ConfigError, match=r"the advantage .*lambda") as raised:
        GRPOTrainer(
            CustomPolicy(str(tiny_model)), loss={"kl": None}, advantage_fn=advantages, **ROLLOUTS
        ).fit(ROWS, reward_fn=reward)
    assert problem in raised.value.problem and raised.value.expected and raised.value.fix


def test_settings_of_the_estimation_that_a_function_replaces_are_refused() -> None:
    values = {"advantage": {"kind": "function", "target": "my_functions:fn"}}
    with pytest.raises(ValidationError, match="nothing reads gamma, bootstrap_truncated"):
        PPOConfig.model_validate({**values, "gamma": 0.9, "bootstrap_truncated": True})
    PPOConfig.model_validate(values).replace(num_prompts_per_step=2)


def test_an_advantage_of_ppo_depends_on_one_row(tiny_model: Path) -> None:
    def centered(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return rewards - rewards.sum() / mask.sum(), rewards

    trainer = PPOTrainer(
        CustomPolicy(str(tiny_model)),
        critic=Critic(str(tiny_model)),
        kl=None,
        advantage_fn=centered,
        **ROLLOUTS,
    )
    with pytest.raises(ConfigError, match="depends on the other rows"):
        trainer.fit(ROWS, reward_fn=reward)


def test_a_metric_does_not_replace_that_of_the_run(tiny_model: Path) -> None:
    def loss(logprobs: Tensor, batch: Any, **counts: Any) -> Any:
        value, _ = nll(logprobs, batch, **counts)
        return value, {"reward": value.detach()}

    trainer = GRPOTrainer(CustomPolicy(str(tiny_model)), loss_fn=loss, **ROLLOUTS)
    with pytest.raises(ConfigError, match="names that the trainer uses") as raised:
        trainer.fit(ROWS, reward_fn=reward)
    assert raised.value.got == "reward"


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="'reward_model' takes no loss_fn"):
        RewardModelTrainer.from_pretrained("model", loss_fn=nll)
    with pytest.raises(ConfigError, match="'sft' takes no advantage_fn"):
        SFTTrainer({}, advantage_fn=nll)
    with pytest.raises(ConfigError, match=r"loss_fn replaces grpo.loss, which is also given"):
        GRPOTrainer({"grpo": {"loss": {"kind": "gspo"}}}, loss_fn=nll)
    with pytest.raises(ConfigError, match="has other parameters than a loss"):
        SFTTrainer({}, loss_fn=lambda logprobs, batch: logprobs.sum())
    with pytest.raises(ConfigError, match="name an object of the class"):
        SFTTrainer({}, loss_fn=NLLLoss)


def test_a_function_replaces_only_its_field() -> None:
    grpo = GRPOConfig(advantage=LeaveOneOut(), num_prompts_per_step=8)
    settings = GRPOSettings(
        training=MegatronTraining(), generation=HuggingFaceGenerationConfig(), grpo=grpo
    )
    custom = CustomPolicyLoss(target=f"{__name__}:nll")
    changed = GRPOTrainer(settings, loss_fn=nll).settings
    assert changed == settings.replace(grpo=grpo.model_copy(update={"loss": custom}))
    assert SFTTrainer(SFTSettings(training=MegatronTraining()), loss_fn=nll).settings.training == (
        MegatronTraining()
    )
    for trainer in (
        GRPOTrainer({"grpo": grpo}, loss_fn=nll),
        GRPOTrainer.from_pretrained("model", grpo=grpo, loss_fn=nll, advantage_fn=None),
        GRPOTrainer("model", grpo=grpo, loss_fn=nll),
    ):
        assert trainer.config.loss == custom and trainer.config.advantage == LeaveOneOut()
        assert trainer.config.num_prompts_per_step == 8
    assert SFTTrainer({}, loss_fn=None).custom_functions.objects == {}


def test_a_function_replaces_the_correction_of_stale_samples() -> None:
    settings = GRPOSettings.model_validate({"grpo": {"asynchronous": {}}})
    custom = CustomPolicyLoss(target=f"{__name__}:nll")
    for trainer in (
        AsyncGRPOTrainer(settings, loss_fn=nll),
        AsyncGRPOTrainer.from_pretrained("model", grpo=settings.grpo, loss_fn=nll),
    ):
        assert trainer.config.loss == custom
        assert trainer.config.asynchronous == Asynchronous()


def test_a_loss_that_a_config_sets_is_not_replaced() -> None:
    for grpo in (
        GRPOConfig(loss=GSPOLoss()),
        GRPOConfig.model_validate({"preset": "dr_grpo", "asynchronous": {}}),
    ):
        with pytest.raises(ConfigError, match=r"replaces grpo.loss, which is also given"):
            GRPOTrainer(GRPOSettings(grpo=grpo), loss_fn=nll)


@pytest.mark.parametrize("fn", [torch.mean, "my_losses:dft", max])
def test_what_has_no_parameters_is_refused(fn: Any) -> None:
    for argument in ("loss_fn", "advantage_fn"):
        with pytest.raises(ConfigError, match=f"{argument} has no parameters"):
            GRPOTrainer({}, **{argument: fn})


def test_an_object_without_items_is_called() -> None:
    class Empty(NLLLoss):
        def __len__(self) -> int:
            return 0

    loss = Empty()
    assert SFTTrainer({}, loss_fn=loss).custom_functions.objects == {"loss_fn": loss}


def test_a_section_names_a_function_of_the_working_directory(
    write: Callable[[str], None], tiny_model: Path
) -> None:
    """Its source is part of the key of a run with a name."""
    write(f"from {__name__} import nll as loss\n")
    section = {"sft": {**SFT, "loss": {"kind": "function", "target": "my_functions:loss"}}}

    def run() -> str:
        trainer = SFTTrainer(CustomPolicy(str(tiny_model)), **section)
        return trainer.fit(ROWS, name="mine").lineage_id

    first, again = run(), run()
    assert first == again
    write(f"from {__name__} import nll\n\ndef loss(*a, **c):\n    return nll(*a, **c)\n")
    assert run() != first


def test_a_missing_function_is_named_with_those_that_exist(write: Callable[[str], None]) -> None:
    write("def loss():\n    pass\n")
    with pytest.raises(ConfigError, match=r"sft.loss.target: the module") as raised:
        SFTTrainer({"sft": {"loss": {"kind": "function", "target": "my_functions:los"}}})
    assert raised.value.fix == "did you mean 'loss'?"


def configs_of_stages() -> dict[str, Any]:
    """Returns the config of the stage that trains, by algorithm, of recipes with a function."""
    function = {"kind": "function", "target": "my_functions:fn"}
    both = {"loss": function, "advantage": function}
    grpo = GRPORecipe.model_validate(
        {"recipe": "grpo_arithmetic", "grpo": {"preset": "dr_grpo", **both}}
    )
    ppo = PPORecipe.model_validate({"recipe": "ppo_arithmetic", "ppo": both})
    dpo = DPORecipe.model_validate({"recipe": "dpo_arithmetic", "dpo": {"loss": function}})
    sft = SFTRecipe.model_validate({"recipe": "sft_arithmetic", "sft": {"loss": function}})
    return {
        "grpo": plan_grpo(config=grpo).grpo.grpo,
        "ppo": plan_ppo(config=ppo).ppo.ppo,
        "dpo": plan_dpo(config=dpo).iterations.dpo.dpo,
        "sft": plan_sft(config=sft).sft.sft,
    }


def test_the_source_of_a_function_is_part_of_the_config_of_what_trains(
    write: Callable[[str], None],
) -> None:
    write("def fn():\n    pass\n")
    first, again = configs_of_stages(), configs_of_stages()
    write("def fn():\n    return 1\n")
    changed = configs_of_stages()
    for name, config in first.items():
        assert config == again[name]
        assert config.loss.source and config.loss.source != changed[name].loss.source
    for name in ("grpo", "ppo"):
        assert first[name].advantage.source != changed[name].advantage.source
    assert not first["grpo"].reads_reference and first["dpo"].needs_reference


def test_a_default_section_has_no_new_key() -> None:
    """So that keys of stages do not change."""
    assert "loss" not in SFTConfig().model_dump()
    assert "advantage" not in PPOConfig().model_dump()


def test_a_recipe_is_checked_before_a_run(write: Callable[[str], None]) -> None:
    write("def fn(next_token_logprobs):\n    pass\n")
    section = {"loss": {"kind": "function", "target": "my_functions:fn"}}
    recipe = SFTRecipe.model_validate({"recipe": "sft_arithmetic", "sft": section})
    with pytest.raises(ConfigError, match="my_functions:fn has other parameters than a loss"):
        preflight({"config": recipe})


def test_asynchronous_grpo_adds_no_correction_to_a_custom_loss() -> None:
    values = {"kind": "function", "target": "my_functions:fn"}
    config = GRPOConfig.model_validate({"asynchronous": {}, "loss": values})
    assert config.loss == CustomPolicyLoss(target="my_functions:fn")


def test_a_repetition_names_the_loss_that_changed(write: Callable[[str], None]) -> None:
    write(f"from {__name__} import nll as loss\n")
    section = {"loss": {"kind": "function", "target": "my_functions:loss"}}
    recorded = Repetition(
        "nemo_rl_core:SFTTrainer", {"sft": section}, {"loss_fn_source": "another"}, {}, "run"
    )
    with pytest.raises(StoreError, match="the loss_fn 'my_functions:loss' is not the recorded one"):
        repeat(recorded)


def test_only_a_named_function_can_be_called_again_by_another_process() -> None:
    assert is_importable(nll, f"{__name__}:nll")
    assert is_importable(an_object, f"{__name__}:an_object")
    assert not is_importable(lambda: None, f"{__name__}:nll")
    assert not is_importable(NLLLoss(), f"{NLLLoss.__module__}:NLLLoss")


def test_a_run_with_an_unnamed_function_or_an_object_cannot_be_repeated() -> None:
    def reasons(part: str, value: Any) -> tuple[str, ...]:
        trainer = SFTTrainer({}, loss_fn=value if part == "loss_fn" else None)
        for_fit = TrainerForFit("sft", SFTTrainer, trainer.settings, run=None)  # type: ignore[arg-type]
        return fit_call(for_fit, FitRequest("model", [], parts={part: value})).unrepeatable

    assert reasons("loss_fn", nll) == ()
    (of_object,) = reasons("loss_fn", NLLLoss())
    assert of_object == "the loss_fn, NLLLoss, is not at the top level of an importable module"
    (of_policy,) = reasons("policy", Critic)
    assert of_policy == "the policy is a custom object, Critic, which is not recorded"
