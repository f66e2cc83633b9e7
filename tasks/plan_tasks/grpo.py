"""Splits the recipe of a GRPO run into configs of stages, and records a failure."""

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
from tasks.recipes.grpo import GRPORecipe, GRPOTaskConfig
from tasks.recipes.verdict import ChooseQuestionsTaskConfig, VerdictConfig
from tasks.stage.stage import plan_task


class GRPOPlan(NamedTuple):
    """The config of each stage, which `workflows/grpo.py` passes to it."""

    model: ModelTaskConfig
    data: DataTaskConfig
    questions: ChooseQuestionsTaskConfig
    sft: SFTTaskConfig
    grpo: GRPOTaskConfig
    num_iterations: int
    base_evaluation: EvaluationTaskConfig | None
    evaluation: EvaluationTaskConfig | None
    verdict: VerdictConfig
    export: ExportConfig


@plan_task
def plan_grpo(config: GRPORecipe) -> GRPOPlan:
    """Splits the recipe into the configs of its stages."""
    evaluation = EvaluationTaskConfig.of(config)
    return GRPOPlan(
        model=ModelTaskConfig.of(config),
        data=DataTaskConfig.of(config),
        questions=ChooseQuestionsTaskConfig.of(config),
        sft=SFTTaskConfig.of(config),
        grpo=GRPOTaskConfig(**rollout_fields(config, grpo=config.grpo.iteration)),
        num_iterations=config.grpo.num_iterations,
        base_evaluation=evaluation if config.measure_base else None,
        evaluation=evaluation,
        verdict=VerdictConfig.of(config),
        export=config.export,
    )


@failure_handler
def record_failure(config: GRPORecipe, err: FlyteError | None = None) -> None:
    """Records a failure of `workflows/grpo.py`."""
    leave_record("grpo", "grpo", config, err)
