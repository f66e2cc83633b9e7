"""Splits the recipe of a post-training into configs of stages, and records a failure."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from nemo_rl_core.config.export import ExportConfig
from tasks.plan_tasks.failures import failure_handler, leave_record
from tasks.recipes.common import (
    DataTaskConfig,
    EvaluationTaskConfig,
    ModelTaskConfig,
    SFTTaskConfig,
    rollout_fields,
    trainer_fields,
)
from tasks.recipes.dpo import DPOIterations
from tasks.recipes.grpo import GRPOTaskConfig
from tasks.recipes.pairs import PairPlan
from tasks.recipes.post_train import PostTrainRecipe
from tasks.recipes.reward_model import RewardModelEvaluationTaskConfig, RewardModelTaskConfig
from tasks.recipes.verdict import ChooseQuestionsTaskConfig, VerdictConfig
from tasks.stage.stage import plan_task


class PostTrainPlan(NamedTuple):
    """The config of each stage."""

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
    """Splits the recipe into the configs of its stages."""
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
        grpo=GRPOTaskConfig(**rollout_fields(rewarded, grpo=config.grpo.iteration)),
        num_grpo_iterations=config.grpo.num_iterations,
        evaluation=EvaluationTaskConfig.of(config),
        verdict=VerdictConfig.of(config),
        export=config.export,
    )


@failure_handler
def record_failure(config: PostTrainRecipe, err: FlyteError | None = None) -> None:
    """Records a failure of `workflows/post_train.py`."""
    leave_record("post_train", "post_train", config, err)
