"""Splits the recipe of a distillation into configs of stages, and records a failure."""

from typing import Any, NamedTuple

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
from tasks.recipes.distillation import DistillationRecipe, DistillationTaskConfig
from tasks.recipes.verdict import ChooseQuestionsTaskConfig, VerdictConfig
from tasks.stage.stage import plan_task


class DistillationPlan(NamedTuple):
    """The config of each stage."""

    teacher: ModelTaskConfig
    teacher_sft: SFTTaskConfig
    model: ModelTaskConfig
    data: DataTaskConfig
    questions: ChooseQuestionsTaskConfig
    sft: SFTTaskConfig
    distillation: DistillationTaskConfig
    evaluation: EvaluationTaskConfig | None
    verdict: VerdictConfig
    export: ExportConfig


@plan_task
def plan_distillation(config: DistillationRecipe) -> DistillationPlan:
    """Splits the recipe into the configs of its stages."""
    fields: dict[str, Any] = rollout_fields(config)
    teacher_recipe = config.replace(model=config.teacher.model, sft=config.teacher.sft)
    return DistillationPlan(
        teacher=ModelTaskConfig.of(teacher_recipe),
        teacher_sft=SFTTaskConfig.of(teacher_recipe),
        model=ModelTaskConfig.of(config),
        data=DataTaskConfig.of(config),
        questions=ChooseQuestionsTaskConfig.of(config),
        sft=SFTTaskConfig.of(config),
        distillation=DistillationTaskConfig(distillation=config.distillation, **fields),
        evaluation=EvaluationTaskConfig.of(config),
        verdict=VerdictConfig.of(config),
        export=config.export,
    )


@failure_handler
def record_failure(config: DistillationRecipe, err: FlyteError | None = None) -> None:
    """Records a failure of `workflows/distill.py`."""
    leave_record("distill", "distill", config, err)
