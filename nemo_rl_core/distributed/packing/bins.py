"""Bin packing: sequences into as few bins of a fixed number of tokens as can be found quickly.

Lengths are whole numbers below the capacity, so sequences of one length are placed together: a pass
over the bins a distinct length, in numpy, in place of a search a sequence.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from nemo_rl_core.errors import DataError

Algorithm = Literal["first_fit_decreasing", "modified_first_fit_decreasing"]
Ints = npt.NDArray[np.int64]


def pack_into_bins(
    lengths: Sequence[int],
    capacity: int,
    algorithm: Algorithm = "first_fit_decreasing",
    *,
    min_bins_multiple: int = 1,
) -> list[list[int]]:
    """Distributes sequences over bins of at most `capacity` tokens.

    Args:
        lengths: Tokens of each sequence, at least 1.
        capacity: Tokens that a bin holds.
        algorithm: `first_fit_decreasing` takes at most 11/9 of the fewest possible bins, plus 6/9
            (Dósa 2007); `modified_first_fit_decreasing` 71/60, plus 1 (Johnson & Garey 1985, Yue &
            Zhang 1995), which helps where many sequences are longer than half a bin.
        min_bins_multiple: The number of bins is a multiple of this. Bins are split for it, and
            empty ones added only where no bin has two sequences.

    Returns:
        The sequences of each bin, the longest first.

    Raises:
        DataError: If a sequence is longer than a bin.
        ValueError: If the algorithm is unknown.

    Example:
        >>> pack_into_bins([3, 6, 4, 7], 10)
        [[3, 0], [1, 2]]
        >>> pack_into_bins([3, 6, 4, 7], 10, min_bins_multiple=3)
        [[3], [1, 2], [0]]
    """
    if algorithm not in _PACKERS:
        known = " or ".join(get_args(Algorithm))
        raise ValueError(f"unknown packing algorithm, expected {known}, got {algorithm!r}")
    longest = max(lengths, default=0)
    if longest > capacity:
        raise DataError(
            f"a sequence of {longest} tokens does not fit into a bin",
            expected=f"at most {capacity} tokens",
            fix="raise the number of tokens a micro-batch may have, or shorten the sequences",
        )
    sizes = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    homes = _PACKERS[algorithm](sizes[order], capacity)
    bins: list[list[int]] = [[] for _ in range(int(homes.max(initial=-1)) + 1)]
    for index, home in zip(order.tolist(), homes.tolist(), strict=True):
        bins[home].append(index)
    _split_to_multiple(bins, lengths, min_bins_multiple)
    return bins


def _first_fit_decreasing(sizes: Ints, capacity: int) -> Ints:
    """`[N]` the bin of each of the falling `sizes [N]`: the first with room, or a new one."""
    return _first_fit(sizes, np.zeros(0, dtype=np.int64), capacity)


def _modified_first_fit_decreasing(sizes: Ints, capacity: int) -> Ints:
    """`[N]` the bin of each of the falling `sizes [N]`: Johnson & Garey (1985), five steps.

    Sequences are large (over 1/2 of a bin), medium (over 1/3), small (over 1/6) or tiny; each large
    one has a bin, and a bin's gap is what its large one leaves. "A 71/60 theorem for bin packing",
    Journal of Complexity 1.
    """
    num_large, num_medium, num_small = (
        int(np.count_nonzero(sizes * parts > capacity)) for parts in (2, 3, 6)
    )
    homes = np.full(len(sizes), -1, dtype=np.int64)
    # 1. Each large sequence opens a bin, so that gaps grow from the first bin to the last.
    homes[:num_large] = np.arange(num_large)
    room = capacity - sizes[:num_large]
    # 2. Forward: the largest medium sequence that fits.
    _add_medium(sizes, range(num_large, num_medium), homes, room)
    # 3. Backward, in bins without one: the smallest small sequence, and the largest one beside it.
    _add_two_small(sizes, range(num_medium, num_small), homes, room)
    # 4. and 5. Forward, again and again the largest one that fits; the others into new bins. To
    # place sequences by falling size, each in the first bin with room, comes to the same.
    rest = np.flatnonzero(homes < 0)
    homes[rest] = _first_fit(sizes[rest], room, capacity)
    return homes


_PACKERS: dict[str, Callable[[Ints, int], Ints]] = {
    "first_fit_decreasing": _first_fit_decreasing,
    "modified_first_fit_decreasing": _modified_first_fit_decreasing,
}


def _first_fit(sizes: Ints, room: Ints, capacity: int) -> Ints:
    """`[N]` bins of the falling `sizes [N]`, where the first `len(room)` bins have `room` left."""
    homes = np.empty(len(sizes), dtype=np.int64)
    num_bins = len(room)
    room = np.concatenate([room, np.full(len(sizes), capacity, dtype=np.int64)])
    starts = np.flatnonzero(np.diff(sizes, prepend=0))
    ends = np.append(starts[1:], len(sizes))
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        size, count = int(sizes[start]), end - start
        # Every bin found takes at least one, so `count` bins are enough; new ones come last.
        fitting = np.flatnonzero(room[: num_bins + count] >= size)[:count]
        taken = np.cumsum(room[fitting] // size)
        last = int(np.searchsorted(taken, count))
        fitting, taken = fitting[: last + 1], taken[: last + 1]
        taken[-1] = count
        taken = np.diff(taken, prepend=0)
        homes[start:end] = np.repeat(fitting, taken)
        room[fitting] -= taken * size
        num_bins = max(num_bins, int(fitting[-1]) + 1)
    return homes


def _add_medium(sizes: Ints, mediums: range, homes: Ints, room: Ints) -> None:
    """Puts into each bin the largest medium sequence that fits; changes `homes` and `room`."""
    waiting, fitting = list(mediums), []
    for home in range(len(room)):
        # Gaps grow, so that what fitted an earlier bin fits here: the last one found is largest.
        while waiting and sizes[waiting[-1]] <= room[home]:
            fitting.append(waiting.pop())
        if fitting:
            index = fitting.pop()
            homes[index] = home
            room[home] -= sizes[index]


def _add_two_small(sizes: Ints, smalls: range, homes: Ints, room: Ints) -> None:
    """Puts a pair of small sequences into bins without a medium one; changes `homes` and `room`."""
    with_medium = set(homes[len(room) : smalls.start].tolist())
    largest, smallest = smalls.start, smalls.stop - 1
    for home in reversed(range(len(room))):
        if home in with_medium:
            continue
        if largest >= smallest or sizes[smallest] + sizes[smallest - 1] > room[home]:
            return  # gaps shrink from here on, and the two smallest only grow
        # What is too large beside the smallest one here is so in every later bin.
        while sizes[largest] + sizes[smallest] > room[home]:
            largest += 1
        homes[[largest, smallest]] = home
        room[home] -= sizes[largest] + sizes[smallest]
        largest, smallest = largest + 1, smallest - 1


def _split_to_multiple(bins: list[list[int]], lengths: Sequence[int], multiple: int) -> None:
    """Splits the fullest bins that can be split until the number of bins is a multiple."""
    missing = -len(bins) % multiple
    if not missing:
        return
    full = [
        (-sum(lengths[index] for index in items), home)
        for home, items in enumerate(bins)
        if len(items) > 1
    ]
    heapq.heapify(full)
    for _ in range(missing):
        bins.append([])
        if full:
            _, home = heapq.heappop(full)
            bins[home], bins[-1] = bins[home][::2], bins[home][1::2]
            for place in (home, len(bins) - 1):
                if len(bins[place]) > 1:
                    tokens = sum(lengths[index] for index in bins[place])
                    heapq.heappush(full, (-tokens, place))
