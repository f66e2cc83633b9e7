"""Settings of on-policy distillation."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.generation import refuse_for_training
from nemo_rl_core.config.trainer import LoopConfig, RolloutSettings


class ForwardKL(FrozenConfig):
    """`KL(teacher || student)`: the student covers all that the teacher might say."""

    kind: Literal["forward"] = "forward"


class ReverseKL(FrozenConfig):
    """`KL(student || teacher)`: the student keeps to what the teacher finds likely."""

    kind: Literal["reverse"] = "reverse"


class MixedKL(FrozenConfig):
    """`weight * forward + (1 - weight) * reverse`.

    Attributes:
        weight: The share of the forward divergence.
    """

    kind: Literal["mixed"] = "mixed"
    weight: float = Field(default=0.5, ge=0, le=1)


Divergence = Annotated[ForwardKL | ReverseKL | MixedKL, Field(discriminator="kind")]


class DistillationConfig(LoopConfig):
    """`num_steps` times: the student rolls out, the teacher scores, the student learns.

    A step samples `num_prompts_per_step * num_generations_per_prompt` completions and makes one
    optimizer step of them. `top_k` is how many of the teacher's likeliest tokens are compared at
    each position.

    Attributes:
        num_steps: Steps, each with one optimizer step.
        num_prompts_per_step: Prompts that a step samples completions of.
        num_generations_per_prompt: Completions of each prompt.
        top_k: The teacher's likeliest tokens that are compared at each position.
        divergence: What the student minimizes.
    """

    learning_rate: PositiveFloat = 1e-3
    num_steps: PositiveInt = 100
    num_prompts_per_step: PositiveInt = 32
    num_generations_per_prompt: PositiveInt = 4
    top_k: int = Field(default=64, ge=2)
    divergence: Divergence = ForwardKL()
    save_every_num_steps: PositiveInt = 10

    @property
    def num_sequences_per_step(self) -> int:
        """Completions sampled in a step."""
        return self.num_prompts_per_step * self.num_generations_per_prompt


class DistillationSettings(RolloutSettings):
    """All that `DistillationTrainer` reads."""

    distillation: DistillationConfig = DistillationConfig()

    @model_validator(mode="after")
    def _draws(self) -> Self:
        refuse_for_training(self.generation)
        return self
