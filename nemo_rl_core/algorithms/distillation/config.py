"""Settings of on-policy distillation."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from nemo_rl_core.config.algorithm import Algorithm
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.generation import refuse_for_training
from nemo_rl_core.config.trainer import LoopConfig, RolloutSettings


class ForwardKL(FrozenConfig):
    """`KL(teacher || student)`: the student covers all modes of the teacher."""

    kind: Literal["forward"] = "forward"


class ReverseKL(FrozenConfig):
    """`KL(student || teacher)`: the student concentrates on the teacher's modes."""

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
    """`num_steps` times: the student samples, the teacher scores, the student is trained.

    A step samples `num_prompts_per_step * num_generations_per_prompt` completions and runs one
    optimizer step on them. At each position, the teacher's `top_k` most likely tokens are compared.

    Attributes:
        num_steps: Steps, each with one optimizer step.
        num_prompts_per_step: Prompts of one step.
        num_generations_per_prompt: Completions of each prompt.
        top_k: Number of the teacher's most likely tokens to compare at each position.
        divergence: The divergence that the student minimizes.
    """

    algorithm: ClassVar[Algorithm] = Algorithm(
        "distillation",
        stage="train_student",
        pipeline="distill",
        trainer="DistillationTrainer",
        learning_rate=2e-6,
        rows_per_step="num_prompts_per_step",
        samples=True,
        has_teacher=True,
    )

    learning_rate: PositiveFloat = 1e-3
    num_steps: PositiveInt = 100
    num_prompts_per_step: PositiveInt = 32
    num_generations_per_prompt: PositiveInt = 4
    top_k: int = Field(default=64, ge=2)
    divergence: Divergence = ForwardKL()
    save_every_num_steps: PositiveInt = 10

    @property
    def num_sequences_per_step(self) -> int:
        """Completions of one step."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def reads_reference(self) -> bool:
        """True: the teacher scores every completion."""
        return True

    @property
    def num_scorings(self) -> int:
        """Forward passes per step in addition to those of the update: only the teacher's."""
        return 1


class DistillationSettings(RolloutSettings):
    """All settings of `DistillationTrainer`."""

    distillation: DistillationConfig = DistillationConfig()

    @model_validator(mode="after")
    def _draws_from_the_full_distribution(self) -> Self:
        refuse_for_training(self.generation)
        return self
