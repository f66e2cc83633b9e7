"""Micro-batches under a token budget, with several sequences in one row.

A micro-batch has rows as long as its longest sequence, and shorter sequences share rows. So no
attention matrix grows past the longest sequence squared (which matters where the kernel is dense,
as on a CPU), and little of the budget goes to padding. Best-fit decreasing: Johnson (1973).
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_rl_core.errors import DataError


@dataclass(frozen=True)
class Microbatch:
    """Which sequences share which row.

    Attributes:
        rows: Indices of sequences, row by row, in the order in which they lie there.
        row_length: Length of every row, in tokens.

    Example:
        >>> plan_microbatches([4, 2, 2, 1], max_tokens=8)[0]
        Microbatch(rows=((0,), (1, 2)), row_length=4)
    """

    rows: tuple[tuple[int, ...], ...]
    row_length: int

    @property
    def indices(self) -> list[int]:
        """All sequences of the micro-batch, in row order."""
        return [index for row in self.rows for index in row]


def plan_microbatches(lengths: Sequence[int], *, max_tokens: int) -> list[Microbatch]:
    """Distributes sequences over micro-batches of at most `max_tokens` tokens, filler included.

    Args:
        lengths: Tokens of each sequence, at least 1.
        max_tokens: The budget of one micro-batch: rows times row length.

    Returns:
        Micro-batches that hold every sequence exactly once; longest sequences first.

    Raises:
        DataError: If one sequence alone is longer than the budget.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if order and lengths[order[0]] > max_tokens:
        raise DataError(
            f"a sequence of {lengths[order[0]]} tokens does not fit into a micro-batch",
            expected=f"at most max_tokens_per_microbatch = {max_tokens} tokens",
            fix="raise max_tokens_per_microbatch, or shorten prompts or max_new_tokens",
        )
    microbatches = []
    while order:
        microbatch, order = _fill(order, lengths, max_tokens)
        microbatches.append(microbatch)
    return microbatches


def _fill(
    order: list[int], lengths: Sequence[int], max_tokens: int
) -> tuple[Microbatch, list[int]]:
    """One micro-batch from the longest sequences on, and what is left over."""
    row_length = lengths[order[0]]
    max_rows = max_tokens // row_length
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), sorted: the tightest fit is found first
    left_over = []
    for index in order:
        place = bisect.bisect_left(free, (lengths[index], -1))
        if place < len(free):
            room, row = free.pop(place)
        elif len(rows) < max_rows:
            room, row = row_length, len(rows)
            rows.append([])
        else:
            left_over.append(index)
            continue
        rows[row].append(index)
        bisect.insort(free, (room - lengths[index], row))
    return Microbatch(tuple(tuple(row) for row in rows), row_length), left_over


@dataclass(frozen=True)
class PackedRows:
    """Tokens of a micro-batch in rows of equal length.

    Attributes:
        input_ids: `[R, L]`; filler has id 0.
        position_ids: `[R, L]`; restart at 0 with each sequence, and with the filler at a row's end,
            so that a model which reads sequence borders off them keeps filler apart as well.
        row: `[B, T]` row of each token of the padded view, and
        column: `[B, T]` its column; both 0 where the padded view has padding.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor


def pack(input_ids: torch.Tensor, lengths: torch.Tensor, microbatch: Microbatch) -> PackedRows:
    """Lays the sequences of a micro-batch into its rows.

    Args:
        input_ids: `[B, T]` of the micro-batch's sequences in `microbatch.indices` order, padded
            on the right.
        lengths: `[B]` valid tokens of each.
        microbatch: The plan.
    """
    num_rows, row_length = len(microbatch.rows), microbatch.row_length
    device = input_ids.device
    counts = torch.tensor([len(row) for row in microbatch.rows], device=device)
    row_of = torch.repeat_interleave(torch.arange(num_rows, device=device), counts)
    ends = torch.cumsum(lengths, 0)
    row_starts = torch.cumsum(counts, 0) - counts
    before_row = torch.cat([ends.new_zeros(1), ends])[row_starts]
    start = ends - lengths - before_row[row_of]

    positions = torch.arange(input_ids.shape[1], device=device)
    valid = positions < lengths[:, None]
    row = torch.where(valid, row_of[:, None], 0)
    column = torch.where(valid, start[:, None] + positions, 0)

    packed_ids = torch.zeros(num_rows, row_length, dtype=input_ids.dtype, device=device)
    used = torch.zeros(num_rows, dtype=torch.long, device=device).index_add_(0, row_of, lengths)
    # Filler counts on from 0 behind the last sequence of its row.
    packed_positions = torch.arange(row_length, device=device) - used[:, None]
    packed_ids[row[valid], column[valid]] = input_ids[valid]
    packed_positions[row[valid], column[valid]] = positions.expand_as(row)[valid]
    return PackedRows(packed_ids, packed_positions, row, column)
