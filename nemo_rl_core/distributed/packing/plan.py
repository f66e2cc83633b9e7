"""Micro-batches under a token budget, with several sequences in one row, and their layout.

A micro-batch has rows as long as its longest sequence, and shorter sequences share rows. So no
attention matrix grows past the longest sequence squared (which matters where the kernel is dense,
as on a CPU), and little of the budget goes to padding. Best-fit decreasing: Johnson (1973). A plan
needs lengths alone; the worker lays out the tokens (`pack`).
"""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nemo_rl_core.errors import DataError


@dataclass(frozen=True)
class Microbatch:
    """Which sequences share which row.

    Attributes:
        rows: Indices of sequences, row by row, in the order in which they lie there.
        row_length: Length of every row, in tokens.
        shared: For each of `indices`, how many of its first tokens lie in the row already, as those
            of the sequence before it (see `prefixes`); empty where each has all of its own.

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
        """The same rows, with `numbers[index]` for each index."""
        rows = tuple(tuple([numbers[index] for index in row]) for row in self.rows)
        return Microbatch(rows, self.row_length, self.shared)


NO_SEQUENCES = Microbatch(rows=((),), row_length=1)
"""One row of filler: for a rank that has nothing to compute while others do."""


def plan_microbatches(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    bundles: Sequence[int] | None = None,
    share_rows: bool = True,
) -> list[Microbatch]:
    """Distributes sequences over micro-batches of at most `max_tokens` tokens, filler included.

    Args:
        lengths: Tokens of each sequence, at least 1.
        max_tokens: The budget of one micro-batch: rows times row length.
        bundles: For each sequence an id; sequences of one id go into the same micro-batch, in any
            rows of it. None where each sequence goes where it fits.
        share_rows: Whether a row may hold several sequences; without, each has a row of its own.

    Returns:
        Micro-batches that hold every sequence exactly once; those with the longest first.

    Raises:
        DataError: If one sequence, or one bundle, alone is more than the budget.

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
            filled.append(_filled(first, waiting, lengths, max_tokens, share_rows))
        return filled
    units = bundled(order, bundles)
    microbatches = []
    while units:
        microbatch, units = _fill(units, lengths, max_tokens, share_rows)
        microbatches.append(microbatch)
    return microbatches


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Indices of the sequences by falling length, equal ones in their order."""
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # which is stable


def bundled(order: Sequence[int], bundles: Sequence[int] | None) -> list[list[int]]:
    """What is placed as a whole: bundles, and their members, in the order of their first ones.

    Args:
        order: Indices of sequences.
        bundles: The bundle of each sequence; None where each is one of its own.
    """
    if bundles is None:
        return [[index] for index in order]
    members: dict[int, list[int]] = {}
    for index in order:
        members.setdefault(bundles[index], []).append(index)
    return list(members.values())


class _Waiting:
    """Sequences that have no place yet, the longest first; one is found without a look at others.

    Those of one length are a class, with a queue. A class that is empty refers to the next shorter
    one, and a search shortens the references that it follows.
    """

    def __init__(self, order: Sequence[int], lengths: Sequence[int]) -> None:
        queues: dict[int, list[int]] = {}
        for index in reversed(order):
            queues.setdefault(lengths[index], []).append(index)
        self._queues = [queues[length] for length in reversed(queues)]  # each taken from its end
        self._negative = [-length for length in reversed(queues)]
        self._next = list(range(len(self._queues) + 1))
        self._last = 0

    def take(self, room: int | None = None) -> int | None:
        """Takes the first sequence, or the next after the last one that is not longer than `room`.

        Args:
            room: Tokens; None starts over.

        Returns:
            The sequence's index; None if there is none.
        """
        place = 0
        if room is not None:
            place = bisect.bisect_left(self._negative, -room, lo=self._last)
        found, after = place, self._next
        while after[found] != found:
            found = after[found]
        while after[place] != found:
            after[place], place = found, after[place]
        if found == len(self._queues):
            return None
        self._last = found
        queue = self._queues[found]
        index = queue.pop()
        if not queue:
            after[found] = found + 1
        return index


def _filled(
    first: int, waiting: _Waiting, lengths: Sequence[int], max_tokens: int, share_rows: bool
) -> Microbatch:
    """One micro-batch of sequences without bundles, from the longest on that has no place yet."""
    row_length = lengths[first]
    max_rows = max_tokens // row_length
    rows = [[first]]
    # (tokens left, row), sorted: the tightest fit is found first.
    free = [(0, 0)] if share_rows else []
    while True:
        room = row_length if len(rows) < max_rows else free[-1][0] if free else 0
        if not room or (index := waiting.take(room)) is None:
            return Microbatch(tuple(map(tuple, rows)), row_length)
        length = lengths[index]
        found = bisect.bisect_left(free, (length, -1))
        if found < len(free):
            left, row = free.pop(found)
            rows[row].append(index)
        else:
            left, row = row_length, len(rows)
            rows.append([index])
        if share_rows:
            bisect.insort(free, (left - length, row))


def _fill(
    units: list[list[int]], lengths: Sequence[int], max_tokens: int, share_rows: bool
) -> tuple[Microbatch, list[list[int]]]:
    """One micro-batch from the longest sequences on, and what is left over."""
    first, *others = units
    row_length = lengths[first[0]]
    rows = _Rows(row_length, max_tokens // row_length, share_rows)
    if not rows.place(first, lengths):
        alone = _Rows(row_length, len(first), share_rows)
        alone.place(first, lengths)
        needed = len(alone.rows) * row_length
        raise DataError(
            f"{len(first)} sequences that belong together do not fit into one micro-batch",
            expected=f"at most max_tokens_per_microbatch = {max_tokens} tokens",
            got=f"{len(alone.rows)} rows of {row_length} tokens",
            fix=f"raise max_tokens_per_microbatch to at least {needed}, or shorten the sequences",
        )
    left_over, position = [], 0
    while position < len(others):
        # Once rows are full, most units are refused: they are passed over without a trial.
        fitting = bisect.bisect_left(
            others, -rows.most_room, lo=position, key=lambda unit: -lengths[unit[0]]
        )
        left_over += others[position:fitting]
        if fitting < len(others) and not rows.place(others[fitting], lengths):
            left_over.append(others[fitting])
        position = fitting + 1
    return Microbatch(tuple(tuple(row) for row in rows.rows), row_length), left_over


class _Rows:
    """The rows of a micro-batch that is being filled."""

    def __init__(self, row_length: int, max_rows: int, shared: bool) -> None:
        self.rows: list[list[int]] = []
        self._row_length, self._max_rows, self._shared = row_length, max_rows, shared
        # (tokens left, row), sorted: the tightest fit is found first
        self._free: list[tuple[int, int]] = []

    @property
    def most_room(self) -> int:
        """The longest sequence that would find a place."""
        if len(self.rows) < self._max_rows:
            return self._row_length
        return self._free[-1][0] if self._free else 0

    def place(self, unit: Sequence[int], lengths: Sequence[int]) -> bool:
        """Puts all sequences of the unit into rows, each where it fits tightest, or none."""
        free, num_rows, places = self._free.copy(), len(self.rows), []
        for index in unit:
            found = bisect.bisect_left(free, (lengths[index], -1))
            if found < len(free):
                room, row = free.pop(found)
            elif num_rows < self._max_rows:
                room, row = self._row_length, num_rows
                num_rows += 1
            else:
                return False
            places.append((row, index))
            if self._shared:
                bisect.insort(free, (room - lengths[index], row))
        self._free = free
        self.rows.extend([] for _ in range(num_rows - len(self.rows)))
        for row, index in places:
            self.rows[row].append(index)
        return True


@dataclass(frozen=True)
class PackedRows:
    """Tokens of a micro-batch in rows of equal length.

    Attributes:
        input_ids: `[R, L]`; filler has id 0.
        position_ids: `[R, L]`; restart at 0 with each sequence, and with the filler at a row's end,
            so that models that derive sequence boundaries from them separate filler too.
        last: `[R, L]` last column whose token attends to this one. A token attends to those at or
            before its own column whose `last` is not before it.
        row: `[B, T]` row of each token of the padded view, and
        column: `[B, T]` column of each token; both are 0 at padding. Tokens that sequences share
            have the same.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    last: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor


def pack(input_ids: torch.Tensor, lengths: torch.Tensor, microbatch: Microbatch) -> PackedRows:
    """Lays the sequences of a micro-batch into its rows.

    Args:
        input_ids: `[B, T]` of the micro-batch's sequences in `microbatch.indices` order, padded
            on the right.
        lengths: `[B]` valid tokens of each.
        microbatch: Its plan.
    """
    num_rows, row_length = len(microbatch.rows), microbatch.row_length
    device = input_ids.device
    row_of, first, shared = _places(microbatch).to(device).unbind()
    # Own tokens of all rows in a line: where each sequence's begin, and where its row does.
    starts = torch.cat([lengths.new_zeros(1), torch.cumsum(lengths - shared, 0)])
    row_start = starts[first]

    positions = torch.arange(input_ids.shape[1], device=device)
    valid = positions < lengths[:, None]
    owner, end = _owners(shared, positions)
    column = starts[owner] - shared[owner] + positions - row_start[:, None]
    row = torch.where(valid, row_of[:, None], 0)
    column = torch.where(valid, column, 0)

    # All tokens are written, those that are not laid out here into one row more, which is cut off:
    # to select the others by a mask, the host would wait for a GPU to count them.
    own = valid & (positions >= shared[:, None])
    place = torch.where(own, row, num_rows), torch.where(own, column, 0)
    packed_ids = torch.zeros(num_rows + 1, row_length, dtype=input_ids.dtype, device=device)
    used = torch.zeros(num_rows + 1, dtype=torch.long, device=device)
    used.index_add_(0, row_of, lengths - shared)
    # Filler counts from 0 after the last sequence of its row.
    packed_positions = torch.arange(row_length, device=device) - used[:, None]
    last = torch.full((num_rows + 1, row_length), row_length - 1, device=device)
    packed_ids[place] = input_ids
    packed_positions[place] = positions.expand_as(row)
    last[place] = starts[end] - 1 - row_start[:, None]
    return PackedRows(
        packed_ids[:num_rows], packed_positions[:num_rows], last[:num_rows], row, column
    )


def _places(microbatch: Microbatch) -> torch.Tensor:
    """`[3, B]` of each sequence: its row, the first sequence of that row, its shared tokens."""
    row_of: list[int] = []
    first: list[int] = []
    for number, row in enumerate(microbatch.rows):
        first += [len(row_of)] * len(row)
        row_of += [number] * len(row)
    shared = microbatch.shared or [0] * len(row_of)
    return torch.tensor([row_of, first, list(shared)], dtype=torch.long)


def _owners(shared: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which sequence's own tokens hold each token, and which is the first after it without it.

    Args:
        shared: `[B]` tokens that each sequence shares with the one before it.
        positions: `[T]` from 0.

    Returns:
        `[B, T]` the last sequence at or before b whose token at t is its own, and `[B, T]` the
        first after b, B where there is none.
    """
    numbers = torch.arange(len(shared), device=shared.device)[:, None]
    is_own = positions >= shared[:, None]
    owner = torch.where(is_own, numbers, 0).cummax(0).values
    after = torch.where(is_own, numbers, len(shared)).flip(0).cummin(0).values.flip(0)
    return owner, torch.cat([after[1:], torch.full_like(after[:1], len(shared))])
