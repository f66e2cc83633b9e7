"""Advantages of completions within their group.

A group is the completions of one prompt, given by explicit ids in any order; ids need not be dense
or sorted. A group with equal rewards, such as a group of one, has no information, so its advantages
are exactly 0, not rounding noise divided by a tiny std. A NaN reward affects only its group.

Shapes: `rewards [B]` (floating point) and `group_ids [B]` (int64); advantages are `[B]` in the
dtype of the rewards.
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

    If a penalty was subtracted from the rewards, `outcomes [B]` are the rewards before it: their
    std is the divisor, and if they are equal the advantage is 0. The std of penalized rewards would
    scale a penalty of any weight to full strength in a group of equal outcomes. Source: GRPO, Shao
    et al. 2024, arXiv:2402.03300, section 4.1.2.
    """
    groups = _Groups.of(rewards, group_ids)
    measured = groups
    if outcomes is not None and outcomes is not rewards:
        measured = _Groups.of(outcomes, group_ids)
    squares = _sum_by_group(measured.centered.square(), measured.index, measured.num_groups)
    std = (squares / (groups.sizes - 1).clamp(min=1)).sqrt()
    centered = torch.where(measured.is_constant, 0.0, groups.centered)
    return centered / (std + EPSILON)


def group_centered(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`r - mean_group`, not divided by the std.

    Source: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, section 3.2.
    """
    return _Groups.of(rewards, group_ids).centered


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`r_i - mean_{j != i} r_j` within the group, which is `(r_i - mean) * n / (n - 1)`.

    Source: RLOO, Ahmadian et al. 2024, arXiv:2402.14740, section 3.3.
    """
    groups = _Groups.of(rewards, group_ids)
    return groups.centered * groups.sizes / (groups.sizes - 1).clamp(min=1)


def zero_variance_fraction(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns the fraction of groups whose rewards are all equal (not informative), 0-dim.

    With rewards [1, 0, 0, 0] a group is informative, although three rewards are equal.
    """
    groups = _Groups.of(rewards, group_ids)
    # Each row has weight 1/size of its group, so that the sum over rows counts groups.
    shares = 1 / groups.sizes
    return (shares * groups.is_constant).sum() / shares.sum()


def informative_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Returns whether a row's group has different rewards and is informative, `[B]` bool.

    Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) keeps these groups and replaces the
    others. As in `zero_variance_fraction`, all rows of [1, 0, 0, 0] are informative.
    """
    return ~_Groups.of(rewards, group_ids).is_constant


@dataclass(frozen=True)
class Moments:
    """Moments of the valid entries, for `whitened`; those of several parts can be joined.

    Deviations are from each part's mean, and joining uses the distances of the means, so that no
    two large sums are subtracted. Source: Chan, Golub and LeVeque 1979, "Updating formulae and a
    pairwise algorithm for computing sample variances".

    Attributes:
        count: Number of valid entries.
        mean: Mean of the entries; 0 if there are none.
        squares: Sum of the squared deviations from the mean.
        lowest: Smallest entry; infinity if there are none.
        highest: Largest entry; minus infinity if there are none.

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
        """Computes the moments of one part in the dtype of its values, which may be empty."""
        mean = masked_mean(values, mask)
        squares = zero_masked(values - mean, mask).square().sum()
        valid = values[mask]
        bounds = [torch.inf, -torch.inf]
        if valid.numel():
            bounds = torch.stack(valid.aminmax()).tolist()
        return cls(int(mask.sum()), mean.item(), squares.item(), *bounds)

    @classmethod
    def joined(cls, parts: "Sequence[Moments]") -> "Moments":
        """Joins the moments of parts in float64; exact if only one part has entries."""
        filled = [part for part in parts if part.count] or parts[:1]
        columns = [[getattr(part, each.name) for part in filled] for each in fields(cls)]
        counts, means, squares, lowest, highest = torch.tensor(columns, dtype=torch.float64)
        first, count = means[0], counts.sum()
        mean = first + (counts * (means - first)).sum() / count.clamp(min=1)
        total = (squares + counts * (means - mean).square()).sum()
        # Minimum and maximum of tensors propagate NaN.
        bounds = lowest.min().item(), highest.max().item()
        return cls(int(count), mean.item(), total.item(), *bounds)


def whitened(values: Tensor, mask: Tensor, moments: Moments | None = None) -> Tensor:
    """`(x - mean) / (std + 1e-6)` over all valid entries, with the unbiased std; 0 elsewhere.

    Equal entries become exactly 0, not rounding noise divided by a tiny std. The population std,
    which some implementations use, is smaller by the factor `sqrt((n - 1) / n)` of n entries.

    Args:
        values: Any shape.
        mask: Bool, the shape of `values`.
        moments: Joined moments if the values are one of several parts; None for `values` only.
    """
    if moments is None:
        moments = Moments.of(values, mask)
    if moments.lowest == moments.highest:
        return torch.zeros_like(values)
    centered = zero_masked(values - moments.mean, mask)
    squares = torch.tensor(moments.squares, dtype=values.dtype)
    return centered / ((squares / max(moments.count - 1, 1)).sqrt() + EPSILON)


def decoupled_group_normalized(
    rewards: Tensor, group_ids: Tensor, sample_mask: Tensor, *, weights: Sequence[float]
) -> Tensor:
    """Weighted sum of `group_normalized` for each reward, whitened over the batch.

    Normalizing each reward before the sum distinguishes combinations of rewards with equal sums;
    whitening makes the scale independent of the number of rewards. Source: GDPO, arXiv:2601.05242.

    Args:
        rewards: `[B, R]` floating point.
        group_ids: `[B]` int64.
        sample_mask: `[B]` bool; the sequences used for whitening; others get 0.
        weights: R factors, one per reward.
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
        mask: `[B, T-1]` bool; advantages are 0 elsewhere.
        moments: Moments of `returns_to_go` for `whitened`.
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
        assert rewards.shape == group_ids.shape, "one group id per reward"
        # Groups are mostly consecutive, so nothing has to be sorted.
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


def _sum_by_group(values: Tensor, index: Tensor, num_groups: int) -> Tensor:
    return values.new_zeros(num_groups).index_add(0, index, values)[index]
