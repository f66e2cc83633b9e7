"""Trees of prefixes: packs the common tokens of sequences once.

In a causal model the hidden state of a token depends only on the tokens before it. So a common
prefix is computed once, each sequence attends to it and to itself, and their gradients add up: the
result is the same as for separate sequences, up to rounding. The completions of a prompt share the
prompt, as do the answers of a pair, and equal completions are packed once.

Sequences in lexicographic order share most with their neighbor, so a tree is stored as a list of
how many tokens each sequence shares with the previous one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nemo_rl_core.distributed.packing.plan import Microbatch


@dataclass(frozen=True)
class PrefixSharing:
    """Costs and limits of sharing prefixes.

    Attributes:
        pairs_per_token: Cost of a token without attention, relative to the attention cost of one
            pair of tokens. Attention is computed for all pairs of a row, so from some length on a
            longer row costs more than it saves.
        longest: Maximum sequence length. If any sequence of a batch is longer, none are joined,
            because tree masks do not support the windowed attention that it needs.
    """

    pairs_per_token: float
    longest: float = float("inf")


@dataclass(frozen=True)
class PrefixTree:
    """Sequences that are next to each other in a row.

    Attributes:
        indices: Indices of the sequences in lexicographic order of their tokens.
        shared: Number of first tokens that each sequence shares with the previous one; 0 for the
            first sequence.
    """

    indices: tuple[int, ...]
    shared: tuple[int, ...]
    num_tokens: int

    def with_sequence(self, index: int, size: int, overlap: int) -> "PrefixTree":
        """Adds a sequence of `size` tokens whose first `overlap` tokens are in the tree."""
        return PrefixTree(
            (*self.indices, index), (*self.shared, overlap), self.num_tokens + size - overlap
        )


def prefix_trees(
    input_ids: torch.Tensor,
    lengths: torch.Tensor,
    *,
    sharing: PrefixSharing,
    max_tokens: int,
    num_ranks: int = 1,
    bundles: Sequence[int] | None = None,
) -> list[PrefixTree]:
    """Joins sequences with a common prefix if the longer row costs less than the saved tokens.

    Args:
        input_ids: `[B, T]` padded on the right, on the CPU.
        lengths: `[B]` number of valid tokens, at least 1.
        max_tokens: Maximum number of tokens in a tree of several sequences.
        num_ranks: Number of ranks; a tree has at most `1 / num_ranks` of the sequences.
        bundles: Bundle id of each sequence; only sequences of the same bundle are joined. None
            joins any.

    Returns:
        Trees that contain every sequence exactly once. Except for the indices, they do not depend
        on the order of the rows.

    Example:
        >>> ids = torch.tensor([[7, 8, 1, 0], [9, 9, 9, 9], [7, 8, 2, 3]])
        >>> free = PrefixSharing(pairs_per_token=100)
        >>> for tree in prefix_trees(ids, torch.tensor([3, 4, 4]), sharing=free, max_tokens=8):
        ...     print(tree)
        PrefixTree(indices=(0, 2), shared=(0, 2), num_tokens=5)
        PrefixTree(indices=(1,), shared=(0,), num_tokens=4)
    """
    sizes: list[int] = lengths.tolist()
    most = -(-len(sizes) // num_ranks)
    order = _lexicographic(input_ids, sizes, bundles)
    common = _common_with_previous(input_ids, lengths, order, bundles)
    trees: list[PrefixTree] = []
    is_allowed = max(sizes, default=0) <= sharing.longest
    for index, overlap in zip(order, common, strict=True):
        size = sizes[index]
        if (
            is_allowed
            and overlap
            and len(trees[-1].indices) < most
            and trees[-1].num_tokens + size - overlap <= max_tokens
            and _is_worth(trees[-1].num_tokens, size, overlap, sharing.pairs_per_token)
        ):
            trees[-1] = trees[-1].with_sequence(index, size, overlap)
        else:
            trees.append(PrefixTree((index,), (0,), size))
    return trees


def _is_worth(row: int, size: int, overlap: int, pairs_per_token: float) -> bool:
    """Whether the saved tokens cost more than the additional attention pairs of a longer row."""
    longer = row + size - overlap
    return longer**2 - row**2 <= size**2 + pairs_per_token * overlap


def expand_trees(part: Microbatch, trees: Sequence[PrefixTree]) -> Microbatch:
    """Replaces the trees in the rows of a micro-batch by their sequences."""
    rows = tuple(tuple(index for tree in row for index in trees[tree].indices) for row in part.rows)
    shared = tuple(number for row in part.rows for tree in row for number in trees[tree].shared)
    return replace(part, rows=rows, shared=shared if any(shared) else ())


def _lexicographic(
    input_ids: torch.Tensor, sizes: Sequence[int], bundles: Sequence[int] | None
) -> list[int]:
    """Orders sequences so that common prefixes are neighbors, bundle by bundle."""
    rows = input_ids.numpy()
    # Bytes sort differently than numbers, but equal prefixes stay together as well.
    keys = [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
    if bundles is None:
        return sorted(range(len(keys)), key=keys.__getitem__)
    return sorted(range(len(keys)), key=lambda index: (bundles[index], keys[index]))


def _common_with_previous(
    input_ids: torch.Tensor,
    lengths: torch.Tensor,
    order: Sequence[int],
    bundles: Sequence[int] | None,
) -> list[int]:
    """Counts the first tokens that each sequence shares with the previous one in the order."""
    if len(order) < 2:
        return [0] * len(order)
    ids, sizes = input_ids[list(order)], lengths[list(order)]
    shorter = torch.minimum(sizes[1:], sizes[:-1])
    differs = ids[1:] != ids[:-1]
    differs |= torch.arange(ids.shape[1]) >= shorter[:, None]
    # The first True; a row without one has equal sequences of full width.
    first = torch.where(differs.any(1), differs.int().argmax(1), ids.shape[1])
    if bundles is not None:
        ordered = torch.tensor([bundles[index] for index in order])
        first = torch.where(ordered[1:] == ordered[:-1], first, 0)
    return [0, *first.tolist()]
