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
    """How far the ratio of a token's probabilities may move before its gradient is cut.

    Attributes:
        clip_low: The ratio is clipped below `1 - clip_low`.
        clip_high: The ratio is clipped above `1 + clip_high`.
    """

    kind: Literal["clipped"] = "clipped"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: PositiveFloat = 0.2


class KLInReward(FrozenConfig):
    """`beta` times an estimate of the divergence from the reference, taken off each token's reward.

    k1 is `log pi - log pi_ref` itself, as in InstructGPT (arXiv:2203.02155, section 3.5).

    Attributes:
        kind: The estimator.
        beta: The weight of the penalty.
    """

    kind: Literal["k1", "k2", "k3"] = "k1"
    beta: NonNegativeFloat = 0.01


class CriticConfig(OptimizerConfig):
    """The value model's own optimizer, and how far a value may move in an update.

    `value_clip: null` leaves the clip out.

    Attributes:
        value_clip: How far a value may move from the one at sampling, in units of reward; None does
            not clip.
    """

    learning_rate: PositiveFloat = 1e-3
    value_clip: PositiveFloat | None = 0.2


class PPOConfig(LoopConfig):
    """One iteration: `num_steps_per_iteration` times roll out, score, train both models, sync.

    A step samples `num_prompts_per_step * num_generations_per_prompt` completions, each scored by
    the critic alone, and goes over them `num_epochs_per_rollout` times, each time in optimizer
    steps of `train_global_batch_size` sequences (all of them, where it is left out). In the first
    `num_critic_warmup_steps` steps of a run only the critic is trained.

    A completion that was cut off, by a bound on its tokens or turns, has the value 0 after its last
    token, like one that ended; with `bootstrap_truncated` it has the critic's value of all that was
    written.

    Attributes:
        num_steps_per_iteration: Steps of one iteration, which is one cached stage.
        num_prompts_per_step: Prompts that a step samples completions of.
        num_generations_per_prompt: Completions of each prompt.
        num_epochs_per_rollout: Passes over the completions of a step.
        train_global_batch_size: Sequences of one optimizer step; None makes one optimizer step of
            all sequences.
        gamma: The discount of a token's reward.
        lam: The lambda of generalized advantage estimation.
        bootstrap_truncated: Whether a completion that was cut off ends with the critic's value
            instead of 0.
        loss: The policy loss.
        kl: The penalty on the divergence from the reference policy; None has no reference policy.
        critic: The value model's optimizer.
        num_critic_warmup_steps: Steps at the start of a run that train the critic alone.
        gate: How far the engine's logprobs may be from the trainer's.
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
    """How many iterations to run; each is a cached stage that does not know how many follow.

    Attributes:
        num_iterations: Iterations, one after the other, each a cached stage.
    """

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
