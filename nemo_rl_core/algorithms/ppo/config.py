"""Settings of proximal policy optimization with a critic."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

from nemo_rl_core.config.algorithm import Algorithm
from nemo_rl_core.config.base import Bound, FrozenConfig, kind_or
from nemo_rl_core.config.functions import CustomAdvantage, CustomLoss
from nemo_rl_core.config.generation import refuse_for_training
from nemo_rl_core.config.kl import KLInReward
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.trainer import (
    GateConfig,
    LoopConfig,
    RolloutSettings,
    refuse_without_scalar_head,
)


class ClippedSurrogate(FrozenConfig):
    """The clip range of a token's probability ratio.

    Attributes:
        clip_low: The ratio is clipped below `1 - clip_low`.
        clip_high: The ratio is clipped above `1 + clip_high`.
    """

    kind: Literal["clipped"] = "clipped"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: Bound = 0.2


PPOLoss = Annotated[
    Annotated[ClippedSurrogate, Tag("clipped")] | Annotated[CustomLoss, Tag("function")],
    kind_or("clipped"),
]


class CriticConfig(OptimizerConfig):
    """The value model's optimizer, and its value clip.

    `value_clip: null` disables the clip.

    Attributes:
        value_clip: Maximum change of a value since sampling, in units of reward; None does not
            clip.
    """

    learning_rate: PositiveFloat = 1e-3
    value_clip: Bound | None = 0.2


class PPOConfig(LoopConfig):
    """One iteration: `num_steps_per_iteration` times roll out, score, train both models, sync.

    A step samples `num_prompts_per_step * num_generations_per_prompt` completions, with the
    critic as their only baseline, and trains on them for `num_epochs_per_rollout` epochs, in
    optimizer steps of `train_global_batch_size` sequences (all of them by default). In the first
    `num_critic_warmup_steps` steps of a run only the critic is trained.

    A completion truncated by a limit on tokens or turns has the value 0 after its last token, like
    a finished one; with `bootstrap_truncated` it has the critic's value of the full sequence.

    Attributes:
        num_steps_per_iteration: Steps of one iteration, which is one cached stage.
        num_prompts_per_step: Prompts of one step.
        num_generations_per_prompt: Completions of each prompt.
        num_epochs_per_rollout: Passes over the completions of a step.
        train_global_batch_size: Sequences of one optimizer step; None takes all sequences of the
            step.
        gamma: The discount of a token's reward.
        lam: The lambda of generalized advantage estimation.
        bootstrap_truncated: Whether a truncated completion ends with the critic's value instead of
            0.
        advantage: A custom function of token rewards and values; None takes generalized advantage
            estimation.
        loss: The policy loss.
        kl: The penalty on the divergence from the reference policy; None uses no reference policy.
        critic: The value model's optimizer.
        num_critic_warmup_steps: Steps at the start of a run that train only the critic.
        gate: Allowed difference between the engine's and the trainer's logprobs.
    """

    algorithm: ClassVar[Algorithm] = Algorithm(
        "ppo",
        stage="ppo_iteration",
        pipeline="ppo",
        trainer="PPOTrainer",
        learning_rate=1e-6,
        rows_per_step="num_prompts_per_step",
        samples=True,
        has_critic=True,
    )

    learning_rate: PositiveFloat = 1e-3
    num_steps_per_iteration: PositiveInt = 50
    num_prompts_per_step: PositiveInt = 256
    num_generations_per_prompt: PositiveInt = 1
    num_epochs_per_rollout: PositiveInt = 2
    train_global_batch_size: PositiveInt | None = None
    gamma: float = Field(default=1.0, gt=0, le=1)
    lam: float = Field(default=0.95, ge=0, le=1)
    bootstrap_truncated: bool = False
    # Excluded by default, so that keys of stages do not change.
    advantage: CustomAdvantage | None = Field(default=None, exclude_if=lambda value: value is None)
    loss: PPOLoss = ClippedSurrogate()
    kl: KLInReward | None = KLInReward()
    critic: CriticConfig = CriticConfig()
    num_critic_warmup_steps: NonNegativeInt = 0
    gate: GateConfig = GateConfig()
    save_every_num_steps: PositiveInt = 10

    @property
    def num_sequences_per_step(self) -> int:
        """Completions of one step."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def num_scorings(self) -> int:
        """Forward passes per step for logprobs and values, without those of the updates."""
        return 2 + self.reads_reference

    @model_validator(mode="after")
    def _no_contradiction(self) -> "PPOConfig":
        batch = self.train_global_batch_size
        if batch is not None and self.num_sequences_per_step % batch:
            raise ValueError(
                f"train_global_batch_size ({batch}) must divide num_prompts_per_step x "
                f"num_generations_per_prompt ({self.num_sequences_per_step})"
            )
        fields = type(self).model_fields
        unread = [
            name
            for name in ("gamma", "lam", "bootstrap_truncated")
            if self.advantage is not None and getattr(self, name) != fields[name].default
        ]
        if unread:
            raise ValueError(
                f"nothing reads {', '.join(unread)}, since a function computes the advantages; "
                "leave it out, and write its value in the function"
            )
        return self


class PPOSchedule(PPOConfig):
    """The settings of one iteration, and the number of iterations.

    Each iteration is a cached stage, which a higher number of iterations does not change.

    Attributes:
        num_iterations: Iterations, one after the other, each a cached stage.
    """

    num_iterations: PositiveInt = 4

    @property
    def iteration(self) -> PPOConfig:
        """The settings of one iteration, independent of `num_iterations`."""
        values: dict[str, Any] = self.model_dump(exclude={"num_iterations"})
        return PPOConfig.model_validate(values)


class PPOSettings(RolloutSettings):
    """All settings of `PPOTrainer`."""

    ppo: PPOConfig = PPOConfig()

    @model_validator(mode="after")
    def _has_a_scalar_head_and_samples(self) -> Self:
        refuse_without_scalar_head(self.training)
        refuse_for_training(self.generation)
        return self
