"""Advantages of completions within their group.

A group is the completions of one prompt, given by explicit ids in any order; ids need not be dense
or sorted. A group with equal rewards has no information, so its advantages are exactly 0, not
rounding noise divided by a tiny std. A group of one is such a group. A NaN reward affects its own
group only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from nemo_rl_core.functional.masked import masked_mean, zero_masked
from nemo_rl_core.functional.rewards import returns_to_go

EPSILON = 1e-6
"""Added to a std before dividing by it, as in losses of the GRPO family."""


def group_normalized(
    rewards: Tensor, group_ids: Tensor, *, outcomes: Tensor | None = None
) -> Tensor:
    """`(r - mean_group) / (std_group + 1e-6)` with the unbiased std.

    If a penalty was subtracted from the rewards, `outcomes` are the rewards before it: their std is
    the divisor, and if they are equal the advantage is 0. The std of penalized rewards would scale
    a penalty of any weight to full strength in a group of equal outcomes. Source: GRPO, Shao et al.
    2024, arXiv:2402.03300, section 4.1.2.

    Args:
        rewards: `[B]` floating point.
        group_ids: `[B]` int64.
        outcomes: `[B]`, rewards for the std; None takes `rewards`.

    Returns:
        `[B]` advantages in the dtype of `rewards`.
    """
    groups = _Groups.of(rewards, group_ids)
    measured = groups
    if outcomes is not None and outcomes is not rewards:
        measured = _Groups.of(outcomes, group_ids)
    squares = measured.sum_by_group(measured.centered.square())
    std = (squares / (groups.sizes - 1).clamp(min=1)).sqrt()
    centered = torch.where(measured.is_constant, 0.0, groups.centered)
    return centered / (std + EPSILON)


def group_centered(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`r - mean_group`, not divided by the std.

    Source: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2.

    Args:
        rewards: `[B]` floating point.
        group_ids: `[B]` int64.

    Returns:
        `[B]` advantages in the dtype of `rewards`.
    """
    return _Groups.of(rewards, group_ids).centered


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`r_i - mean_{j != i} r_j` within the group, which is `(r_i - mean) * n / (n - 1)`.

    Source: RLOO, Ahmadian et al. 2024, arXiv:2402.14740, section 3.3.

    Args:
        rewards: `[B]` floating point.
        group_ids: `[B]` int64.

    Returns:
        `[B]` advantages in the dtype of `rewards`.
    """
    groups = _Groups.of(rewards, group_ids)
    return groups.centered * groups.sizes / (groups.sizes - 1).clamp(min=1)


def zero_variance_fraction(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The share of groups whose rewards are all equal, and which are therefore not informative.

    Evaluated per group: with rewards [1, 0, 0, 0] the group is informative, although three rewards
    are equal.

    Args:
        rewards: `[B]`, B at least 1.
        group_ids: `[B]` int64.

    Returns:
        0-dim, between 0 and 1, in the dtype of `rewards`.
    """
    groups = _Groups.of(rewards, group_ids)
    # Each row has weight 1/size of its group, so that the sum over rows counts groups.
    shares = 1 / groups.sizes
    return (shares * groups.is_constant).sum() / shares.sum()


def informative_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns whether a row's group has different rewards and is therefore informative.

    Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) keeps these and samples new ones for the
    others. As in `zero_variance_fraction`, all rows of [1, 0, 0, 0] are informative.

    Args:
        rewards: `[B]`.
        group_ids: `[B]` int64.

    Returns:
        `[B]` bool, equal within a group.
    """
    return ~_Groups.of(rewards, group_ids).is_constant


@dataclass(frozen=True)
class Moments:
    """What whitening needs to know of all valid entries, wherever they lie.

    Deviations are from a part's own mean, and parts are joined by the distances of their means, so
    that no two large sums are subtracted. Source: Chan, Golub and LeVeque 1979, "Updating formulae
    and a pairwise algorithm for computing sample variances".

    Attributes:
        count: Of valid entries.
        mean: Of them; 0 without any.
        squares: The sum of their squared deviations from the mean.
        lowest: The least of them; infinity without any.
        highest: The largest; minus infinity without any.

    Example:
        >>> parts = [torch.tensor([1.0, 3.0]), torch.tensor([8.0])]
        >>> moments = [Moments.of(part, torch.ones(len(part)).bool()) for part in parts]
        >>> Moments.joined(moments)
        Moments(count=3, mean=4.0, squares=26.0, lowest=1.0, highest=8.0)
    """

    count: int
    mean: float
    squares: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> "Moments":
        """Those of one part, summed in the dtype of its values.

        Args:
            values: Any shape; may have no entries.
            mask: Bool, the shape of `values`.
        """
        mean = masked_mean(values, mask)
        squares = zero_masked(values - mean, mask).square().sum()
        valid = values[mask]
        bounds = [torch.inf, -torch.inf]
        if valid.numel():
            bounds = torch.stack(valid.aminmax()).tolist()
        return cls(int(mask.sum()), mean.item(), squares.item(), *bounds)

    @classmethod
    def joined(cls, parts: "Sequence[Moments]") -> "Moments":
        """Those of all parts together, in float64; of one part with entries, its own."""
        filled = [part for part in parts if part.count] or parts[:1]
        columns = [[getattr(part, each.name) for part in filled] for each in fields(cls)]
        counts, means, squares, lowest, highest = torch.tensor(columns, dtype=torch.float64)
        first, count = means[0], counts.sum()
        mean = first + (counts * (means - first)).sum() / count.clamp(min=1)
        total = (squares + counts * (means - mean).square()).sum()
        # Minimum and maximum of tensors keep what is not a number.
        bounds = lowest.min().item(), highest.max().item()
        return cls(int(count), mean.item(), total.item(), *bounds)


def whitened(values: Tensor, mask: Tensor, moments: Moments | None = None) -> Tensor:
    """`(x - mean) / (std + 1e-6)` over all valid entries, with the unbiased std.

    Equal entries become exactly 0, not rounding noise divided by a tiny std. The population std,
    which some implementations use, is smaller by the factor `sqrt((n - 1) / n)` of n entries.

    Args:
        values: Any shape.
        mask: Bool, the shape of `values`.
        moments: Of the entries of all parts, where the values are one of several; None for all.

    Returns:
        The shape of `values`; 0 at invalid entries.
    """
    found = Moments.of(values, mask) if moments is None else moments
    if found.lowest == found.highest:
        return torch.zeros_like(values)
    centered = zero_masked(values - found.mean, mask)
    squares, others = torch.tensor(found.squares, dtype=values.dtype), max(found.count - 1, 1)
    return centered / ((squares / others).sqrt() + EPSILON)


def decoupled_group_normalized(
    rewards: Tensor, group_ids: Tensor, sample_mask: Tensor, *, weights: Sequence[float]
) -> Tensor:
    """`group_normalized` of each reward alone, their weighted sum, whitened over the batch.

    Normalizing each reward before the sum distinguishes combinations of rewards with equal sums;
    whitening makes the scale independent of the number of rewards. Source: GDPO, arXiv:2601.05242.

    Args:
        rewards: `[B, R]` floating point.
        group_ids: `[B]` int64.
        sample_mask: `[B]` bool; the sequences used for whitening.
        weights: R factors, one per reward.

    Returns:
        `[B]` advantages, 0 at masked sequences.
    """
    total = torch.zeros_like(rewards[:, 0])
    for reward, weight in zip(rewards.unbind(dim=1), weights, strict=True):
        total = total + weight * group_normalized(reward, group_ids)
    return whitened(total, sample_mask)


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, moments: Moments | None = None) -> Tensor:
    """Returns-to-go of token rewards, whitened over all valid tokens of the batch.

    The variant with a baseline subtracts the group's mean from the outcome first. Source:
    REINFORCE++, Hu et al. 2025, arXiv:2501.03262, section 3.

    Args:
        rewards: `[B, T-1]`: the outcome at the last token, minus any penalty per token.
        mask: `[B, T-1]` bool.
        moments: As `whitened` takes them, of `returns_to_go`.

    Returns:
        `[B, T-1]` advantages, 0 at invalid tokens.
    """
    return whitened(returns_to_go(rewards, mask), mask, moments)


@dataclass(frozen=True)
class _Groups:
    """Statistics of each row's group; all but `index` and `num_groups` are `[B]`."""

    index: Tensor
    num_groups: int
    sizes: Tensor
    is_constant: Tensor
    centered: Tensor

    @classmethod
    def of(cls, rewards: Tensor, group_ids: Tensor) -> "_Groups":
        assert rewards.shape == group_ids.shape, "one group id a reward"
        # Groups mostly lie one behind the other, where nothing has to be sorted.
        is_sorted = bool((group_ids[1:] >= group_ids[:-1]).all())
        unique = torch.unique_consecutive if is_sorted else torch.unique
        _, index, counts = unique(group_ids, return_inverse=True, return_counts=True)
        num_groups = counts.numel()
        sizes = counts.to(rewards.dtype)[index]
        lowest, highest = (
            rewards.new_zeros(num_groups).scatter_reduce(
                0, index, rewards, reduce=kind, include_self=False
            )[index]
            for kind in ("amin", "amax")
        )
        is_constant = lowest == highest
        centered = rewards - _sum_by_group(rewards, index, num_groups) / sizes
        centered = torch.where(is_constant, torch.zeros_like(centered), centered)
        return cls(index, num_groups, sizes, is_constant, centered)

    def sum_by_group(self, values: Tensor) -> Tensor:
        return _sum_by_group(values, self.index, self.num_groups)


def _sum_by_group(values: Tensor, index: Tensor, num_groups: int) -> Tensor:
    return values.new_zeros(num_groups).index_add(0, index, values)[index]
