"""Settings of proximal policy optimisation with a critic."""

from typing import Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.generation import refuse_for_training
from nemo_rl_core.config.trainer import (
    GateConfig,
    LoopConfig,
    RolloutSettings,
    refuse_without_scalar_head,
)
from nemo_rl_core.config.training import OptimizerConfig


class ClippedSurrogate(FrozenConfig):
    """How far the ratio of a token's probabilities may move before its gradient is cut."""

    kind: Literal["clipped"] = "clipped"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: PositiveFloat = 0.2


class KLInReward(FrozenConfig):
    """`beta` times an estimate of the divergence from the reference, taken off each token's reward.

    k1 is `log pi - log pi_ref` itself, as in InstructGPT (arXiv:2203.02155, section 3.5).
    """

    kind: Literal["k1", "k2", "k3"] = "k1"
    beta: NonNegativeFloat = 0.01


class CriticConfig(OptimizerConfig):
    """The value model's own optimizer, and how far a value may move in an update.

    `value_clip: null` leaves the clip out.
    """

    learning_rate: PositiveFloat = 1e-3
    value_clip: PositiveFloat | None = 0.2


class PPOConfig(LoopConfig):
    """One iteration: `num_steps_per_iteration` times roll out, score, train both models, sync.

    A step samples `num_prompts_per_step * num_generations_per_prompt` completions, each judged by
    the critic alone, and goes over them `num_epochs_per_rollout` times, each time in optimizer
    steps of `train_global_batch_size` sequences (all of them, where it is left out). In the first
    `num_critic_warmup_steps` steps of a run only the critic is trained.

    A completion that was cut off, by a bound on its tokens or turns, has the value 0 after its last
    token, like one that ended; with `bootstrap_truncated` it has the critic's value of all that was
    written.
    """

    learning_rate: PositiveFloat = 1e-3
    num_steps_per_iteration: PositiveInt = 50
    num_prompts_per_step: PositiveInt = 256
    num_generations_per_prompt: PositiveInt = 1
    num_epochs_per_rollout: PositiveInt = 2
    train_global_batch_size: PositiveInt | None = None
    gamma: float = Field(default=1.0, gt=0, le=1)
    lam: float = Field(default=0.95, ge=0, le=1)
    bootstrap_truncated: bool = False
    loss: ClippedSurrogate = ClippedSurrogate()
    kl: KLInReward | None = KLInReward()
    critic: CriticConfig = CriticConfig()
    num_critic_warmup_steps: NonNegativeInt = 0
    gate: GateConfig = GateConfig()
    save_every_num_steps: PositiveInt = 10

    @property
    def num_sequences_per_step(self) -> int:
        """Completions sampled in a step."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @model_validator(mode="after")
    def _no_contradiction(self) -> "PPOConfig":
        batch = self.train_global_batch_size
        if batch is not None and self.num_sequences_per_step % batch:
            raise ValueError(
                f"train_global_batch_size ({batch}) must divide num_prompts_per_step x "
                f"num_generations_per_prompt ({self.num_sequences_per_step})"
            )
        return self


class PPOSchedule(PPOConfig):
    """How many iterations to run; each is a cached stage that does not know how many follow."""

    num_iterations: PositiveInt = 4

    @property
    def iteration(self) -> PPOConfig:
        """The settings of one iteration, equal whatever `num_iterations` is."""
        values: dict[str, Any] = self.model_dump(exclude={"num_iterations"})
        return PPOConfig.model_validate(values)


class PPOSettings(RolloutSettings):
    """All that `PPOTrainer` reads."""

    ppo: PPOConfig = PPOConfig()

    @model_validator(mode="after")
    def _has_a_scalar_head_and_draws(self) -> Self:
        refuse_without_scalar_head(self.training)
        refuse_for_training(self.generation)
        return self
