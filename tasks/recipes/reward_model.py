"""The recipe of a reward model."""

from nemo_rl_core.algorithms.reward_model.config import RewardModelConfig, RewardModelSettings
from nemo_rl_core.config.environment import EnvironmentConfig
from nemo_rl_core.config.generation import SamplingConfig
from nemo_rl_core.config.model import ModelConfig
from nemo_rl_core.config.trainer import TrainerSettings, refuse_without_scalar_head
from nemo_rl_core.config.training import Head
from tasks.recipes.common import trainer_fields
from tasks.recipes.pairs import PairRecipe


class RewardModelRecipe(PairRecipe):
    """Recipe of a reward model's training.

    Attributes:
        reward_model: Training of the reward model.
    """

    reward_model: RewardModelConfig = RewardModelConfig()

    @property
    def reads_validation(self) -> bool:
        """True: a reward model is evaluated on pairs of the validation rows."""
        return True

    @property
    def sampled_models(self) -> list[ModelConfig]:
        """The model, if pairs are sampled from it."""
        return self.models if self.samples_rows else []

    @property
    def samplings(self) -> list[tuple[SamplingConfig, EnvironmentConfig, str]]:
        """The sampling of pairs: a reward model is evaluated on pairs, not on answers."""
        return [(self.generation, self.environment, "environment")] if self.samples_rows else []

    @property
    def trained_heads(self) -> list[Head]:
        """The heads of SFT, and of the reward model."""
        return ["lm", "scalar"]

    def refuse_contradictions(self) -> None:
        """Refuses a backend without a scalar head."""
        refuse_without_scalar_head(self.training)


class RewardModelTaskConfig(RewardModelSettings):
    """Config of `train_reward_model`."""


class RewardModelEvaluationTaskConfig(TrainerSettings):
    """Config of `evaluate_reward_model`."""

    confidence: float

    @classmethod
    def of(cls, config: PairRecipe) -> "RewardModelEvaluationTaskConfig | None":
        """Extracts the config from a recipe; None if evaluation is off."""
        if config.evaluation is None:
            return None
        fields = trainer_fields(config)
        del fields["seed"]  # nothing is drawn
        return cls(confidence=config.evaluation.confidence, **fields)
