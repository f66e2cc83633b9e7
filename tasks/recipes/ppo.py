"""The recipe of a PPO run."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from nemo_rl_core.algorithms.ppo.config import PPOSchedule, PPOSettings
from nemo_rl_core.config.export import ExportConfig
from nemo_rl_core.config.generation import refuse_for_training
from nemo_rl_core.config.trainer import refuse_without_scalar_head
from nemo_rl_core.config.training import Head
from tasks.platform.failures import failure_handler, leave_record
from tasks.platform.stage import plan_task
from tasks.recipes.common import (
    DataTaskConfig,
    EvaluationTaskConfig,
    ModelTaskConfig,
    PipelineRecipe,
    SFTTaskConfig,
    rollout_fields,
)
from tasks.recipes.verdict import ChooseQuestionsTaskConfig, VerdictConfig


class PPORecipe(PipelineRecipe):
    """All of a PPO run.

    Attributes:
        ppo: Proximal policy optimization.
    """

    ppo: PPOSchedule = PPOSchedule()

    @property
    def trained_heads(self) -> list[Head]:
        """The policy's, and the critic's."""
        return ["lm", "scalar"]

    def refuse_contradictions(self) -> None:
        """A critic needs a backend with a scalar head, and rollouts are drawn."""
        refuse_without_scalar_head(self.training)
        refuse_for_training(self.generation)


class PPOTaskConfig(PPOSettings):
    """What `ppo_iteration` reads."""

    reward_content: str


class PPOPlan(NamedTuple):
    """The settings of each stage."""

    model: ModelTaskConfig
    data: DataTaskConfig
    questions: ChooseQuestionsTaskConfig
    sft: SFTTaskConfig
    ppo: PPOTaskConfig
    num_iterations: int
    evaluation: EvaluationTaskConfig | None
    verdict: VerdictConfig
    export: ExportConfig


@plan_task
def plan_ppo(config: PPORecipe) -> PPOPlan:
    """Deals the recipe out to the stages."""
    return PPOPlan(
        model=ModelTaskConfig.of(config),
        data=DataTaskConfig.of(config),
        questions=ChooseQuestionsTaskConfig.of(config),
        sft=SFTTaskConfig.of(config),
        ppo=PPOTaskConfig(ppo=config.ppo.iteration, **rollout_fields(config)),
        num_iterations=config.ppo.num_iterations,
        evaluation=EvaluationTaskConfig.of(config),
        verdict=VerdictConfig.of(config),
        export=config.export,
    )


@failure_handler
def record_failure(config: PPORecipe, err: FlyteError | None = None) -> None:
    """After `workflows/ppo.py`."""
    leave_record("ppo", "ppo", config, err)
