"""The GPU-hour limit of a recipe: in the plan, before a run, and in containers."""

import logging
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nemo_rl_core.config.tracking import BudgetConfig
from nemo_rl_core.errors import ConfigError, ResourceError
from nemo_rl_core.planning.accelerators import ACCELERATORS
from nemo_rl_core.telemetry.budget import LIMIT
from tasks.plan_tasks.grpo import plan_grpo
from tasks.planning.gpu_hours import check_budget, over_budget
from tasks.planning.gpu_plan import RecipePlan, plan_recipe, read_model_config
from tasks.planning.loads import steps_of
from tasks.recipes.common import RecipeError
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.post_train import PostTrainRecipe
from tasks.recipes.sweep import SweepRecipe
from tasks.stage.container import refuse_limit_unknown_to_stages
from tests.unit.planning.layouts import CONFIGS
from workflows import cli

CONFIG = CONFIGS["qwen2.5-7b"]


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIMIT, raising=False)


def planned(**budget: Any) -> RecipePlan:
    recipe = GRPORecipe.model_validate(
        {"recipe": "grpo_7b_8gpu", "budget": budget, "grpo": {"num_steps_per_iteration": 10}}
    )
    gpu = ACCELERATORS["nvidia-h100"]
    return plan_recipe(recipe, gpu, model_config=read_model_config(CONFIG))


def invoked(*arguments: object) -> Result:
    words = ["plan", "grpo_7b_8gpu", "--model-config", CONFIG, *arguments]
    return CliRunner().invoke(cli.group, list(map(str, words)))


def test_the_hours_are_those_of_all_steps_on_all_gpus() -> None:
    plan = planned(mean_completion_tokens=600)
    (grpo, _) = plan.stages
    assert grpo.speed is not None
    # Two iterations of ten steps on eight GPUs.
    assert plan.gpu_hours == {"grpo_iteration": 20 * grpo.speed.step_seconds * 8 / 3600}
    assert plan.gpu_hours["grpo_iteration"] == pytest.approx(6.4, abs=0.1)


def test_every_stage_that_trains_has_its_steps() -> None:
    recipe = PostTrainRecipe.model_validate(
        {
            "sft": {"num_steps": 7},
            "dpo": {"num_steps_per_iteration": 3, "num_iterations": 2},
            "grpo": {"num_steps_per_iteration": 5, "num_iterations": 4},
        }
    )
    assert steps_of(recipe) == {
        "train_sft": 7,
        "train_reward_model": 100,
        "dpo_iteration": 6,
        "grpo_iteration": 20,
    }


@pytest.mark.parametrize(
    ("limit", "is_refused", "is_logged"), [(4, True, True), (6, False, True), (8, False, False)]
)
def test_a_run_that_would_end_at_its_limit_is_refused(
    limit: float, is_refused: bool, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plan = planned(max_gpu_hours=limit, mean_completion_tokens=600)
    assert (over_budget(plan) is not None) is is_logged
    if not is_refused:
        check_budget(plan)
        assert ("saves, and the run ends there" in caplog.text) is is_logged
        return
    with pytest.raises(ResourceError, match="would reach its limit of GPU-hours") as refused:
        check_budget(plan)
    assert "at most 4 GPU-hours (budget.max_gpu_hours)" in str(refused.value)
    assert "GPU-hours are expected (grpo_iteration 6.3" in str(refused.value)


def test_unknown_lengths_refuse_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_budget(planned(max_gpu_hours=1))
    assert "at most 28." in caplog.text


def test_the_variable_overrides_the_limit_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = planned(max_gpu_hours=1, mean_completion_tokens=600)
    monkeypatch.setenv(LIMIT, "100")
    assert over_budget(plan) is None
    # A resumed run takes less than a complete one: the variable is not a reason to refuse it.
    monkeypatch.setenv(LIMIT, "2")
    check_budget(plan)
    assert "the limit is 2: the stage that reaches the limit saves" in caplog.text


def test_the_command_shows_the_hours_and_fails_beyond_the_limit() -> None:
    within = invoked("budget.max_gpu_hours=500", "--mean-tokens", 600)
    assert within.exit_code == 0
    assert "GPU-hours of training: 31.6" in within.output
    beyond = invoked("budget.max_gpu_hours=20", "budget.mean_completion_tokens=600")
    assert beyond.exit_code == 1
    assert "over the budget: 31.6" in beyond.output
    assert "(grpo_iteration 31.6" in beyond.output
    longest = invoked()
    assert "GPU-hours of training: at most 1" in longest.output


def test_a_sweep_has_one_limit() -> None:
    sweep = {"over": {"seed": [0, 1]}, "base": {"budget": {"max_gpu_hours": 1}}}
    with pytest.raises(RecipeError, match="one limit of GPU-hours for all of its points"):
        SweepRecipe.model_validate(sweep)
    SweepRecipe.model_validate({"over": {"seed": [0, 1]}, "budget": {"max_gpu_hours": 1}})


def test_on_a_cluster_stages_must_know_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = GRPORecipe.model_validate({"budget": {"max_gpu_hours": 12.5}})
    plan_grpo(config=limited)  # on one machine
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "a1")
    with pytest.raises(ConfigError, match="do not have its limit") as refused:
        refuse_limit_unknown_to_stages(limited.budget)
    assert f"pyflyte run --remote --copy all --env {LIMIT}=12.5" in str(refused.value)
    with pytest.raises(ConfigError, match="do not have its limit"):
        plan_grpo.task_function(config=limited)
    monkeypatch.setenv(LIMIT, "13")
    with pytest.raises(ConfigError, match="got: 13"):
        refuse_limit_unknown_to_stages(limited.budget)
    monkeypatch.setenv(LIMIT, "12.5")
    plan_grpo.task_function(config=limited)
    monkeypatch.delenv(LIMIT)
    refuse_limit_unknown_to_stages(BudgetConfig())
