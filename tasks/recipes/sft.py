"""The recipe of a supervised fine-tuning."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from nemo_rl_core.algorithms.sft.config import SFTConfig
from nemo_rl_core.config.export import ExportConfig
from tasks.platform.failures import failure_handler, leave_record
from tasks.platform.stage import plan_task
from tasks.recipes.common import (
    DataTaskConfig,
    EvaluationTaskConfig,
    ModelTaskConfig,
    PipelineRecipe,
    SFTTaskConfig,
)
from tasks.recipes.verdict import ChooseQuestionsTaskConfig, VerdictConfig


class SFTRecipe(PipelineRecipe):
    """All of a supervised fine-tuning.

    Attributes:
        sft: Supervised fine-tuning.
    """

    sft: SFTConfig = SFTConfig()

    @property
    def trains_on(self) -> tuple[str, ...]:
        """Rows with something to imitate."""
        return ("prompts", "conversations", "text")

    @property
    def samples_rows(self) -> bool:
        """False: supervised fine-tuning samples nothing."""
        return False


class SFTPlan(NamedTuple):
    """The settings of each stage."""

    model: ModelTaskConfig
    data: DataTaskConfig
    questions: ChooseQuestionsTaskConfig
    sft: SFTTaskConfig
    evaluation: EvaluationTaskConfig | None
    verdict: VerdictConfig
    export: ExportConfig


@plan_task
def plan_sft(config: SFTRecipe) -> SFTPlan:
    """Deals the recipe out to the stages."""
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
    """After `workflows/sft.py`."""
    leave_record("sft", "sft", config, err)
