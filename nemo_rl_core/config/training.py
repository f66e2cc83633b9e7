"""The optimizer's settings and the choice of training backend."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from nemo_rl_core.config.base import FrozenConfig


class OptimizerConfig(FrozenConfig):
    """AdamW with linear warm-up to a constant rate and clipping by global norm."""

    learning_rate: PositiveFloat = 1e-3
    num_warmup_steps: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_epsilon: PositiveFloat = 1e-8
    max_grad_norm: PositiveFloat = 1.0


class TrainingConfig(FrozenConfig):
    """Which backend computes gradients."""

    backend: Literal["dtensor"] = "dtensor"
