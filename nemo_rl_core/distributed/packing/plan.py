"""Plans micro-batches under a token budget, with several sequences per row, and lays them out.

A micro-batch has rows as long as its longest sequence, and shorter sequences share rows. So no
attention matrix is larger than the longest sequence squared (which matters for dense kernels, as on
a CPU), and little of the budget goes to padding. Best-fit decreasing: Johnson (1973). A plan only
needs lengths; the worker lays out the tokens (`pack`).
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from nemo_rl_core.errors import DataError


@dataclass(frozen=True)
class Microbatch:
    """Assignment of sequences to rows.

    Attributes:
        rows: Indices of the sequences in each row, in order.
        shared: For each of `indices`, the number of leading tokens shared with the previous
            sequence of the row (see `prefixes`); empty if no tokens are shared.

    Example:
        >>> plan_microbatches([4, 2, 2, 1], max_tokens=8)[0]
        Microbatch(rows=((0,), (1, 2)), row_length=4, shared=())
    """

    rows: tuple[tuple[int, ...], ...]
    row_length: int
    shared: tuple[int, ...] = ()

    @property
    def indices(self) -> list[int]:
        """All sequences of the micro-batch, in row order."""
        return [index for row in self.rows for index in row]

    def renumbered(self, numbers: Sequence[int] | Mapping[int, int]) -> "Microbatch":
        """Returns the same rows with `numbers[index]` instead of each index."""
        rows = tuple(tuple([numbers[index] for index in row]) for row in self.rows)
        return Microbatch(rows, self.row_length, self.shared)


NO_SEQUENCES = Microbatch(rows=((),), row_length=1)
"""One row of filler, for a rank that has nothing to compute while others do."""


def plan_microbatches(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    bundles: Sequence[int] | None = None,
    share_rows: bool = True,
) -> list[Microbatch]:
    """Distributes sequences over micro-batches of at most `max_tokens` tokens, including filler.

    Args:
        lengths: Number of tokens of each sequence, at least 1.
        max_tokens: Budget of one micro-batch: rows times row length.
        bundles: Bundle id of each sequence; sequences of a bundle go into the same micro-batch, in
            any of its rows. None without bundles.

    Example:
        >>> lengths, pairs = [4, 4, 2, 2], [0, 1, 0, 1]
        >>> [part.rows for part in plan_microbatches(lengths, max_tokens=8)]
        [((0,), (1,)), ((2,), (3,))]
        >>> [part.rows for part in plan_microbatches(lengths, max_tokens=8, bundles=pairs)]
        [((0,), (2,)), ((1,), (3,))]
    """
    order = longest_first(lengths)
    if order and lengths[order[0]] > max_tokens:
        raise DataError(
            f"a sequence of {lengths[order[0]]} tokens does not fit into a micro-batch",
            expected=f"at most max_tokens_per_microbatch = {max_tokens} tokens",
            fix="raise max_tokens_per_microbatch, or shorten prompts or max_new_tokens",
        )
    if bundles is None:
        waiting, filled = _Waiting(order, lengths), []
        while (first := waiting.take()) is not None:
            filled.append(_microbatch_of_sequences(first, waiting, lengths, max_tokens, share_rows))
        return filled
    units = bundled(order, bundles)
    microbatches = []
    while units:
        microbatch, units = _microbatch_of_bundles(units, lengths, max_tokens, share_rows)
        microbatches.append(microbatch)
    return microbatches


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Returns indices by descending length; equal lengths keep their order."""
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # stable


def bundled(order: Sequence[int], bundles: Sequence[int] | None) -> list[list[int]]:
    """Groups sequences into bundles, in the order of their first members."""
    if bundles is None:
        return [[index] for index in order]
    members: dict[int, list[int]] = {}
    for index in order:
        members.setdefault(bundles[index], []).append(index)
    return list(members.values())


class _Waiting:
    """Unassigned sequences, the longest first, with a fast search by length.

    Sequences of the same length share a queue. An empty queue refers to the next shorter length,
    and a search shortens the references that it follows (as in union-find).
    """

    def __init__(self, order: Sequence[int], lengths: Sequence[int]) -> None:
        queues: dict[int, list[int]] = {}
        for index in reversed(order):
            queues.setdefault(lengths[index], []).append(index)
        self._queues = [queues[length] for length in reversed(queues)]  # taken from the end
        self._negative = [-length for length in reversed(queues)]
        self._next = list(range(len(self._queues) + 1))
        self._last = 0

    def take(self, room: int | None = None) -> int | None:
        """Takes the longest sequence, or the next one that is not longer than `room`.

        Args:
            room: Maximum length in tokens; None starts again with the longest.
        """
        start = 0
        if room is not None:
            start = bisect.bisect_left(self._negative, -room, lo=self._last)
        number, after = start, self._next
        while after[number] != number:
            number = after[number]
        while after[start] != number:
            after[start], start = number, after[start]
        if number == len(self._queues):
            return None
        self._last = number
        queue = self._queues[number]
        index = queue.pop()
        if not queue:
            after[number] = number + 1
        return index


def _microbatch_of_sequences(
    first: int, waiting: _Waiting, lengths: Sequence[int], max_tokens: int, share_rows: bool
) -> Microbatch:
    row_length = lengths[first]
    max_rows = max_tokens // row_length
    rows = [[first]]
    # (free tokens, row), sorted: the tightest fit is found first.
    free = [(0, 0)] if share_rows else []
    while True:
        room = row_length if len(rows) < max_rows else free[-1][0] if free else 0
        if not room or (index := waiting.take(room)) is None:
            return Microbatch(tuple(map(tuple, rows)), row_length)
        length = lengths[index]
        fit = bisect.bisect_left(free, (length, -1))
        if fit < len(free):
            room, row = free.pop(fit)
            rows[row].append(index)
        else:
            room, row = row_length, len(rows)
            rows.append([index])
        if share_rows:
            bisect.insort(free, (room - length, row))


def _microbatch_of_bundles(
    units: list[list[int]], lengths: Sequence[int], max_tokens: int, share_rows: bool
) -> tuple[Microbatch, list[list[int]]]:
    first, *others = units
    row_length = lengths[first[0]]
    rows = _Rows(row_length, max_tokens // row_length, share_rows)
    if not rows.add(first, lengths):
        enough = _Rows(row_length, len(first), share_rows)
        enough.add(first, lengths)
        needed = len(enough.rows) * row_length
        raise DataError(
            f"{len(first)} sequences that belong together do not fit into one micro-batch",
            expected=f"at most max_tokens_per_microbatch = {max_tokens} tokens",
            got=f"{len(enough.rows)} rows of {row_length} tokens",
            fix=f"raise max_tokens_per_microbatch to at least {needed}, or shorten the sequences",
        )
    left_over, position = [], 0
    while position < len(others):
        # Once rows are full, most units do not fit: the search skips them.
        fitting = bisect.bisect_left(
            others, -rows.most_room, lo=position, key=lambda unit: -lengths[unit[0]]
        )
        left_over += others[position:fitting]
        if fitting < len(others) and not rows.add(others[fitting], lengths):
            left_over.append(others[fitting])
        position = fitting + 1
    return Microbatch(tuple(tuple(row) for row in rows.rows), row_length), left_over


class _Rows:
    def __init__(self, row_length: int, max_rows: int, shared: bool) -> None:
        self.rows: list[list[int]] = []
        self._row_length, self._max_rows, self._shared = row_length, max_rows, shared
        # (free tokens, row), sorted: the tightest fit is found first.
        self._free: list[tuple[int, int]] = []

    @property
    def most_room(self) -> int:
        """Length of the longest sequence that would fit."""
        if len(self.rows) < self._max_rows:
            return self._row_length
        return self._free[-1][0] if self._free else 0

    def add(self, unit: Sequence[int], lengths: Sequence[int]) -> bool:
        """Adds all sequences of the unit to rows, each at its tightest fit, or none."""
        free, num_rows, assigned = self._free.copy(), len(self.rows), []
        for index in unit:
            fit = bisect.bisect_left(free, (lengths[index], -1))
            if fit < len(free):
                room, row = free.pop(fit)
            elif num_rows < self._max_rows:
                room, row = self._row_length, num_rows
                num_rows += 1
            else:
                return False
            assigned.append((row, index))
            if self._shared:
                bisect.insort(free, (room - lengths[index], row))
        self._free = free
        self.rows.extend([] for _ in range(num_rows - len(self.rows)))
        for row, index in assigned:
            self.rows[row].append(index)
        return True


_REFUSED = 2**62


def agreed_plan(
    plan: Callable[[], list[Microbatch]], largest: Callable[[int], int]
) -> tuple[list[Microbatch], int]:
    """Returns this rank's micro-batches and the largest number of them on any data rank.

    Raises `DataError` on all ranks if the rows of one do not fit, since the others would wait.
    """
    try:
        microbatches = plan()
    except DataError:
        largest(_REFUSED)
        raise
    most = largest(len(microbatches))
    if most == _REFUSED:
        raise DataError(
            "the rows of another data rank do not fit into its micro-batches",
            fix="see that rank's message",
        )
    return microbatches, most


@dataclass(frozen=True)
class PackedRows:
    """Tokens of a micro-batch in rows of equal length.

    Attributes:
        input_ids: `[R, L]`; filler has id 0.
        position_ids: `[R, L]`; restart at 0 with each sequence, and with the filler at a row's end,
            so that models that derive sequence boundaries from them separate filler too.
        last: `[R, L]` last column whose token attends to this one. A token attends to columns up to
            its own whose `last` is not before it.
        row: `[B, T]` row of each token of the padded view; 0 at padding.
        column: `[B, T]` column of each token; 0 at padding. Shared tokens have the same row and
            column.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    last: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor


def pack(input_ids: torch.Tensor, lengths: torch.Tensor, microbatch: Microbatch) -> PackedRows:
    """Lays the sequences of a micro-batch into its rows."""
    num_rows, row_length = len(microbatch.rows), microbatch.row_length
    device = input_ids.device
    row_of, first, shared = _layout(microbatch).to(device).unbind()
    # In the concatenated unshared tokens: start of each sequence, and of its row.
    starts = torch.cat([lengths.new_zeros(1), torch.cumsum(lengths - shared, 0)])
    row_start = starts[first]

    positions = torch.arange(input_ids.shape[1], device=device)
    valid = positions < lengths[:, None]
    owner, end = _owners(shared, positions)
    column = starts[owner] - shared[owner] + positions - row_start[:, None]
    row = torch.where(valid, row_of[:, None], 0)
    column = torch.where(valid, column, 0)

    # Padding and shared tokens are written to an additional row, which is cut off: selecting by a
    # mask would make the host wait for a GPU to count the tokens.
    is_own = valid & (positions >= shared[:, None])
    target = torch.where(is_own, row, num_rows), torch.where(is_own, column, 0)
    packed_ids = torch.zeros(num_rows + 1, row_length, dtype=input_ids.dtype, device=device)
    used = torch.zeros(num_rows + 1, dtype=torch.long, device=device)
    used.index_add_(0, row_of, lengths - shared)
    # Filler counts from 0 after the last sequence of its row.
    packed_positions = torch.arange(row_length, device=device) - used[:, None]
    last = torch.full((num_rows + 1, row_length), row_length - 1, device=device)
    packed_ids[target] = input_ids
    packed_positions[target] = positions.expand_as(row)
    last[target] = starts[end] - 1 - row_start[:, None]
    return PackedRows(
        packed_ids[:num_rows], packed_positions[:num_rows], last[:num_rows], row, column
    )


def _layout(microbatch: Microbatch) -> torch.Tensor:
    """Returns `[3, B]`: row of each sequence, first sequence of that row, shared tokens."""
    row_of: list[int] = []
    first: list[int] = []
    for number, row in enumerate(microbatch.rows):
        first += [len(row_of)] * len(row)
        row_of += [number] * len(row)
    shared = microbatch.shared or [0] * len(row_of)
    return torch.tensor([row_of, first, list(shared)], dtype=torch.long)


def _owners(shared: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the sequence that stores each token, and the first later one that does not share it.

    Args:
        shared: `[B]` number of tokens that each sequence shares with the previous one.
        positions: `[T]` positions from 0.

    Returns:
        `[B, T]` last sequence up to b that stores its token at t itself, and `[B, T]` first such
        sequence after b, or B if there is none.
    """
    numbers = torch.arange(len(shared), device=shared.device)[:, None]
    is_own = positions >= shared[:, None]
    owner = torch.where(is_own, numbers, 0).cummax(0).values
    owner_from = torch.where(is_own, numbers, len(shared)).flip(0).cummin(0).values.flip(0)
    return owner, torch.cat([owner_from[1:], torch.full_like(owner_from[:1], len(shared))])
