"""The recipe of a GRPO run."""

from typing import NamedTuple

from flytekit import task

from nemo_rl_core.algorithms.grpo.config import GRPOSchedule, GRPOSettings
from tasks.experiments.common import (
    DataStage,
    EvaluationStage,
    Experiment,
    ModelStage,
    PromotionStage,
    SFTStage,
    rollout_fields,
)
from tasks.resources import LIGHT


class GRPOExperiment(Experiment):
    """All of a GRPO run."""

    grpo: GRPOSchedule = GRPOSchedule()


class GRPOStage(GRPOSettings):
    """What `grpo_iteration` reads."""

    reward_content: str


class GRPOPlan(NamedTuple):
    """The settings of each stage."""

    model: ModelStage
    data: DataStage
    sft: SFTStage
    grpo: GRPOStage
    num_iterations: int
    evaluation: EvaluationStage
    promotion: PromotionStage


@task(requests=LIGHT)
def plan_grpo(config: GRPOExperiment) -> GRPOPlan:
    """Deals the recipe out to the stages."""
    return GRPOPlan(
        model=ModelStage.of(config),
        data=DataStage.of(config),
        sft=SFTStage.of(config),
        grpo=GRPOStage(grpo=config.grpo.iteration, **rollout_fields(config)),
        num_iterations=config.grpo.num_iterations,
        evaluation=EvaluationStage.of(config),
        promotion=PromotionStage.of(config),
    )
