"""Settings of group-relative policy optimization and its relatives.

Each variant of an advantage (`advantage_config.py`), a loss or a correction (`loss_config.py`) is a
type with a `kind`; `presets.py` names the published combinations.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

from nemo_rl_core.algorithms.grpo.advantage_config import (
    GDPO,
    AdvantageConfig,
    GroupNormalized,
    ReinforcePlusPlus,
    WhitenedReturns,
)
from nemo_rl_core.algorithms.grpo.loss_config import (
    ClippedLoss,
    CustomPolicyLoss,
    GSPOLoss,
    LossConfig,
    OnPolicyLoss,
    TruncatedImportance,
)
from nemo_rl_core.algorithms.grpo.presets import with_preset
from nemo_rl_core.config.agents import AgentEnvironment
from nemo_rl_core.config.algorithm import Algorithm
from nemo_rl_core.config.base import FrozenConfig, kind_or
from nemo_rl_core.config.environment import EnvironmentConfig, is_multi_turn
from nemo_rl_core.config.functions import CustomAdvantage
from nemo_rl_core.config.generation import refuse_for_training
from nemo_rl_core.config.kl import KLInReward
from nemo_rl_core.config.trainer import (
    GateConfig,
    LoopConfig,
    RolloutSettings,
    refuse_busy_judge_gpu,
)
from nemo_rl_core.errors import ConfigError


class OverlongPenalty(FrozenConfig):
    """Subtracts reward from rollouts within `buffer_tokens` of the limit, up to `penalty` at it.

    In rollouts of several turns the tokens of the environment count too, including an answer that
    did not fit any more.

    Attributes:
        buffer_tokens: Tokens before the limit over which the penalty grows from 0.
        penalty: Reward that is subtracted at the limit.
    """

    kind: Literal["penalty"] = "penalty"
    buffer_tokens: PositiveInt
    penalty: PositiveFloat = 1.0


class OverlongFilter(FrozenConfig):
    """Leaves truncated completions out of the loss; they still count in their group's mean."""

    kind: Literal["filter"] = "filter"


OverlongConfig = Annotated[
    Annotated[OverlongPenalty, Tag("penalty")] | Annotated[OverlongFilter, Tag("filter")],
    kind_or("penalty"),
]


class DynamicSampling(FrozenConfig):
    """Draws further prompts to replace groups whose rewards are all equal.

    `max_draws` counts every draw of a step, including the first; after the last one the step trains
    on the groups that it has. In asynchronous training the draws of later steps follow each other
    while a step is trained.

    Attributes:
        max_draws: Maximum number of draws of a step, including the first.
    """

    max_draws: int = Field(default=10, ge=2)


class Asynchronous(FrozenConfig):
    """The engine samples for the next steps while the model trains.

    The weights that draw a step's first tokens are at most `max_staleness` updates older than those
    that the step trains; each update reaches vLLM at once, in the middle of completions, and other
    engines between steps. Rollouts of vLLM that are missing after `step_timeout_seconds` are
    requested again, then dropped and counted; null waits forever. With `max_staleness` 0 the engine
    waits for every update, and the weights are those of synchronous training.

    Attributes:
        max_staleness: Maximum number of updates by which the weights that start a step's
            completions may be older than those that are trained.
        step_timeout_seconds: Seconds that a step waits for a completion before it is requested
            again; None waits forever.
    """

    renamed: ClassVar[Mapping[str, str]] = {"timeout_seconds": "step_timeout_seconds"}

    max_staleness: NonNegativeInt = 1
    step_timeout_seconds: PositiveFloat | None = 1800.0


class GRPOConfig(LoopConfig):
    """One iteration: `num_steps_per_iteration` times roll out, score, train, sync.

    A step samples `num_prompts_per_step * num_generations_per_prompt` completions and makes
    optimizer steps of `train_global_batch_size` sequences (all of them by default).

    Input may name one of `presets.py`, such as `{preset: dapo, learning_rate: 1e-6}`; other keys
    override it. The config has the result and no `preset`, so that a cache does not depend on how
    the config was written. `GRPOTrainer` reads it.

    Attributes:
        preset: A published combination of the keys below, by name; other keys override it.
        num_steps_per_iteration: Steps of one iteration, which is one cached stage.
        num_prompts_per_step: Prompts of one step.
        num_generations_per_prompt: Completions of each prompt: the size of a group.
        train_global_batch_size: Sequences of one optimizer step; None makes one optimizer step of
            all sequences.
        advantage: Formula that turns rewards into advantages.
        loss: The policy loss.
        overlong: Treatment of completions near or at the limit of tokens; None treats them like
            others.
        dynamic_sampling: Further draws that replace groups whose rewards are all equal; None trains
            on all groups.
        asynchronous: Sampling of the next steps while a step is trained; None alternates
            sampling and training.
        gate: Allowed difference between the engine's and the trainer's logprobs.
    """

    shorthands: ClassVar[frozenset[str]] = frozenset({"preset"})

    algorithm: ClassVar[Algorithm] = Algorithm(
        "grpo",
        stage="grpo_iteration",
        pipeline="grpo",
        trainer="GRPOTrainer",
        learning_rate=1e-6,
        rows_per_step="num_prompts_per_step",
        samples=True,
    )

    learning_rate: PositiveFloat = 1e-3
    num_steps_per_iteration: PositiveInt = 50
    num_prompts_per_step: PositiveInt = 32
    num_generations_per_prompt: PositiveInt = 16
    train_global_batch_size: PositiveInt | None = None
    advantage: AdvantageConfig = GroupNormalized()
    loss: LossConfig = ClippedLoss()
    overlong: OverlongConfig | None = None
    dynamic_sampling: DynamicSampling | None = None
    asynchronous: Asynchronous | None = None
    gate: GateConfig = GateConfig()
    save_every_num_steps: PositiveInt = 10

    @model_validator(mode="before")
    @classmethod
    def _lay_over_preset(cls, values: Any) -> Any:
        return with_preset(values) if isinstance(values, dict) else values

    @model_validator(mode="before")
    @classmethod
    def _correct_for_staleness(cls, values: Any) -> Any:
        """Adds an importance correction for samples of older weights, unless the loss sets one."""
        if not isinstance(values, dict) or values.get("asynchronous") is None:
            return values
        loss = values.get("loss", {})
        if not isinstance(loss, dict) or loss.get("kind") == "function":
            return values
        return {**values, "loss": {"importance": TruncatedImportance().model_dump(), **loss}}

    @model_validator(mode="wrap")
    @classmethod
    def _correction_is_default(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Counts a loss that only `_correct_for_staleness` added as not set."""
        config = handler(values)
        if isinstance(values, dict) and not {"loss", "preset"} & values.keys():
            config.__pydantic_fields_set__.discard("loss")
        return config

    @property
    def num_sequences_per_step(self) -> int:
        """Completions sampled in a step."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def reads_reference(self) -> bool:
        """Whether a step computes logprobs of the reference policy."""
        reads_column = isinstance(self.loss, CustomPolicyLoss) and self.loss.needs_reference
        return self.loss.kl is not None or reads_column

    @property
    def num_scorings(self) -> int:
        """Extra forward passes per step for logprobs.

        With one optimizer step, the training pass itself computes the policy's logprobs.
        """
        batch, sequences = self.train_global_batch_size, self.num_sequences_per_step
        updates_once = batch in (None, sequences) and not self.has_kl_in_reward
        return (not updates_once) + self.reads_reference

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether rewards are lowered by the divergence from the reference policy."""
        return isinstance(self.loss.kl, KLInReward)

    @model_validator(mode="after")
    def _groups_have_members(self) -> "GRPOConfig":
        if self.num_generations_per_prompt > 1:
            return self
        if not isinstance(self.advantage, ReinforcePlusPlus | CustomAdvantage):
            raise ValueError(
                f"num_generations_per_prompt is 1, but advantage {self.advantage.kind!r} compares "
                "the completions of one prompt with each other, so every advantage would be 0; "
                "use at least 2, or advantage 'reinforce_plus_plus', which needs no groups"
            )
        if self.dynamic_sampling:
            raise ValueError(
                "dynamic_sampling drops groups whose rewards are all equal, and with "
                "num_generations_per_prompt 1 that is every group; use at least 2, or leave "
                "dynamic_sampling out"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_steps_fit(self) -> "GRPOConfig":
        batch, sequences = self.train_global_batch_size, self.num_sequences_per_step
        if batch is None or batch == sequences:
            return self
        if sequences % batch:
            raise ValueError(
                f"train_global_batch_size ({batch}) must divide num_prompts_per_step x "
                f"num_generations_per_prompt ({sequences})"
            )
        if isinstance(self.loss, OnPolicyLoss):
            raise ValueError(
                f"loss 'on_policy' takes the weights to be those that sampled, but "
                f"train_global_batch_size ({batch}) splits the {sequences} sequences of a step "
                f"into {sequences // batch} optimizer steps; leave it out, or use loss 'clipped'"
            )
        return self

    @model_validator(mode="after")
    def _parts_go_together(self) -> "GRPOConfig":
        by_token = isinstance(self.advantage, WhitenedReturns)
        if isinstance(self.loss, GSPOLoss) and by_token and self.has_kl_in_reward:
            raise ValueError(
                f"loss 'gspo' has one ratio per sequence, but advantage {self.advantage.kind!r} "
                "with the KL penalty in the reward differs from token to token; use kl.place "
                "'in_loss', or an advantage of groups"
            )
        if isinstance(self.loss, GSPOLoss) and credits_turns(self.advantage):
            raise ValueError(
                "loss 'gspo' has one ratio per sequence, but advantage.credit 'turn' differs from "
                "turn to turn; use another loss, or credit 'episode'"
            )
        one_reward = self.has_kl_in_reward or isinstance(self.overlong, OverlongPenalty)
        if isinstance(self.advantage, GDPO) and one_reward:
            raise ValueError(
                "advantage 'gdpo' normalizes several rewards separately, so there is no single "
                "reward to take a penalty from; use kl.place 'in_loss', and give a penalty on "
                "length as one of the rewards"
            )
        return self

    @model_validator(mode="after")
    def _stale_samples_can_be_used(self) -> "GRPOConfig":
        if self.asynchronous is None:
            return self
        if isinstance(self.loss, OnPolicyLoss) and self.asynchronous.max_staleness:
            raise ValueError(
                "loss 'on_policy' takes the weights to be those that sampled, but "
                f"asynchronous.max_staleness is {self.asynchronous.max_staleness}; set it to 0, or "
                "use loss 'clipped'"
            )
        return self


class GRPOSchedule(GRPOConfig):
    """The settings of one iteration, and the number of iterations.

    Each iteration is a cached stage, which a higher number of iterations does not change.
    Recipes have it as their section `grpo`, and `plan_grpo` reads it.

    Attributes:
        num_iterations: Iterations, one after the other, each a cached stage.
    """

    num_iterations: PositiveInt = 4

    @property
    def iteration(self) -> GRPOConfig:
        """The settings of one iteration, independent of `num_iterations`."""
        values: dict[str, Any] = self.model_dump(exclude={"num_iterations"})
        return GRPOConfig.model_validate(values)


class GRPOSettings(RolloutSettings):
    """All settings that `GRPOTrainer` reads."""

    grpo: GRPOConfig = GRPOConfig()

    @model_validator(mode="after")
    def _fits_what_is_sampled(self) -> "GRPOSettings":
        refuse_for_training(self.generation)
        refuse_overlong(self.grpo, longest=self.max_rollout_tokens)
        refuse_busy_judge_gpu(
            self.cluster,
            self.generation,
            self.environment,
            samples_ahead=self.grpo.asynchronous is not None,
        )
        return self


def credits_turns(advantage: AdvantageConfig) -> bool:
    """Whether turns have different advantages."""
    return getattr(advantage, "credit", "episode") == "turn"


def refuse_turn_credit(grpo: GRPOConfig, environment: EnvironmentConfig) -> None:
    """Refuses credit by turn where turns have no rewards."""
    if not credits_turns(grpo.advantage):
        return
    if isinstance(environment, AgentEnvironment):
        raise ConfigError(
            "advantage.credit 'turn' needs rewards of turns, but an agent has one of its episode",
            expected="advantage.credit 'episode'",
            got="advantage.credit 'turn' with environment.kind agent",
            fix="leave credit out",
        )
    if not is_multi_turn(environment):
        raise ConfigError(
            "advantage.credit 'turn' needs rewards of turns",
            expected="an environment that answers the policy and rewards each of its turns",
            got=f"{environment.kind!r}, which scores one completion",
            fix="use such an environment, or leave credit out",
        )


def refuse_overlong(grpo: GRPOConfig, *, longest: int) -> None:
    """Refuses a buffer of the overlong penalty that is longer than a completion can be.

    `longest` is the maximum number of tokens of a completion, in all its turns together.
    """
    overlong = grpo.overlong
    if isinstance(overlong, OverlongPenalty) and overlong.buffer_tokens > longest:
        raise ValueError(
            f"overlong.buffer_tokens ({overlong.buffer_tokens}) is more than "
            f"generation.max_new_tokens or rollouts.max_rollout_tokens ({longest}); take about a "
            "fifth of it, or overlong: null"
        )
