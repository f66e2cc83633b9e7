"""Advantages of completions over the others of their group.

A group is the completions of one prompt, known by an explicit id in any order; ids need not be
dense or sorted. A group whose rewards are all equal says nothing about its members, so their
advantage is exactly 0, not rounding noise divided by a tiny spread. A group of one is such a group.
A NaN reward makes NaN of its own group only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the std of a group, as in losses of the GRPO family."""


def group_normalized(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`(r - mean_group) / (std_group + 1e-6)` with the unbiased std.

    Source: GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2.

    Args:
        rewards: `[B]` floating point.
        group_ids: `[B]` int64.

    Returns:
        `[B]` advantages in the dtype of `rewards`.
    """
    groups = _Groups.of(rewards, group_ids)
    squares = groups.sum_by_group(groups.centered.square())
    std = (squares / (groups.sizes - 1).clamp(min=1)).sqrt()
    return groups.centered / (std + EPSILON)


def group_centered(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """`r - mean_group`, not divided by the spread.

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
    """The share of groups whose rewards are all equal, and which therefore teach nothing.

    The question is put to the whole group: with rewards [1, 0, 0, 0] the three others of the
    success are all equal, yet the group is informative.

    Args:
        rewards: `[B]`, B at least 1.
        group_ids: `[B]` int64.

    Returns:
        0-dim, between 0 and 1, in the dtype of `rewards`.
    """
    groups = _Groups.of(rewards, group_ids)
    # Each row stands for 1/size of its group, so that the sum over rows counts groups.
    shares = 1 / groups.sizes
    return (shares * groups.is_constant).sum() / shares.sum()


@dataclass(frozen=True)
class _Groups:
    """What a row knows of its group; all but `index` and `num_groups` are `[B]`."""

    index: Tensor
    num_groups: int
    sizes: Tensor
    is_constant: Tensor
    centered: Tensor

    @classmethod
    def of(cls, rewards: Tensor, group_ids: Tensor) -> "_Groups":
        assert rewards.shape == group_ids.shape, "one group id a reward"
        ids, index = torch.unique(group_ids, return_inverse=True)
        num_groups = ids.numel()
        sizes = _sum_by_group(torch.ones_like(rewards), index, num_groups)
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
