"""Formulas that turn rewards into advantages, one type each."""

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.functions import CustomAdvantage


class _OfGroup(FrozenConfig):
    """Base of the formulas that compare the episodes of a group.

    Attributes:
        credit: Reward that is compared: that of the `episode` for all of its tokens, or for each
            `turn` the rewards of this turn and later ones, with the same turn of other episodes.
    """

    credit: Literal["episode", "turn"] = Field(
        default="episode", exclude_if=lambda value: value == "episode"
    )


class GroupNormalized(_OfGroup):
    """`(r - mean_group) / (std_group + 1e-6)` with the unbiased std (GRPO).

    With the KL penalty in the reward, the std is that of the rewards without the penalty.
    """

    kind: Literal["group_normalized"] = "group_normalized"


class GroupCentered(_OfGroup):
    """`r - mean_group`, not divided by the spread (Dr. GRPO)."""

    kind: Literal["group_centered"] = "group_centered"


class LeaveOneOut(_OfGroup):
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


WhitenedReturns = ReinforcePlusPlus | ReinforcePlusPlusBaseline
"""Whitened returns of tokens, instead of one number per sequence."""

AdvantageConfig = Annotated[
    GroupNormalized
    | GroupCentered
    | LeaveOneOut
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | GDPO
    | CustomAdvantage,
    Field(discriminator="kind"),
]
