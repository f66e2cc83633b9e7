"""Settings of direct preference optimization.

In the formulas, `c` is the chosen and `r` the rejected sequence, `rho` the log-ratio of policy to
reference, summed over a sequence's tokens, `logp` the sum of the policy's logprobs, and `|c|` the
number of tokens.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from nemo_rl_core.config.algorithm import Algorithm
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.functions import CustomLoss
from nemo_rl_core.config.trainer import LoopConfig, TrainerSettings

Smoothing = Annotated[float, Field(ge=0, lt=0.5)]
"""The assumed rate of flipped labels; at one half a label has no information."""


class SFTTerm(FrozenConfig):
    """`weight` times the mean over chosen sequences of their negative log-likelihood.

    `per: token` divides each sequence's sum by its tokens, `per: sequence` does not.

    Attributes:
        weight: The factor of the term in the loss.
        per: Whether the negative log-likelihood of a sequence is a mean over its tokens or their
            sum.
    """

    weight: PositiveFloat = 1.0
    per: Literal["token", "sequence"] = "token"


class _Kind(FrozenConfig):
    """Base of all preference losses."""

    needs_reference: ClassVar[bool] = True
    needs_pairs: ClassVar[bool] = True


class _PairKind(_Kind):
    """A loss on margins, with an optional supervised term on the chosen sequences.

    Attributes:
        sft: A supervised term on the chosen sequences; None adds none.
    """

    sft: SFTTerm | None = None


class SigmoidLoss(_PairKind):
    """`-log sigmoid(beta (rho_c - rho_r))` (DPO), conservative with label smoothing (cDPO).

    Attributes:
        beta: Scales the log-ratios: a higher value keeps the policy closer to the reference.
        label_smoothing: The assumed share of pairs whose labels are flipped.
    """

    kind: Literal["sigmoid"] = "sigmoid"
    beta: PositiveFloat = 0.1
    label_smoothing: Smoothing = 0.0


class HingeLoss(_PairKind):
    """`max(0, 1 - beta (rho_c - rho_r))` (SLiC, RSO).

    Attributes:
        beta: Scales the log-ratios: a higher value keeps the policy closer to the reference.
    """

    kind: Literal["hinge"] = "hinge"
    beta: PositiveFloat = 0.1


class IPOLoss(_PairKind):
    """`(rho_c - rho_r - 1 / (2 beta))^2`, with rho averaged over tokens or summed.

    The two differ by more than scale, since sequences differ in length: the paper sums
    (arXiv:2310.12036), widely used implementations average.

    Attributes:
        beta: Scales the log-ratios: a higher value keeps the policy closer to the reference.
        per: Whether a log-ratio is a mean over tokens or their sum.
    """

    kind: Literal["ipo"] = "ipo"
    beta: PositiveFloat = 0.1
    per: Literal["token", "sequence"] = "token"


class RobustLoss(_PairKind):
    """DPO's loss, unbiased under labels flipped at the rate `label_smoothing` (robust DPO).

    Attributes:
        beta: Scales the log-ratios: a higher value keeps the policy closer to the reference.
        label_smoothing: The assumed share of pairs whose labels are flipped.
    """

    kind: Literal["robust"] = "robust"
    beta: PositiveFloat = 0.1
    label_smoothing: Smoothing = 0.1


class SimPOLoss(_PairKind):
    """`-log sigmoid(beta (logp_c / |c| - logp_r / |r|) - gamma)`, without a reference.

    `gamma` is the target margin itself (arXiv:2405.14734, equation 6), not its ratio to beta.

    Attributes:
        beta: Scales the mean logprobs.
        gamma: The target margin.
    """

    needs_reference: ClassVar[bool] = False

    kind: Literal["simpo"] = "simpo"
    beta: PositiveFloat = 2.0
    gamma: float = Field(default=1.0, ge=0)


class LengthNormalizedLoss(_PairKind):
    """`-log sigmoid(beta (rho_c / |c| - rho_r / |r|))`: DPO with log-ratios per token.

    Source: Tulu 3, arXiv:2411.15124, section 5.1.

    Attributes:
        beta: Scales the log-ratios: a higher value keeps the policy closer to the reference.
        label_smoothing: The assumed share of pairs whose labels are flipped.
    """

    kind: Literal["length_normalized"] = "length_normalized"
    beta: PositiveFloat = 5.0
    label_smoothing: Smoothing = 0.0


class KTOLoss(_Kind):
    """Sequences that are each desirable or not, unpaired, against the baseline `kl_baseline`.

    Attributes:
        beta: Scales the log-ratios: a higher value keeps the policy closer to the reference.
        desirable_weight: The weight of desirable sequences.
        undesirable_weight: The weight of undesirable sequences.
    """

    needs_pairs: ClassVar[bool] = False

    kind: Literal["kto"] = "kto"
    beta: PositiveFloat = 0.1
    desirable_weight: PositiveFloat = 1.0
    undesirable_weight: PositiveFloat = 1.0


class ORPOLoss(_Kind):
    """NLL of the chosen sequence plus `odds_weight` (lambda) times the log-odds-ratio term.

    The NLL is averaged over a sequence's tokens, then over pairs (arXiv:2403.07691, section 4). It
    is part of the loss, so there is no separate `sft` term.

    Attributes:
        odds_weight: The weight of the log-odds-ratio term.
    """

    needs_reference: ClassVar[bool] = False

    kind: Literal["orpo"] = "orpo"
    odds_weight: PositiveFloat = 0.1


class CustomPreferenceLoss(CustomLoss):
    """A custom loss; both rows of a pair, with equal `pair_ids`, are in one micro-batch.

    Attributes:
        needs_reference: Whether the loss reads `reference_logprobs`.
    """

    needs_pairs: ClassVar[bool] = True

    needs_reference: bool = True


BuiltinPreferenceLoss = (
    SigmoidLoss
    | HingeLoss
    | IPOLoss
    | RobustLoss
    | SimPOLoss
    | LengthNormalizedLoss
    | KTOLoss
    | ORPOLoss
)
PreferenceLoss = Annotated[
    BuiltinPreferenceLoss | CustomPreferenceLoss, Field(discriminator="kind")
]


class DPOConfig(LoopConfig):
    """One iteration: `num_steps_per_iteration` optimizer steps of `num_pairs_per_step` pairs.

    Attributes:
        num_steps_per_iteration: Optimizer steps of one iteration, which is one cached stage.
        num_pairs_per_step: Pairs of one optimizer step.
        loss: The preference loss.
    """

    algorithm: ClassVar[Algorithm] = Algorithm(
        "dpo",
        stage="dpo_iteration",
        pipeline="dpo",
        trainer="DPOTrainer",
        learning_rate=5e-7,
        rows_per_step="num_pairs_per_step",
    )

    learning_rate: PositiveFloat = 1e-4
    num_steps_per_iteration: PositiveInt = 50
    num_pairs_per_step: PositiveInt = 32
    loss: PreferenceLoss = SigmoidLoss()
    save_every_num_steps: PositiveInt = 10

    @property
    def needs_reference(self) -> bool:
        """Returns whether the loss needs logprobs of a reference policy."""
        return self.loss.needs_reference

    @property
    def reads_reference(self) -> bool:
        """Whether a step computes logprobs of the reference; other losses read cached ones."""
        return isinstance(self.loss, KTOLoss)

    @property
    def is_per_token(self) -> bool:
        """Returns whether the loss compares logprobs per token, and not of complete sequences."""
        loss = self.loss
        if isinstance(loss, IPOLoss):
            return loss.per == "token"
        return isinstance(loss, SimPOLoss | LengthNormalizedLoss | ORPOLoss)


class DPOSchedule(DPOConfig):
    """The settings of one iteration, and the number of iterations.

    Each iteration is a cached stage, which a higher number of iterations does not change.

    Attributes:
        num_iterations: Iterations, one after the other, each a cached stage.
    """

    num_iterations: PositiveInt = 1

    @property
    def iteration(self) -> DPOConfig:
        """The settings of one iteration, independent of `num_iterations`."""
        values: dict[str, Any] = self.model_dump(exclude={"num_iterations"})
        return DPOConfig.model_validate(values)


class DPOSettings(TrainerSettings):
    """All settings of `DPOTrainer`."""

    dpo: DPOConfig = DPOConfig()
