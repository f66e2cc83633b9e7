"""The recipe of a whole post-training: SFT, reward model, DPO, GRPO."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from nemo_rl_core.algorithms.dpo.config import DPOSchedule
from nemo_rl_core.algorithms.grpo.config import GRPOSchedule
from nemo_rl_core.algorithms.reward_model.config import RewardModelConfig
from nemo_rl_core.config.environment import EnvironmentConfig, reads_reward_model
from nemo_rl_core.config.export import ExportConfig
from nemo_rl_core.config.generation import SamplingConfig
from nemo_rl_core.config.single_turn import RewardModelScore
from nemo_rl_core.config.trainer import refuse_without_scalar_head
from nemo_rl_core.config.training import Head
from tasks.platform.failures import failure_handler, leave_record
from tasks.platform.stage import plan_task
from tasks.recipes.common import (
    DataTaskConfig,
    EvaluationTaskConfig,
    ModelTaskConfig,
    SFTTaskConfig,
    rollout_fields,
    trainer_fields,
)
from tasks.recipes.dpo import DPOIterations
from tasks.recipes.grpo import GRPOTaskConfig, refuse_unfit
from tasks.recipes.pairs import PairPlan, PairRecipe
from tasks.recipes.reward_model import RewardModelEvaluationTaskConfig, RewardModelTaskConfig
from tasks.recipes.verdict import ChooseQuestionsTaskConfig, VerdictConfig


class PostTrainRecipe(PairRecipe):
    """All of a post-training.

    `environment` scores the completions that pairs are made of, and the evaluation; `grpo_reward`
    is what GRPO maximizes: by default the reward model that the pipeline has just trained.

    Attributes:
        reward_model: Training of the reward model.
        dpo: Direct preference optimization.
        grpo: Group-relative policy optimization.
        grpo_reward: The environment that scores GRPO's completions.
    """

    reward_model: RewardModelConfig = RewardModelConfig()
    dpo: DPOSchedule = DPOSchedule()
    grpo: GRPOSchedule = GRPOSchedule()
    grpo_reward: EnvironmentConfig = RewardModelScore()

    @property
    def trained_heads(self) -> list[Head]:
        """The policy's, and the reward model's."""
        return ["lm", "scalar"]

    def refuse_contradictions(self) -> None:
        """GRPO must fit what it samples and what scores; a reward model needs a scalar head."""
        refuse_without_scalar_head(self.training)
        refuse_unfit(self.grpo, self.grpo_reward, self)

    @property
    def samplings(self) -> list[tuple[SamplingConfig, EnvironmentConfig, str]]:
        """Those of pairs and evaluation, and GRPO's."""
        return [*super().samplings, (self.generation, self.grpo_reward, "grpo_reward")]

    @property
    def rewards(self) -> list[EnvironmentConfig]:
        """Those of pairs and evaluation, and GRPO's where the pipeline does not train it."""
        return [
            reward
            for _, reward, path in self.samplings
            if path != "grpo_reward" or not reads_reward_model(reward)
        ]


class PostTrainPlan(NamedTuple):
    """The settings of each stage."""

    model: ModelTaskConfig
    data: DataTaskConfig
    questions: ChooseQuestionsTaskConfig
    sft: SFTTaskConfig
    pairs: PairPlan
    reward_model: RewardModelTaskConfig
    reward_model_evaluation: RewardModelEvaluationTaskConfig | None
    dpo: DPOIterations
    grpo: GRPOTaskConfig
    num_grpo_iterations: int
    evaluation: EvaluationTaskConfig | None
    verdict: VerdictConfig
    export: ExportConfig


@plan_task
def plan_post_train(config: PostTrainRecipe) -> PostTrainPlan:
    """Deals the recipe out to the stages."""
    rewarded = config.replace(environment=config.grpo_reward)
    return PostTrainPlan(
        model=ModelTaskConfig.of(config),
        data=DataTaskConfig.of(config),
        questions=ChooseQuestionsTaskConfig.of(config),
        sft=SFTTaskConfig.of(config),
        pairs=PairPlan.of(config),
        reward_model=RewardModelTaskConfig(
            reward_model=config.reward_model, **trainer_fields(config)
        ),
        reward_model_evaluation=RewardModelEvaluationTaskConfig.of(config),
        dpo=DPOIterations.of(config, config.dpo),
        grpo=GRPOTaskConfig(grpo=config.grpo.iteration, **rollout_fields(rewarded)),
        num_grpo_iterations=config.grpo.num_iterations,
        evaluation=EvaluationTaskConfig.of(config),
        verdict=VerdictConfig.of(config),
        export=config.export,
    )


@failure_handler
def record_failure(config: PostTrainRecipe, err: FlyteError | None = None) -> None:
    """After `workflows/post_train.py`."""
    leave_record("post_train", "post_train", config, err)
