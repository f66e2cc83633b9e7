"""Splits the recipe of a supervised fine-tuning into configs of stages, and records a failure."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from nemo_rl_core.config.export import ExportConfig
from tasks.plan_tasks.failures import failure_handler, leave_record
from tasks.recipes.common import (
    DataTaskConfig,
    EvaluationTaskConfig,
    ModelTaskConfig,
    SFTTaskConfig,
)
from tasks.recipes.sft import SFTRecipe
from tasks.recipes.verdict import ChooseQuestionsTaskConfig, VerdictConfig
from tasks.stage.stage import plan_task


class SFTPlan(NamedTuple):
    """The config of each stage."""

    model: ModelTaskConfig
    data: DataTaskConfig
    questions: ChooseQuestionsTaskConfig
    sft: SFTTaskConfig
    evaluation: EvaluationTaskConfig | None
    verdict: VerdictConfig
    export: ExportConfig


@plan_task
def plan_sft(config: SFTRecipe) -> SFTPlan:
    """Splits the recipe into the configs of its stages."""
    return SFTPlan(
        model=ModelTaskConfig.of(config),
        data=DataTaskConfig.of(config),
        questions=ChooseQuestionsTaskConfig.of(config),
        sft=SFTTaskConfig.of(config),
        evaluation=EvaluationTaskConfig.of(config),
        verdict=VerdictConfig.of(config),
        export=config.export,
    )


@failure_handler
def record_failure(config: SFTRecipe, err: FlyteError | None = None) -> None:
    """Records a failure of `workflows/sft.py`."""
    leave_record("sft", "sft", config, err)
