"""Sequences that begin alike, packed with their common tokens once: trees of prefixes.

In a causal model the hidden state of a token depends on the tokens before it alone. So tokens that
several sequences begin with are computed once, each sequence attends to them and to itself, and the
gradients of all of them add up: the result is that of sequences alone, but for rounding. The
completions of a prompt share it, as the answers of a pair do, and equal completions are one.

Sequences in lexicographic order share most with their neighbour, so that a tree is written as a
list: of each sequence, how many tokens it shares with the one before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nemo_rl_core.distributed.packing.plan import Microbatch


@dataclass(frozen=True)
class PrefixSharing:
    """How much is shared.

    Attributes:
        pairs_per_token: What a token costs besides attention, in units of what attention costs for
            one pair of tokens of a row. Attention is computed for all pairs of a row, so that a
            longer row costs more than the tokens that it saves, from some length on.
        longest: Where any sequence of a batch is longer, none are joined: masks of trees lack the
            windows of layers, which such a sequence needs.
    """

    pairs_per_token: float
    longest: float = float("inf")


@dataclass(frozen=True)
class PrefixTree:
    """Sequences that lie next to each other in a row.

    Attributes:
        indices: The sequences in lexicographic order of their tokens.
        shared: Of each, how many of its first tokens are also the first of the one before it; 0 for
            the first.
        num_tokens: What they take in the row.
    """

    indices: tuple[int, ...]
    shared: tuple[int, ...]
    num_tokens: int

    def with_sequence(self, index: int, size: int, overlap: int) -> "PrefixTree":
        """The tree with another sequence of `size` tokens, the first `overlap` of them its own."""
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
    """Joins sequences that begin alike wherever a longer row costs less than the tokens it saves.

    Args:
        input_ids: `[B, T]` padded on the right, on the CPU.
        lengths: `[B]` valid tokens of each, at least 1.
        sharing: What a token costs.
        max_tokens: No tree has more, unless one sequence alone has.
        num_ranks: Among which trees are divided: none has more than its share of the sequences.
        bundles: For each sequence an id; only sequences of one id are joined. None joins any.

    Returns:
        Trees that hold every sequence exactly once, the same for the same tokens in any order of
        the rows but for the indices.

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
    common = _common_with_former(input_ids, lengths, order, bundles)
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
    """Whether the tokens that a row saves cost more than the pairs that its longer part adds."""
    longer = row + size - overlap
    return longer**2 - row**2 <= size**2 + pairs_per_token * overlap


def of_sequences(part: Microbatch, trees: Sequence[PrefixTree]) -> Microbatch:
    """The micro-batch of sequences from one whose rows hold trees."""
    rows = tuple(tuple(index for tree in row for index in trees[tree].indices) for row in part.rows)
    shared = tuple(number for row in part.rows for tree in row for number in trees[tree].shared)
    return replace(part, rows=rows, shared=shared if any(shared) else ())


def _lexicographic(
    input_ids: torch.Tensor, sizes: Sequence[int], bundles: Sequence[int] | None
) -> list[int]:
    """Sequences in an order in which those that begin alike are neighbours, bundle by bundle."""
    rows = input_ids.numpy()
    # Bytes compare in another order than numbers, but equal beginnings stay together as well.
    keys = [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
    if bundles is None:
        return sorted(range(len(keys)), key=keys.__getitem__)
    return sorted(range(len(keys)), key=lambda index: (bundles[index], keys[index]))


def _common_with_former(
    input_ids: torch.Tensor,
    lengths: torch.Tensor,
    order: Sequence[int],
    bundles: Sequence[int] | None,
) -> list[int]:
    """How many first tokens each sequence shares with the one before it in the order."""
    if len(order) < 2:
        return [0] * len(order)
    ids, sizes = input_ids[list(order)], lengths[list(order)]
    shorter = torch.minimum(sizes[1:], sizes[:-1])
    differs = ids[1:] != ids[:-1]
    differs |= torch.arange(ids.shape[1]) >= shorter[:, None]
    # The first True; a row without one has equal sequences of full width.
    first = torch.where(differs.any(1), differs.int().argmax(1), ids.shape[1])
    if bundles is not None:
        of = torch.tensor([bundles[index] for index in order])
        first = torch.where(of[1:] == of[:-1], first, 0)
    return [0, *first.tolist()]
