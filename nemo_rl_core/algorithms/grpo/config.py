"""Settings of group-relative policy optimisation."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.trainer import LoopConfig, RolloutSettings


class GroupNormalized(FrozenConfig):
    """`(r - mean_group) / (std_group + 1e-6)` with the unbiased std (GRPO)."""

    kind: Literal["group_normalized"] = "group_normalized"


class GroupCentered(FrozenConfig):
    """`r - mean_group`, not divided by the spread (Dr. GRPO)."""

    kind: Literal["group_centered"] = "group_centered"


class LeaveOneOut(FrozenConfig):
    """`r_i - mean_{j != i} r_j` (RLOO)."""

    kind: Literal["leave_one_out"] = "leave_one_out"


AdvantageConfig = Annotated[
    GroupNormalized | GroupCentered | LeaveOneOut, Field(discriminator="kind")
]


class KLPenalty(FrozenConfig):
    """A penalty on the divergence from the reference policy, weighted by `beta`."""

    kind: Literal["k1", "k2", "k3"] = "k3"
    beta: NonNegativeFloat = 0.01


class ClippedLoss(FrozenConfig):
    """The clipped surrogate; `kl: null` leaves the reference policy out altogether."""

    kind: Literal["clipped"] = "clipped"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: PositiveFloat = 0.2
    reduction: Literal["token_mean", "sequence_mean"] = "token_mean"
    kl: KLPenalty | None = KLPenalty()


class GateConfig(FrozenConfig):
    """The bound on `token_mult_prob_error = mean exp|gen - prev|` past which a run stops."""

    max_token_mult_prob_error: float = Field(default=1.05, gt=1)


class GRPOConfig(LoopConfig):
    """One iteration: `num_steps_per_iteration` times roll out, score, train, sync.

    A step samples `num_prompts_per_step * num_generations_per_prompt` completions and makes
    optimizer steps of `train_global_batch_size` sequences (all of them, where it is left out).
    """

    learning_rate: PositiveFloat = 1e-3
    num_steps_per_iteration: PositiveInt = 50
    num_prompts_per_step: PositiveInt = 32
    num_generations_per_prompt: PositiveInt = 16
    train_global_batch_size: PositiveInt | None = None
    advantage: AdvantageConfig = GroupNormalized()
    loss: ClippedLoss = ClippedLoss()
    gate: GateConfig = GateConfig()
    save_every_num_steps: PositiveInt = 10

    @property
    def num_sequences_per_step(self) -> int:
        """Completions sampled in a step."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @model_validator(mode="after")
    def _no_contradiction(self) -> "GRPOConfig":
        if self.num_generations_per_prompt == 1:
            raise ValueError(
                f"num_generations_per_prompt is 1, but advantage {self.advantage.kind!r} compares "
                "the completions of one prompt with each other, so every advantage would be 0; "
                "use at least 2"
            )
        batch = self.train_global_batch_size
        if batch is not None and self.num_sequences_per_step % batch:
            raise ValueError(
                f"train_global_batch_size ({batch}) must divide num_prompts_per_step x "
                f"num_generations_per_prompt ({self.num_sequences_per_step})"
            )
        return self


class GRPOSchedule(GRPOConfig):
    """How many iterations to run; each is a cached stage that does not know how many follow."""

    num_iterations: PositiveInt = 4

    @property
    def iteration(self) -> GRPOConfig:
        """The settings of one iteration, equal whatever `num_iterations` is."""
        values: dict[str, Any] = self.model_dump(exclude={"num_iterations"})
        return GRPOConfig.model_validate(values)


class GRPOSettings(RolloutSettings):
    """All that `GRPOTrainer` reads."""

    grpo: GRPOConfig = GRPOConfig()
