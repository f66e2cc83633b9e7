"""Each stage gets only the recipe fields that it reads, so others do not rerun it."""

from operator import attrgetter
from typing import Any

import pytest

from nemo_rl_core.errors import ConfigError
from tasks.plan_tasks.dpo import plan_dpo
from tasks.plan_tasks.grpo import plan_grpo
from tasks.recipes.common import PipelineRecipe
from tasks.recipes.dpo import DPORecipe
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.post_train import PostTrainRecipe
from tasks.recipes.ppo import PPORecipe
from tasks.recipes.reward_model import RewardModelRecipe

BASE: dict[str, Any] = {"recipe": "grpo_arithmetic"}
STAGES = ("model", "data", "questions", "sft", "grpo", "num_iterations")
STAGES += ("base_evaluation", "evaluation", "verdict.promotion", "export")
ALL_ROLLOUTS = {"grpo", "evaluation"}


def changed_stages(changes: dict[str, Any], base: dict[str, Any] = BASE) -> set[str]:
    before, after = (
        plan_grpo(config=GRPORecipe.model_validate(values))
        for values in (base, {**base, **changes})
    )
    changed = {each for each in STAGES if attrgetter(each)(before) != attrgetter(each)(after)}
    return {stage.removeprefix("verdict.") for stage in changed}


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({}, set()),
        ({"grpo": {"learning_rate": 1.25e-4}}, {"grpo"}),
        ({"grpo": {"loss": {"kl": None}}}, {"grpo"}),
        ({"grpo": {"num_generations_per_prompt": 8}}, {"grpo"}),
        ({"grpo": {"gate": {"max_token_mult_prob_error": 1.5}}}, {"grpo"}),
        ({"grpo": {"save_every_num_steps": 3}}, {"grpo"}),
        # More iterations do not rerun earlier ones.
        ({"grpo": {"num_iterations": 9}}, {"num_iterations"}),
        ({"sft": {"learning_rate": 1.25e-4}}, {"sft"}),
        # Completions that are trained on must fit the model's context, which `data` checks, and
        # `questions` has the kinds of rows that the recipe can train on.
        ({"sft": None}, {"data", "sft", "questions"}),
        ({"data": {"num_train": 17}}, {"data"}),
        # The engine is as long as prompts may be.
        ({"data": {"max_prompt_tokens": 17}}, {"data", *ALL_ROLLOUTS}),
        ({"model": {"num_layers": 3}}, {"model"}),
        ({"model": {"dtype": "bfloat16"}}, {"model", "sft", *ALL_ROLLOUTS}),
        ({"environment": {"kind": "math"}}, ALL_ROLLOUTS),
        ({"generation": {"temperature": 0.5}}, ALL_ROLLOUTS),
        ({"rollouts": {"max_turns": 3}}, ALL_ROLLOUTS),
        ({"cluster": {"num_threads": 1}}, {"sft", *ALL_ROLLOUTS}),
        ({"evaluation": {"num_samples_per_prompt": 2}}, {"evaluation"}),
        ({"measure_base": True}, {"base_evaluation"}),
        ({"evaluation": {"environment": {"kind": "math"}}}, {"evaluation"}),
        (
            {"evaluation": {"data": {"kind": "arithmetic", "num_validation": 9}}},
            {"questions"},
        ),
        ({"environment_workers": {"num_workers": 2}}, ALL_ROLLOUTS),
        ({"evaluation": {"confidence": 0.9}}, {"evaluation", "promotion"}),
        ({"promotion": {"min_improvement": 0.5}}, {"promotion"}),
        ({"export": {"model": "promoted"}}, {"export", "questions"}),
        ({"seed": 7}, {"model", "data", "sft", *ALL_ROLLOUTS}),
    ],
)
def test_a_change_reaches_the_stages_that_read_it(
    changes: dict[str, Any], stages: set[str]
) -> None:
    assert changed_stages(changes) == stages


def test_every_field_of_a_recipe_is_read_by_some_stage() -> None:
    # `training` has only one backend so far, so it cannot be changed.
    tried = {"seed", "model", "data", "environment", "sft", "grpo", "generation"}
    tried |= {"rollouts", "environment_workers", "cluster", "evaluation", "promotion", "training"}
    tried |= {"measure_base", "export", "isolation"}
    # Notices and the budget change no result: no stage reads them.
    assert set(GRPORecipe.model_fields) == tried | {"tracking", "budget"}
    stages = plan_grpo(config=GRPORecipe())
    assert stages.sft.training == stages.grpo.training == GRPORecipe().training


def test_the_seed_does_not_affect_pretrained_weights() -> None:
    base = {"model": {"name": "some/model"}}
    assert "model" not in changed_stages({"seed": 7}, base)
    assert plan_grpo(config=GRPORecipe.model_validate(base)).model.seed is None


def test_a_stage_gets_the_values_of_the_recipe() -> None:
    config = GRPORecipe.model_validate({**BASE, "seed": 3})
    stages = plan_grpo(config=config)
    assert stages.grpo.grpo == config.grpo.iteration
    assert stages.num_iterations == config.grpo.num_iterations
    assert stages.sft.sft == config.sft
    assert stages.evaluation.max_prompt_tokens == config.data.max_prompt_tokens
    assert stages.verdict.promotion.confidence == config.evaluation.confidence
    assert {stages.data.seed, stages.sft.seed, stages.grpo.seed, stages.model.seed} == {3}


def changed_dpo(changes: dict[str, Any]) -> set[str]:
    """The parts of DPO's iterations that a change affects: pairs, reference, training."""
    base = {"recipe": "dpo_arithmetic"}
    before, after = (
        plan_dpo(config=DPORecipe.model_validate(values)).iterations
        for values in (base, {**base, **changes})
    )
    return {
        name
        for name in ("pairs", "reference", "dpo", "num_iterations")
        if getattr(before, name) != getattr(after, name)
    }


@pytest.mark.parametrize(
    ("changes", "reached"),
    [
        ({"dpo": {"learning_rate": 1.25e-4}}, {"dpo"}),
        ({"dpo": {"loss": {"kind": "ipo"}}}, {"dpo"}),
        ({"dpo": {"num_pairs_per_step": 7}}, {"dpo"}),
        ({"dpo": {"max_tokens_per_microbatch": 999}}, {"dpo"}),
        ({"dpo": {"num_iterations": 9}}, {"num_iterations"}),
        # The pairs' tokens change, which the reference's logprobs are keyed by.
        ({"pairs": {"kind": "rollouts", "margin": 0.5}}, {"pairs"}),
        ({"generation": {"max_new_tokens": 4}}, {"pairs"}),
        ({"environment": {"kind": "math"}}, {"pairs"}),
        ({"seed": 7}, {"pairs", "dpo"}),
        ({"cluster": {"num_threads": 1}}, {"pairs", "reference", "dpo"}),
    ],
)
def test_reference_logprobs_depend_only_on_weights_and_tokens(
    changes: dict[str, Any], reached: set[str]
) -> None:
    assert changed_dpo(changes) == reached


def test_a_reference_free_loss_asks_for_no_reference() -> None:
    stages = plan_dpo(config=DPORecipe.model_validate({"dpo": {"loss": {"kind": "simpo"}}}))
    assert not stages.iterations.dpo.dpo.needs_reference


@pytest.mark.parametrize(
    ("experiment", "recipe"),
    [
        (PPORecipe, "ppo_arithmetic"),
        (RewardModelRecipe, "reward_model_arithmetic"),
        (PostTrainRecipe, "post_train_arithmetic"),
    ],
)
def test_a_backend_without_a_scalar_head_trains_no_critic_or_reward_model(
    experiment: type[PipelineRecipe], recipe: str
) -> None:
    experiment.model_validate({"recipe": recipe}).refuse_contradictions()
    config = experiment.model_validate({"recipe": recipe, "training": {"backend": "megatron"}})
    with pytest.raises(ConfigError, match="no scalar head"):
        config.refuse_contradictions()


def test_the_supervised_start_of_a_post_training_shows_the_tools_of_grpo() -> None:
    tools = {"kind": "tools", "tools": [{"kind": "calculator"}]}
    room = {"rollouts": {"max_turns": 2, "max_rollout_tokens": 32}}
    values = {"recipe": "post_train_arithmetic", "grpo_reward": tools, **room}
    with pytest.raises(ConfigError, match="supervised start shows the tools of environment"):
        PostTrainRecipe.model_validate(values).refuse_contradictions()
    PostTrainRecipe.model_validate({**values, "environment": tools}).refuse_contradictions()
    PostTrainRecipe.model_validate({**values, "sft": None}).refuse_contradictions()


@pytest.mark.parametrize(
    ("changes", "is_on_pairs", "per_token"),
    [
        ({}, True, False),
        ({"dpo": {"loss": {"kind": "simpo"}}}, True, True),
        ({"dpo": {"loss": {"kind": "ipo"}}}, True, True),
        ({"dpo": {"loss": {"kind": "ipo", "per": "sequence"}}}, True, False),
        ({"dpo": {"loss": {"kind": "kto"}}}, True, False),
        ({"evaluation": None}, False, None),
        ({"evaluation": {"data": {"kind": "arithmetic"}}}, False, None),
        ({"pairs": {"kind": "rollouts"}}, False, None),
    ],
)
def test_pairs_of_a_file_without_questions_are_judged_on_pairs(
    changes: dict[str, Any], is_on_pairs: bool, per_token: bool | None
) -> None:
    words = {"model": {"kind": "from_config"}, "pairs": {"kind": "data"}, **changes}
    plan = plan_dpo(config=DPORecipe.model_validate(words))
    assert (plan.verdict.pairs is not None) == is_on_pairs
    assert plan.questions.compares_pairs == is_on_pairs
    if plan.verdict.pairs is not None:
        assert plan.verdict.pairs.evaluation.per_token == per_token
