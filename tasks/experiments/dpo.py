"""The recipe of a DPO run."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from nemo_rl_core.algorithms.dpo.config import DPOSchedule, DPOSettings
from nemo_rl_core.config.base import FrozenConfig
from tasks.experiments.common import (
    DataStage,
    EvaluationStage,
    ModelStage,
    PromotionStage,
    QuestionStage,
    SFTStage,
    trainer_fields,
)
from tasks.experiments.pairs import PairExperiment, PairPlan, ReferenceStage
from tasks.failures import failure_handler, leave_record
from tasks.stage import plan_task


class DPOExperiment(PairExperiment):
    """All of a DPO run.

    Attributes:
        dpo: Direct preference optimization.
    """

    dpo: DPOSchedule = DPOSchedule()


class DPOStage(DPOSettings):
    """What `dpo_iteration` reads."""


class DPOIterations(FrozenConfig):
    """What the loop over iterations deals on to its stages."""

    pairs: PairPlan
    reference: ReferenceStage
    dpo: DPOStage
    num_iterations: int

    @classmethod
    def of(cls, config: PairExperiment, dpo: DPOSchedule) -> "DPOIterations":
        """The recipe's share."""
        return cls(
            pairs=PairPlan.of(config),
            reference=ReferenceStage.of(config),
            dpo=DPOStage(dpo=dpo.iteration, **trainer_fields(config)),
            num_iterations=dpo.num_iterations,
        )


class DPOPlan(NamedTuple):
    """The settings of each stage."""

    model: ModelStage
    data: DataStage
    questions: QuestionStage
    sft: SFTStage
    iterations: DPOIterations
    evaluation: EvaluationStage
    promotion: PromotionStage


@plan_task
def plan_dpo(config: DPOExperiment) -> DPOPlan:
    """Deals the recipe out to the stages."""
    return DPOPlan(
        model=ModelStage.of(config),
        data=DataStage.of(config),
        questions=QuestionStage.of(config),
        sft=SFTStage.of(config),
        iterations=DPOIterations.of(config, config.dpo),
        evaluation=EvaluationStage.of(config),
        promotion=PromotionStage.of(config),
    )


@failure_handler
def record_failure(config: DPOExperiment, err: FlyteError | None = None) -> None:
    """After `workflows/dpo.py`."""
    leave_record("dpo", "dpo", config, err)
