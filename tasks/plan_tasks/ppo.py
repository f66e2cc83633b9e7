"""Splits the recipe of a PPO run into configs of stages, and records a failure."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from nemo_rl_core.config.export import ExportConfig
from tasks.plan_tasks.failures import failure_handler, leave_record
from tasks.recipes.common import (
    DataTaskConfig,
    EvaluationTaskConfig,
    ModelTaskConfig,
    SFTTaskConfig,
    rollout_fields,
)
from tasks.recipes.ppo import PPORecipe, PPOTaskConfig
from tasks.recipes.verdict import ChooseQuestionsTaskConfig, VerdictConfig
from tasks.stage.stage import plan_task


class PPOPlan(NamedTuple):
    """The config of each stage."""

    model: ModelTaskConfig
    data: DataTaskConfig
    questions: ChooseQuestionsTaskConfig
    sft: SFTTaskConfig
    ppo: PPOTaskConfig
    num_iterations: int
    evaluation: EvaluationTaskConfig | None
    verdict: VerdictConfig
    export: ExportConfig


@plan_task
def plan_ppo(config: PPORecipe) -> PPOPlan:
    """Splits the recipe into the configs of its stages."""
    return PPOPlan(
        model=ModelTaskConfig.of(config),
        data=DataTaskConfig.of(config),
        questions=ChooseQuestionsTaskConfig.of(config),
        sft=SFTTaskConfig.of(config),
        ppo=PPOTaskConfig(**rollout_fields(config, ppo=config.ppo.iteration)),
        num_iterations=config.ppo.num_iterations,
        evaluation=EvaluationTaskConfig.of(config),
        verdict=VerdictConfig.of(config),
        export=config.export,
    )


@failure_handler
def record_failure(config: PPORecipe, err: FlyteError | None = None) -> None:
    """Records a failure of `workflows/ppo.py`."""
    leave_record("ppo", "ppo", config, err)
