"""The policy losses, and their parts: reduction, KL penalty, importance correction.

An optional part is None if it is left out. A kind `off` would be read as false by YAML.
"""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, Tag, model_validator

from nemo_rl_core.config.base import Bound, FrozenConfig, kind_or
from nemo_rl_core.config.functions import CustomLoss
from nemo_rl_core.config.kl import KLInReward


class KLInLoss(FrozenConfig):
    """`beta` times an estimate of the KL to the reference policy, added to the loss.

    `kind` is the estimator of the value: k1 `-d`, k2 `d^2 / 2`, k3 `e^d - 1 - d` with `d = ref -
    cur`, each clipped to +-10. Every kind has the gradient of `KL(policy || reference)`, `-d` per
    token, so the kinds differ only in the reported value; GRPO's paper (arXiv:2402.03300, equation
    20) has `1 - e^d` instead.

    Attributes:
        place: Where the penalty is applied: it is added to the loss.
        kind: The estimator of the reported value.
        beta: The weight of the penalty.
    """

    place: Literal["in_loss"] = "in_loss"
    kind: Literal["k1", "k2", "k3"] = "k3"
    beta: NonNegativeFloat = 0.01


KLPenalty = Annotated[
    Annotated[KLInLoss, Tag("in_loss")] | Annotated[KLInReward, Tag("in_reward")],
    kind_or("in_loss", "place"),
]


class TruncatedImportance(FrozenConfig):
    """`min(w, cap)` with `w = exp(prev - gen)` (TIS); `cap: .inf` is the full weight.

    Attributes:
        cap: The highest weight.
    """

    kind: Literal["truncated"] = "truncated"
    cap: Bound = 2.0


class _Bounds(FrozenConfig):
    """Bounds of the weights that are kept.

    Attributes:
        low: Lowest value that is kept.
        high: Highest value that is kept.
    """

    low: NonNegativeFloat = 0.5
    high: Bound = 2.0

    @model_validator(mode="after")
    def _ordered(self) -> "_Bounds":
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) must be below high ({self.high})")
        return self


class BandImportance(_Bounds):
    """`w` inside `[low, high]`, and 0 outside (IcePop)."""

    kind: Literal["band"] = "band"


class SequenceMaskImportance(_Bounds):
    """`w`, or 0 in sequences whose geometric mean is outside `[low, high]`."""

    kind: Literal["sequence_mask"] = "sequence_mask"


ImportanceConfig = Annotated[
    TruncatedImportance | BandImportance | SequenceMaskImportance, Field(discriminator="kind")
]


class ConstantDenominator(FrozenConfig):
    """The sum over tokens, divided by `max_tokens` per sequence, regardless of length (Dr. GRPO).

    Attributes:
        max_tokens: The divisor of each sequence.
    """

    kind: Literal["constant"] = "constant"
    max_tokens: PositiveInt


class _PolicyLoss(FrozenConfig):
    """Base of all losses; `kl: null` does not use a reference policy.

    Attributes:
        reduction: Reduction of token losses to one number: the mean over all tokens of the step,
            the mean over sequences of their means, or a sum with a constant divisor.
        kl: The penalty on the divergence from the reference policy; None has no reference policy.
        importance: The correction for the difference between the engine's logprobs and the
            trainer's; None makes none.
        weighted_terms: The terms that the importance weight and the probability ratio multiply:
            `all`, or only those of the `policy`, which leaves the KL penalty and the entropy bonus
            uncorrected for samples of older weights.
        entropy_bonus: The weight of the entropy of sampled tokens, which is subtracted from the
            loss.
    """

    reduction: Literal["token_mean", "sequence_mean"] | ConstantDenominator = "token_mean"
    kl: KLPenalty | None = KLInLoss()
    importance: ImportanceConfig | None = None
    weighted_terms: Literal["all", "policy"] = "all"
    entropy_bonus: NonNegativeFloat = 0.0


class ClippedLoss(_PolicyLoss):
    """The clipped surrogate, optionally with a bound `dual_clip` for negative advantages.

    Attributes:
        clip_low: The ratio is clipped below `1 - clip_low`.
        clip_high: The ratio is clipped above `1 + clip_high`.
        dual_clip: The bound of the ratio for negative advantages; None sets none.
    """

    kind: Literal["clipped"] = "clipped"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: Bound = 0.2
    dual_clip: float | None = Field(default=None, gt=1, allow_inf_nan=True)

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
    clip_high: Bound = 4.0


class ReinforceLoss(_PolicyLoss):
    """`-A cur`."""

    kind: Literal["reinforce"] = "reinforce"


class OnPolicyLoss(_PolicyLoss):
    """`-A exp(cur - stopgrad(cur))`: one optimizer step per rollout, so that `prev` is `cur`."""

    kind: Literal["on_policy"] = "on_policy"


class GSPOLoss(_PolicyLoss):
    """The clipped surrogate with one ratio per sequence, the geometric mean over its tokens.

    An importance correction also uses one weight per sequence, the geometric mean over its tokens.
    NeMo RL uses the product over the tokens instead.

    Attributes:
        clip_low: The sequence's ratio is clipped below `1 - clip_low`.
        clip_high: The sequence's ratio is clipped above `1 + clip_high`.
        reduction: The mean over sequences, since a ratio belongs to a sequence.
    """

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    clip_high: Bound = 4e-4
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


class CustomPolicyLoss(CustomLoss):
    """A custom loss of advantages and old logprobs.

    Attributes:
        needs_reference: Whether the loss reads `reference_logprobs`.
        kl: A penalty that is subtracted from the reward; None subtracts none.
    """

    needs_reference: bool = False
    kl: KLInReward | None = None


BuiltinLoss = ClippedLoss | CISPOLoss | ReinforceLoss | OnPolicyLoss | GSPOLoss | SAPOLoss
LossConfig = Annotated[
    Annotated[ClippedLoss, Tag("clipped")]
    | Annotated[CISPOLoss, Tag("cispo")]
    | Annotated[ReinforceLoss, Tag("reinforce")]
    | Annotated[OnPolicyLoss, Tag("on_policy")]
    | Annotated[GSPOLoss, Tag("gspo")]
    | Annotated[SAPOLoss, Tag("sapo")]
    | Annotated[CustomPolicyLoss, Tag("function")],
    kind_or("clipped"),
]
