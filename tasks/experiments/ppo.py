"""The recipe of a PPO run."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from nemo_rl_core.algorithms.ppo.config import PPOSchedule, PPOSettings
from nemo_rl_core.config.generation import refuse_for_training
from nemo_rl_core.config.trainer import refuse_without_scalar_head
from tasks.experiments.common import (
    DataStage,
    EvaluationStage,
    Experiment,
    ModelStage,
    PromotionStage,
    QuestionStage,
    SFTStage,
    rollout_fields,
)
from tasks.failures import failure_handler, leave_record
from tasks.stage import plan_task


class PPOExperiment(Experiment):
    """All of a PPO run.

    Attributes:
        ppo: Proximal policy optimization.
    """

    ppo: PPOSchedule = PPOSchedule()

    def refuse_contradictions(self) -> None:
        """A critic needs a backend with a scalar head, and rollouts are drawn."""
        refuse_without_scalar_head(self.training)
        refuse_for_training(self.generation)


class PPOStage(PPOSettings):
    """What `ppo_iteration` reads."""

    reward_content: str


class PPOPlan(NamedTuple):
    """The settings of each stage."""

    model: ModelStage
    data: DataStage
    questions: QuestionStage
    sft: SFTStage
    ppo: PPOStage
    num_iterations: int
    evaluation: EvaluationStage
    promotion: PromotionStage


@plan_task
def plan_ppo(config: PPOExperiment) -> PPOPlan:
    """Deals the recipe out to the stages."""
    return PPOPlan(
        model=ModelStage.of(config),
        data=DataStage.of(config),
        questions=QuestionStage.of(config),
        sft=SFTStage.of(config),
        ppo=PPOStage(ppo=config.ppo.iteration, **rollout_fields(config)),
        num_iterations=config.ppo.num_iterations,
        evaluation=EvaluationStage.of(config),
        promotion=PromotionStage.of(config),
    )


@failure_handler
def record_failure(config: PPOExperiment, err: FlyteError | None = None) -> None:
    """After `workflows/ppo.py`."""
    leave_record("ppo", "ppo", config, err)
