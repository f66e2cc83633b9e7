"""The recipe of a DPO run."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from nemo_rl_core.algorithms.dpo.config import DPOSchedule, DPOSettings
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.export import ExportConfig
from tasks.platform.failures import failure_handler, leave_record
from tasks.platform.stage import plan_task
from tasks.recipes.common import (
    DataTaskConfig,
    EvaluationTaskConfig,
    ModelTaskConfig,
    PromotionTaskConfig,
    QuestionTaskConfig,
    SFTTaskConfig,
    trainer_fields,
)
from tasks.recipes.pairs import PairPlan, PairRecipe, ReferenceTaskConfig


class DPORecipe(PairRecipe):
    """All of a DPO run.

    Attributes:
        dpo: Direct preference optimization.
    """

    dpo: DPOSchedule = DPOSchedule()


class DPOTaskConfig(DPOSettings):
    """What `dpo_iteration` reads."""


class DPOIterations(FrozenConfig):
    """What the loop over iterations deals on to its stages."""

    pairs: PairPlan
    reference: ReferenceTaskConfig
    dpo: DPOTaskConfig
    num_iterations: int

    @classmethod
    def of(cls, config: PairRecipe, dpo: DPOSchedule) -> "DPOIterations":
        """The recipe's share."""
        return cls(
            pairs=PairPlan.of(config),
            reference=ReferenceTaskConfig.of(config),
            dpo=DPOTaskConfig(dpo=dpo.iteration, **trainer_fields(config)),
            num_iterations=dpo.num_iterations,
        )


class DPOPlan(NamedTuple):
    """The settings of each stage."""

    model: ModelTaskConfig
    data: DataTaskConfig
    questions: QuestionTaskConfig
    sft: SFTTaskConfig
    iterations: DPOIterations
    evaluation: EvaluationTaskConfig
    promotion: PromotionTaskConfig
    export: ExportConfig


@plan_task
def plan_dpo(config: DPORecipe) -> DPOPlan:
    """Deals the recipe out to the stages."""
    return DPOPlan(
        model=ModelTaskConfig.of(config),
        data=DataTaskConfig.of(config),
        questions=QuestionTaskConfig.of(config),
        sft=SFTTaskConfig.of(config),
        iterations=DPOIterations.of(config, config.dpo),
        evaluation=EvaluationTaskConfig.of(config),
        promotion=PromotionTaskConfig.of(config),
        export=config.export,
    )


@failure_handler
def record_failure(config: DPORecipe, err: FlyteError | None = None) -> None:
    """After `workflows/dpo.py`."""
    leave_record("dpo", "dpo", config, err)
