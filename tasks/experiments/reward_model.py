"""The recipe of a reward model."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from nemo_rl_core.algorithms.reward_model.config import RewardModelConfig, RewardModelSettings
from nemo_rl_core.config.trainer import TrainerSettings, refuse_without_scalar_head
from tasks.experiments.common import (
    DataStage,
    ModelStage,
    QuestionStage,
    SFTStage,
    trainer_fields,
)
from tasks.experiments.pairs import PairExperiment, PairPlan
from tasks.failures import failure_handler, leave_record
from tasks.stage import plan_task


class RewardModelExperiment(PairExperiment):
    """All of a reward model's run.

    Attributes:
        reward_model: Training of the reward model.
    """

    reward_model: RewardModelConfig = RewardModelConfig()

    def refuse_contradictions(self) -> None:
        """A reward model needs a backend with a scalar head."""
        refuse_without_scalar_head(self.training)


class RewardModelStage(RewardModelSettings):
    """What `train_reward_model` reads."""


class RewardModelEvaluationStage(TrainerSettings):
    """What `evaluate_reward_model` reads."""

    confidence: float

    @classmethod
    def of(cls, config: PairExperiment) -> "RewardModelEvaluationStage":
        """The recipe's share."""
        fields = trainer_fields(config)
        del fields["seed"]  # nothing is drawn
        return cls(confidence=config.evaluation.confidence, **fields)


class RewardModelPlan(NamedTuple):
    """The settings of each stage."""

    model: ModelStage
    data: DataStage
    questions: QuestionStage
    sft: SFTStage
    pairs: PairPlan
    reward_model: RewardModelStage
    evaluation: RewardModelEvaluationStage


@plan_task
def plan_reward_model(config: RewardModelExperiment) -> RewardModelPlan:
    """Deals the recipe out to the stages."""
    return RewardModelPlan(
        model=ModelStage.of(config),
        data=DataStage.of(config),
        questions=QuestionStage.of(config),
        sft=SFTStage.of(config),
        pairs=PairPlan.of(config),
        reward_model=RewardModelStage(reward_model=config.reward_model, **trainer_fields(config)),
        evaluation=RewardModelEvaluationStage.of(config),
    )


@failure_handler
def record_failure(config: RewardModelExperiment, err: FlyteError | None = None) -> None:
    """After `workflows/reward_model.py`."""
    leave_record("reward_model", "reward_model", config, err)
