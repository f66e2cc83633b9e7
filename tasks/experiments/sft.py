"""The recipe of a supervised fine-tuning."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from nemo_rl_core.algorithms.sft.config import SFTConfig
from tasks.experiments.common import (
    DataStage,
    EvaluationStage,
    Experiment,
    ModelStage,
    PromotionStage,
    QuestionStage,
    SFTStage,
)
from tasks.failures import failure_handler, leave_record
from tasks.stage import plan_task


class SFTExperiment(Experiment):
    """All of a supervised fine-tuning.

    Attributes:
        sft: Supervised fine-tuning.
    """

    sft: SFTConfig = SFTConfig()


class SFTPlan(NamedTuple):
    """The settings of each stage."""

    model: ModelStage
    data: DataStage
    questions: QuestionStage
    sft: SFTStage
    evaluation: EvaluationStage
    promotion: PromotionStage


@plan_task
def plan_sft(config: SFTExperiment) -> SFTPlan:
    """Deals the recipe out to the stages."""
    return SFTPlan(
        model=ModelStage.of(config),
        data=DataStage.of(config),
        questions=QuestionStage.of(config),
        sft=SFTStage.of(config),
        evaluation=EvaluationStage.of(config),
        promotion=PromotionStage.of(config),
    )


@failure_handler
def record_failure(config: SFTExperiment, err: FlyteError | None = None) -> None:
    """After `workflows/sft.py`."""
    leave_record("sft", "sft", config, err)
