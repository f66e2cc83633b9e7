"""Settings of group-relative policy optimisation and its relatives.

Each variant of a loss, an advantage or a correction is a type with a `kind`; `presets.py` names the
published combinations. What is left out is None, never a kind of its own: `off` is false in YAML.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Discriminator,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

from nemo_rl_core.algorithms.grpo.presets import with_preset
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.generation import (
    SamplingConfig,
    VllmGenerationConfig,
    refuse_for_training,
)
from nemo_rl_core.config.trainer import GateConfig, LoopConfig, RolloutSettings
from nemo_rl_core.errors import ConfigError


class GroupNormalized(FrozenConfig):
    """`(r - mean_group) / (std_group + 1e-6)` with the unbiased std (GRPO).

    With the KL penalty in the reward, the std is that of the rewards before it is taken off.
    """

    kind: Literal["group_normalized"] = "group_normalized"


class GroupCentered(FrozenConfig):
    """`r - mean_group`, not divided by the spread (Dr. GRPO)."""

    kind: Literal["group_centered"] = "group_centered"


class LeaveOneOut(FrozenConfig):
    """`r_i - mean_{j != i} r_j` (RLOO)."""

    kind: Literal["leave_one_out"] = "leave_one_out"


class ReinforcePlusPlus(FrozenConfig):
    """Returns of tokens, whitened over all valid tokens of the step; needs no groups."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"


class ReinforcePlusPlusBaseline(FrozenConfig):
    """`reinforce_plus_plus` of rewards less their group's mean."""

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


class GDPO(FrozenConfig):
    """`group_normalized` of each of several rewards, weighted, summed, whitened over the step.

    `weights` are in the order of `Rollout.components`.

    Attributes:
        weights: The weight of each reward.
    """

    kind: Literal["gdpo"] = "gdpo"
    weights: list[FiniteFloat] = Field(min_length=1)


AdvantageConfig = Annotated[
    GroupNormalized
    | GroupCentered
    | LeaveOneOut
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | GDPO,
    Field(discriminator="kind"),
]


class KLPenalty(FrozenConfig):
    """A penalty on the divergence from the reference policy, weighted by `beta`.

    `kind` is the estimator of the value: k1 `-d`, k2 `d^2 / 2`, k3 `e^d - 1 - d` with `d = ref -
    cur`, each within +-10. In the loss every kind has the gradient of `KL(policy || reference)`,
    `-d` a token, so that they differ in what is reported alone; GRPO's paper (arXiv:2402.03300,
    equation 20) has `1 - e^d` instead. In the reward the value is taken, measured once between the
    policy that sampled and the reference: summed over the sequence for advantages of groups, and
    token by token for `reinforce_plus_plus` and its baseline variant.

    Attributes:
        kind: The estimator.
        beta: The weight of the penalty.
        place: Whether the penalty is part of the loss, or is taken off the reward.
    """

    kind: Literal["k1", "k2", "k3"] = "k3"
    beta: NonNegativeFloat = 0.01
    place: Literal["in_loss", "in_reward"] = "in_loss"


class TruncatedImportance(FrozenConfig):
    """`min(w, cap)` with `w = exp(prev - gen)` (TIS); `cap: .inf` is the full weight.

    Attributes:
        cap: The highest weight.
    """

    kind: Literal["truncated"] = "truncated"
    cap: PositiveFloat = 2.0


class _Bounds(FrozenConfig):
    """Bounds of what is kept.

    Attributes:
        low: The lowest value that is kept.
        high: The highest value that is kept.
    """

    low: NonNegativeFloat = 0.5
    high: PositiveFloat = 2.0

    @model_validator(mode="after")
    def _ordered(self) -> "_Bounds":
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        return self


class BandImportance(_Bounds):
    """`w` inside `[low, high]`, and 0 outside (IcePop)."""

    kind: Literal["band"] = "band"


class SequenceMaskImportance(_Bounds):
    """`w`, and 0 in sequences whose geometric mean lies outside `[low, high]`."""

    kind: Literal["sequence_mask"] = "sequence_mask"


ImportanceConfig = Annotated[
    TruncatedImportance | BandImportance | SequenceMaskImportance, Field(discriminator="kind")
]


class ConstantDenominator(FrozenConfig):
    """The sum over tokens, divided by `max_tokens` a sequence whatever its length (Dr. GRPO).

    Attributes:
        max_tokens: The divisor of each sequence.
    """

    kind: Literal["constant"] = "constant"
    max_tokens: PositiveInt


class _PolicyLoss(FrozenConfig):
    """What all losses share; `kl: null` leaves the reference policy out altogether.

    Attributes:
        reduction: How token losses become one number: the mean over all tokens of the step, the
            mean over sequences of their own means, or a sum with a constant divisor.
        kl: The penalty on the divergence from the reference policy; None has no reference policy.
        importance: The correction for the difference between the engine's logprobs and the
            trainer's; None makes none.
        entropy_bonus: The weight of the entropy of sampled tokens, which is subtracted from the
            loss.
    """

    reduction: Literal["token_mean", "sequence_mean"] | ConstantDenominator = "token_mean"
    kl: KLPenalty | None = KLPenalty()
    importance: ImportanceConfig | None = None
    entropy_bonus: NonNegativeFloat = 0.0


class ClippedLoss(_PolicyLoss):
    """The clipped surrogate, with a bound `dual_clip` for negative advantages where it is set.

    Attributes:
        clip_low: The ratio is clipped below `1 - clip_low`.
        clip_high: The ratio is clipped above `1 + clip_high`.
        dual_clip: The bound of the ratio for negative advantages; None sets none.
    """

    kind: Literal["clipped"] = "clipped"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: PositiveFloat = 0.2
    dual_clip: float | None = Field(default=None, gt=1)

    @model_validator(mode="after")
    def _dual_clip_is_outside(self) -> "ClippedLoss":
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"dual_clip ({self.dual_clip}) must be above 1 + clip_high ({1 + self.clip_high})"
            )
        return self


class CISPOLoss(_PolicyLoss):
    """`-A stopgrad(clip r) cur`: no token loses its gradient; `clip_low: 1` is no lower bound.

    Attributes:
        clip_low: The ratio is clipped below `1 - clip_low`.
        clip_high: The ratio is clipped above `1 + clip_high`.
    """

    kind: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, gt=0, le=1)
    clip_high: PositiveFloat = 4.0


class ReinforceLoss(_PolicyLoss):
    """`-A cur`."""

    kind: Literal["reinforce"] = "reinforce"


class OnPolicyLoss(_PolicyLoss):
    """`-A exp(cur - stopgrad(cur))`: one optimizer step a rollout, no pass for `prev`."""

    kind: Literal["on_policy"] = "on_policy"


class GSPOLoss(_PolicyLoss):
    """The clipped surrogate of one ratio a sequence, whose spread is that of a mean.

    An importance correction takes one weight a sequence, too, and like the ratio the geometric mean
    over its tokens. The weight of the sequence as such would be their product, which NeMo RL takes.

    Attributes:
        clip_low: The sequence's ratio is clipped below `1 - clip_low`.
        clip_high: The sequence's ratio is clipped above `1 + clip_high`.
        reduction: The mean over sequences: the ratio belongs to a sequence.
    """

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    clip_high: PositiveFloat = 4e-4
    reduction: Literal["sequence_mean"] = "sequence_mean"


class SAPOLoss(_PolicyLoss):
    """`-A sigmoid(tau (r - 1)) 4 / tau`, a gate that closes smoothly.

    Attributes:
        tau_positive: Temperature of the gate for advantages above 0.
        tau_negative: Temperature of the gate for other advantages.
    """

    kind: Literal["sapo"] = "sapo"
    tau_positive: PositiveFloat = 1.0
    tau_negative: PositiveFloat = 1.05


def _kind_or(unsaid: str) -> Discriminator:
    """Discriminates by `kind`; a map without one is of the kind `unsaid`."""

    def kind_of(value: Any) -> str:
        if isinstance(value, dict):
            return str(value.get("kind", unsaid))
        return str(getattr(value, "kind", unsaid))

    return Discriminator(kind_of)


LossConfig = Annotated[
    Annotated[ClippedLoss, Tag("clipped")]
    | Annotated[CISPOLoss, Tag("cispo")]
    | Annotated[ReinforceLoss, Tag("reinforce")]
    | Annotated[OnPolicyLoss, Tag("on_policy")]
    | Annotated[GSPOLoss, Tag("gspo")]
    | Annotated[SAPOLoss, Tag("sapo")],
    _kind_or("clipped"),
]


class OverlongPenalty(FrozenConfig):
    """Takes reward off rollouts within `buffer_tokens` of the limit, up to `penalty` at it.

    In several turns the tokens of the environment count, which use up the same room, and so does an
    answer of the environment for which there was no room any more.

    Attributes:
        buffer_tokens: Tokens before the limit over which the penalty grows from 0.
        penalty: What a rollout loses at the limit.
    """

    kind: Literal["penalty"] = "penalty"
    buffer_tokens: PositiveInt
    penalty: PositiveFloat = 1.0


class OverlongFilter(FrozenConfig):
    """Leaves truncated completions out of the loss; they still count in their group's mean."""

    kind: Literal["filter"] = "filter"


OverlongConfig = Annotated[
    Annotated[OverlongPenalty, Tag("penalty")] | Annotated[OverlongFilter, Tag("filter")],
    _kind_or("penalty"),
]


class DynamicSampling(FrozenConfig):
    """Draws prompts anew for groups whose rewards are all equal, keeping the others.

    `max_draws` counts every draw of a step, the first one included; after the last one the step
    trains on what there is.

    Attributes:
        max_draws: Times that a step samples, the first included.
    """

    max_draws: int = Field(default=10, ge=2)


class Asynchronous(FrozenConfig):
    """The engine samples for the next steps while the model trains.

    The weights that draw a step's first tokens are at most `max_staleness` updates older than those
    that the step trains; each update reaches the engine at once, in the middle of completions. What
    a step still misses after waiting for `timeout_seconds` is asked for once more, then given up
    and counted; null waits for ever. With `max_staleness` 0 the engine waits for every update, and
    the weights are those of training by turns.

    Attributes:
        max_staleness: The most updates by which the weights that start a step's completions may be
            older than those that are trained.
        timeout_seconds: How long a step waits for a completion before it is requested once more;
            None waits for ever.
    """

    max_staleness: NonNegativeInt = 1
    timeout_seconds: PositiveFloat | None = 1800.0


class GRPOConfig(LoopConfig):
    """One iteration: `num_steps_per_iteration` times roll out, score, train, sync.

    A step samples `num_prompts_per_step * num_generations_per_prompt` completions and makes
    optimizer steps of `train_global_batch_size` sequences (all of them, where it is left out).

    Input may name one of `presets.py`, such as `{preset: dapo, learning_rate: 1e-6}`; what stands
    beside it is laid over it. The config holds the outcome and no `preset`, so that a cache does
    not depend on how it was written.

    Attributes:
        preset: A published combination of the keys below, by name; keys beside it win.
        num_steps_per_iteration: Steps of one iteration, which is one cached stage.
        num_prompts_per_step: Prompts that a step samples completions of.
        num_generations_per_prompt: Completions of each prompt: the size of a group.
        train_global_batch_size: Sequences of one optimizer step; None makes one optimizer step of
            all sequences.
        advantage: How rewards become advantages.
        loss: The policy loss.
        overlong: What happens to completions near or at the limit of tokens; None treats them as
            others.
        dynamic_sampling: Samples again for groups whose rewards are all equal; None trains on what
            was sampled.
        asynchronous: Samples the next steps while a step is trained; None alternates.
        gate: How far the engine's logprobs may be from the trainer's.
    """

    shorthands: ClassVar[frozenset[str]] = frozenset({"preset"})

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
        """Samples of older weights are weighted, unless the loss says how, or that they are not."""
        if not isinstance(values, dict) or values.get("asynchronous") is None:
            return values
        loss = values.get("loss", {})
        if not isinstance(loss, dict):
            return values
        return {**values, "loss": {"importance": TruncatedImportance().model_dump(), **loss}}

    @property
    def num_sequences_per_step(self) -> int:
        """Completions sampled in a step."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether rewards are lowered by the divergence from the reference policy."""
        return self.loss.kl is not None and self.loss.kl.place == "in_reward"

    @model_validator(mode="after")
    def _groups_have_members(self) -> "GRPOConfig":
        if self.num_generations_per_prompt > 1:
            return self
        if not isinstance(self.advantage, ReinforcePlusPlus):
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
                f"train_global_batch_size ({batch}) makes {sequences // batch} optimizer steps of "
                f"{sequences} sequences; leave it out, or use loss 'clipped'"
            )
        return self

    @model_validator(mode="after")
    def _parts_go_together(self) -> "GRPOConfig":
        by_token = isinstance(self.advantage, ReinforcePlusPlus | ReinforcePlusPlusBaseline)
        if isinstance(self.loss, GSPOLoss) and by_token and self.has_kl_in_reward:
            raise ValueError(
                f"loss 'gspo' has one ratio a sequence, but advantage {self.advantage.kind!r} with "
                "the KL penalty in the reward differs from token to token; use kl.place "
                "'in_loss', or an advantage of groups"
            )
        one_reward = self.has_kl_in_reward or isinstance(self.overlong, OverlongPenalty)
        if isinstance(self.advantage, GDPO) and one_reward:
            raise ValueError(
                "advantage 'gdpo' normalizes several rewards apart, so there is no single reward "
                "to take a penalty from; use kl.place 'in_loss', and give a penalty on length as "
                "one of the rewards"
            )
        return self

    @model_validator(mode="after")
    def _stale_samples_can_be_used(self) -> "GRPOConfig":
        if self.asynchronous is None:
            return self
        if self.dynamic_sampling:
            raise ValueError(
                "dynamic_sampling draws until a step is full, which a step that was sampled ahead "
                "cannot; leave out dynamic_sampling or asynchronous"
            )
        if isinstance(self.loss, OnPolicyLoss) and self.asynchronous.max_staleness:
            raise ValueError(
                "loss 'on_policy' takes the weights to be those that sampled, but "
                f"asynchronous.max_staleness is {self.asynchronous.max_staleness}; set it to 0, or "
                "use loss 'clipped'"
            )
        return self


class GRPOSchedule(GRPOConfig):
    """How many iterations to run; each is a cached stage that does not know how many follow.

    Attributes:
        num_iterations: Iterations, one after the other, each a cached stage.
    """

    num_iterations: PositiveInt = 4

    @property
    def iteration(self) -> GRPOConfig:
        """The settings of one iteration, equal whatever `num_iterations` is."""
        values: dict[str, Any] = self.model_dump(exclude={"num_iterations"})
        return GRPOConfig.model_validate(values)


class GRPOSettings(RolloutSettings):
    """All that `GRPOTrainer` reads."""

    grpo: GRPOConfig = GRPOConfig()

    @model_validator(mode="after")
    def _fits_what_is_sampled(self) -> "GRPOSettings":
        refuse_for_training(self.generation)
        refuse_overlong(self.grpo, longest=self.max_rollout_tokens)
        refuse_sampling_ahead(self.grpo, self.generation)
        return self


def refuse_sampling_ahead(grpo: GRPOConfig, generation: SamplingConfig) -> None:
    """Refuses `asynchronous` with an engine that cannot take weights while it generates.

    Raises:
        ConfigError: Says which can.
    """
    if grpo.asynchronous is None:
        return
    num_workers = generation.num_engines * generation.ranks_per_engine
    if not isinstance(generation, VllmGenerationConfig) or num_workers > 1:
        raise ConfigError(
            "grpo.asynchronous needs an engine that takes weights while it generates",
            expected="generation.backend vllm, num_engines 1 and no parallel sizes",
            got=f"{type(generation).__name__}, {num_workers} workers",
            fix="change the section generation, or leave out grpo.asynchronous",
        )


def refuse_overlong(grpo: GRPOConfig, *, longest: int) -> None:
    """Refuses a buffer of the overlong penalty that is longer than a completion can be.

    Args:
        grpo: Has the penalty.
        longest: Tokens that a completion can have, all its turns together.

    Raises:
        ValueError: Says both.
    """
    overlong = grpo.overlong
    if isinstance(overlong, OverlongPenalty) and overlong.buffer_tokens > longest:
        raise ValueError(
            f"overlong.buffer_tokens ({overlong.buffer_tokens}) is more than "
            f"generation.max_new_tokens or rollouts.max_rollout_tokens ({longest}); take about a "
            "fifth of it, or overlong: null"
        )
