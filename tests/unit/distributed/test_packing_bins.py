"""Bin packing: the textbook cases by hand, and what the theorems promise."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.distributed.packing.bins import Algorithm, pack_into_bins
from nemo_rl_core.errors import DataError

CAPACITY = 60
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=80)
ALGORITHMS: list[Algorithm] = ["first_fit_decreasing", "modified_first_fit_decreasing"]


def sizes(bins: list[list[int]], lengths: list[int]) -> list[list[int]]:
    return [[lengths[index] for index in items] for items in bins]


def test_the_first_bin_with_room_is_taken() -> None:
    # 7 and 6 open bins; 4 does not fit beside 7 but does beside 6; 3 fills the first bin; 2 opens
    # the third, where the other 2 joins it, for no earlier bin has room.
    lengths = [2, 6, 3, 7, 4, 2]
    assert sizes(pack_into_bins(lengths, 10), lengths) == [[7, 3], [6, 4], [2, 2]]
    # The earliest of two bins with room, not the tightest: best fit would put 2 beside 8.
    assert sizes(pack_into_bins([7, 8, 2], 10), [7, 8, 2]) == [[8, 2], [7]]
    assert sizes(pack_into_bins([8, 7, 7, 3, 1], 11), [8, 7, 7, 3, 1]) == [[8, 3], [7, 1], [7]]


def test_equal_lengths_keep_their_order() -> None:
    assert pack_into_bins([3, 3, 3, 3, 3], 7) == [[0, 1], [2, 3], [4]]


def test_modified_first_fit_places_small_ones_in_twos() -> None:
    # Capacity 60: 31 leaves 29, which holds two small ones of 10 < s <= 20: the smallest, 11, and
    # the largest that fits beside it, 18. First fit would put 20 there first.
    lengths = [31, 20, 18, 11]
    modified = pack_into_bins(lengths, CAPACITY, "modified_first_fit_decreasing")
    assert sizes(modified, lengths) == [[31, 18, 11], [20]]
    assert sizes(pack_into_bins(lengths, CAPACITY), lengths) == [[31, 20], [18, 11]]


def test_modified_first_fit_places_medium_ones_where_they_just_fit() -> None:
    # Gaps are 21, 25 and 29 of bins with 39, 35 and 31. Medium ones (20 < s <= 30): 21 is the only
    # one that fits the first; of 24 and 28 the second takes 24, and the third 28.
    lengths = [31, 35, 39, 28, 24, 21]
    modified = pack_into_bins(lengths, CAPACITY, "modified_first_fit_decreasing")
    assert sizes(modified, lengths) == [[39, 21], [35, 24], [31, 28]]
    # With 11 and 12 as well, no bin without a medium one is left: they share a fourth.
    more = [*lengths, 11, 12]
    packed = sizes(pack_into_bins(more, CAPACITY, "modified_first_fit_decreasing"), more)
    assert packed == [[39, 21], [35, 24], [31, 28], [12, 11]]


def test_modified_first_fit_beats_first_fit_where_it_should() -> None:
    # The family that makes first-fit decreasing take 11/9 of the fewest bins (Johnson 1973), with
    # e = 1 of 60: six of 31, six of 17, six of 16 and twelve of 13 fill nine bins to the last
    # token, as 31+16+13 and 17+17+13+13. First fit makes six of 31+17, two of 16+16+16 and three of
    # 13+13+13+13. The modified one makes six of 31+16+13, two of 17+17+17, and 4 + 2 of 13.
    lengths = [31] * 6 + [17] * 6 + [16] * 6 + [13] * 12
    assert len(pack_into_bins(lengths, CAPACITY)) == 6 + 2 + 3
    assert len(pack_into_bins(lengths, CAPACITY, "modified_first_fit_decreasing")) == 6 + 2 + 2


@settings(deadline=None)
@given(LENGTHS, st.sampled_from(ALGORITHMS), st.integers(1, 7))
def test_every_sequence_has_one_bin(
    lengths: list[int], algorithm: Algorithm, multiple: int
) -> None:
    bins = pack_into_bins(lengths, CAPACITY, algorithm, min_bins_multiple=multiple)
    assert sorted(index for items in bins for index in items) == list(range(len(lengths)))
    assert all(sum(row) <= CAPACITY for row in sizes(bins, lengths))
    assert all(row == sorted(row, reverse=True) for row in sizes(bins, lengths))
    assert len(bins) % multiple == 0
    # An empty bin only where there is nothing left to split.
    assert all(bins) or all(len(items) < 2 for items in bins)
    assert bins == pack_into_bins(tuple(lengths), CAPACITY, algorithm, min_bins_multiple=multiple)


@settings(deadline=None)
@given(LENGTHS)
def test_first_fit_decreasing_is_what_its_definition_says(lengths: list[int]) -> None:
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    bins: list[list[int]] = []
    for index in order:
        for items in bins:
            if sum(lengths[item] for item in items) + lengths[index] <= CAPACITY:
                items.append(index)
                break
        else:
            bins.append([index])
    assert pack_into_bins(lengths, CAPACITY) == bins


@settings(deadline=None)
@given(LENGTHS)
def test_modified_first_fit_is_what_its_definition_says(lengths: list[int]) -> None:
    bins = pack_into_bins(lengths, CAPACITY, "modified_first_fit_decreasing")
    packed = sizes(bins, lengths)
    assert [sorted(row) for row in packed] == [sorted(row) for row in _slow_modified(lengths)]


def _slow_modified(lengths: list[int]) -> list[list[int]]:
    """The five steps word for word, on sizes, with a search through all of them each time."""
    left = sorted(lengths, reverse=True)

    def takes(home: list[int], low: int, high: int, room: int) -> bool:
        found = [size for size in left if size * high > CAPACITY and size * low <= CAPACITY]
        found = [size for size in found if size <= room]
        if found:
            left.remove(found[0])
            home.append(found[0])
        return bool(found)

    bins = [[size] for size in left if size * 2 > CAPACITY]
    left = left[len(bins) :]
    for home in bins:
        takes(home, 2, 3, CAPACITY - sum(home))
    for home in reversed([home for home in bins if len(home) == 1]):
        room = CAPACITY - sum(home)
        smalls = [size for size in left if size * 3 <= CAPACITY < size * 6]
        if len(smalls) > 1 and sum(smalls[-2:]) <= room:
            left.remove(smalls[-1])
            home.append(smalls[-1])
            takes(home, 3, 6, room - smalls[-1])
    for home in bins:
        while takes(home, 1, CAPACITY + 1, CAPACITY - sum(home)):
            pass
    while left:
        bins.append([])
        while takes(bins[-1], 1, CAPACITY + 1, CAPACITY - sum(bins[-1])):
            pass
    return bins


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 59), max_size=6), min_size=1, max_size=9))
def test_no_more_bins_than_the_theorems_allow(cuts: list[list[int]]) -> None:
    # Bins that are full to the last token, cut at random: they are the fewest possible.
    lengths = []
    for places in cuts:
        borders = [0, *sorted(set(places)), CAPACITY]
        lengths += [end - start for start, end in pairwise(borders)]
    fewest = len(cuts)
    assert 9 * len(pack_into_bins(lengths, CAPACITY)) <= 11 * fewest + 6
    modified = pack_into_bins(lengths, CAPACITY, "modified_first_fit_decreasing")
    assert 60 * len(modified) <= 71 * fewest + 60


def test_a_multiple_splits_the_fullest() -> None:
    # Bins [7, 3] and [6, 2]: a third is made of the fuller one, which has 10 tokens.
    assert pack_into_bins([7, 6, 3, 2], 10) == [[0, 2], [1, 3]]
    assert pack_into_bins([7, 6, 3, 2], 10, min_bins_multiple=3) == [[0], [1, 3], [2]]
    assert pack_into_bins([7, 6], 10, min_bins_multiple=4) == [[0], [1], [], []]
    assert pack_into_bins([], 10, min_bins_multiple=4) == []


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(DataError, match="11 tokens does not fit") as caught:
        pack_into_bins([3, 11], 10)
    assert caught.value.expected == "at most 10 tokens"
    with pytest.raises(ValueError, match="'best_fit'"):
        pack_into_bins([3], 10, "best_fit")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_long_tail_fills_bins(algorithm: Algorithm) -> None:
    drawn = np.random.default_rng(0).lognormal(6.0, 1.0, 100_000).astype(int)
    lengths = np.clip(drawn, 1, 8192).tolist()
    bins = pack_into_bins(lengths, 8192, algorithm, min_bins_multiple=8)
    assert sum(lengths) >= 0.999 * 8192 * len(bins)
