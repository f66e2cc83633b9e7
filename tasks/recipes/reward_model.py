"""The recipe of a reward model."""

from typing import NamedTuple

from flytekit.types.error.error import FlyteError

from nemo_rl_core.algorithms.reward_model.config import RewardModelConfig, RewardModelSettings
from nemo_rl_core.config.environment import EnvironmentConfig
from nemo_rl_core.config.generation import SamplingConfig
from nemo_rl_core.config.model import ModelConfig
from nemo_rl_core.config.trainer import TrainerSettings, refuse_without_scalar_head
from nemo_rl_core.config.training import Head
from tasks.platform.failures import failure_handler, leave_record
from tasks.platform.stage import plan_task
from tasks.recipes.common import (
    DataTaskConfig,
    ModelTaskConfig,
    SFTTaskConfig,
    trainer_fields,
)
from tasks.recipes.pairs import PairPlan, PairRecipe
from tasks.recipes.verdict import ChooseQuestionsTaskConfig


class RewardModelRecipe(PairRecipe):
    """All of a reward model's run.

    Attributes:
        reward_model: Training of the reward model.
    """

    reward_model: RewardModelConfig = RewardModelConfig()

    @property
    def reads_validation(self) -> bool:
        """True: a reward model is measured on pairs of the validation rows."""
        return True

    @property
    def sampled_models(self) -> list[ModelConfig]:
        """The model, where pairs are sampled from it."""
        return self.models if self.samples_rows else []

    @property
    def samplings(self) -> list[tuple[SamplingConfig, EnvironmentConfig, str]]:
        """That of pairs: a reward model is measured on pairs, not on answers."""
        return [(self.generation, self.environment, "environment")] if self.samples_rows else []

    @property
    def trained_heads(self) -> list[Head]:
        """That of SFT, and the reward model's."""
        return ["lm", "scalar"]

    def refuse_contradictions(self) -> None:
        """A reward model needs a backend with a scalar head."""
        refuse_without_scalar_head(self.training)


class RewardModelTaskConfig(RewardModelSettings):
    """What `train_reward_model` reads."""


class RewardModelEvaluationTaskConfig(TrainerSettings):
    """What `evaluate_reward_model` reads."""

    confidence: float

    @classmethod
    def of(cls, config: PairRecipe) -> "RewardModelEvaluationTaskConfig | None":
        """The recipe's share; None where evaluation is off."""
        if config.evaluation is None:
            return None
        fields = trainer_fields(config)
        del fields["seed"]  # nothing is drawn
        return cls(confidence=config.evaluation.confidence, **fields)


class RewardModelPlan(NamedTuple):
    """The settings of each stage."""

    model: ModelTaskConfig
    data: DataTaskConfig
    questions: ChooseQuestionsTaskConfig
    sft: SFTTaskConfig
    pairs: PairPlan
    reward_model: RewardModelTaskConfig
    evaluation: RewardModelEvaluationTaskConfig | None


@plan_task
def plan_reward_model(config: RewardModelRecipe) -> RewardModelPlan:
    """Deals the recipe out to the stages."""
    return RewardModelPlan(
        model=ModelTaskConfig.of(config),
        data=DataTaskConfig.of(config),
        questions=ChooseQuestionsTaskConfig.of(config).replace(evaluates=False, data=None),
        sft=SFTTaskConfig.of(config),
        pairs=PairPlan.of(config),
        reward_model=RewardModelTaskConfig(
            reward_model=config.reward_model, **trainer_fields(config)
        ),
        evaluation=RewardModelEvaluationTaskConfig.of(config),
    )


@failure_handler
def record_failure(config: RewardModelRecipe, err: FlyteError | None = None) -> None:
    """After `workflows/reward_model.py`."""
    leave_record("reward_model", "reward_model", config, err)
