"""Settings of reward-model training."""

from typing import ClassVar, Literal, Self

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from nemo_rl_core.config.algorithm import Algorithm
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.trainer import LoopConfig, TrainerSettings, refuse_without_scalar_head


class BradleyTerryLoss(FrozenConfig):
    """`-log sigmoid(s_c - s_r - margin) + centering_coefficient * (s_c + s_r)^2`.

    The likelihood determines only differences of scores; the second term (Eisenstein et al. 2023,
    arXiv:2312.09244, with 0.01) keeps their mean near 0.

    Attributes:
        centering_coefficient: The weight of the term that keeps scores near 0.
    """

    kind: Literal["bradley_terry"] = "bradley_terry"
    centering_coefficient: NonNegativeFloat = 0.0


class RewardModelConfig(LoopConfig):
    """`num_steps` optimizer steps of `num_pairs_per_step` pairs each.

    Attributes:
        num_steps: Optimizer steps.
        num_pairs_per_step: Pairs of one optimizer step.
        loss: The loss on pairs.
    """

    algorithm: ClassVar[Algorithm] = Algorithm(
        "reward_model",
        stage="train_reward_model",
        pipeline="reward_model",
        trainer="RewardModelTrainer",
        learning_rate=1e-5,
        rows_per_step="num_pairs_per_step",
        has_scalar_head=True,
    )

    learning_rate: PositiveFloat = 1e-3
    num_steps: PositiveInt = 100
    num_pairs_per_step: PositiveInt = 64
    loss: BradleyTerryLoss = BradleyTerryLoss()
    save_every_num_steps: PositiveInt = 50


class RewardModelSettings(TrainerSettings):
    """All settings of `RewardModelTrainer`."""

    reward_model: RewardModelConfig = RewardModelConfig()

    @model_validator(mode="after")
    def _has_a_scalar_head(self) -> Self:
        refuse_without_scalar_head(self.training)
        return self
