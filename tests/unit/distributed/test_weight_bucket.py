"""Weights in buckets: nothing is lost, and no change goes unnoticed."""

import dataclasses
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.distributed.weight_sync import link
from nemo_rl_core.distributed.weight_sync.link import (
    WeightBucket,
    bucket_digest,
    compare_digests,
    word_sums,
)
from nemo_rl_core.errors import ConsistencyError

make_buckets = partial(
    link.make_buckets, bucket_bytes=2**20, allocate=partial(torch.empty, dtype=torch.uint8)
)


def tensors_of(bucket: WeightBucket) -> list[tuple[str, torch.Tensor]]:
    return [(spec.name, spec.tensor(bucket.payload[spec.offset :])) for spec in bucket.specs]


def make_weights() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        ("matrix", torch.randn(3, 5, generator=generator)),
        ("half", torch.randn(7, generator=generator).bfloat16()),
        ("counter", torch.tensor(12345)),
        ("bytes", torch.tensor([1, 2, 255], dtype=torch.uint8)),
        ("long", torch.arange(3)),
        ("transposed", torch.arange(6.0).view(2, 3).T),
    ]


@pytest.mark.parametrize("bucket_bytes", [1, 40, 64, 10**6])
def test_tensors_of_all_types_arrive_as_they_were_sent(bucket_bytes: int) -> None:
    sent = make_weights()
    received = [
        pair
        for bucket in make_buckets(sent, bucket_bytes=bucket_bytes)
        for pair in tensors_of(bucket)
    ]
    for (name, before), (other_name, after) in zip(sent, received, strict=True):
        assert other_name == name
        assert after.dtype == before.dtype, name
        assert torch.equal(after, before), name


def test_buckets_are_split_by_size() -> None:
    # Four floats are 16 bytes; two fit into 40, and the large one (80) gets a separate bucket.
    sizes = {"a": 4, "b": 4, "c": 4, "large": 20, "d": 4}
    buckets = list(make_buckets(((n, torch.ones(s)) for n, s in sizes.items()), bucket_bytes=40))
    names = [[spec.name for spec in bucket.specs] for bucket in buckets]
    assert names == [["a", "b"], ["c"], ["large"], ["d"]]
    assert [bucket.payload.nbytes for bucket in buckets] == [32, 16, 80, 16]
    assert [spec.offset for spec in buckets[0].specs] == [0, 16]


def test_large_tensors_are_cut_into_pieces() -> None:
    # 80 bytes in buckets of 40, which hold 32 where pieces begin at multiples of 16.
    large, full = torch.arange(20.0).view(4, 5), torch.empty(80, dtype=torch.uint8)
    named = [("a", torch.ones(4)), ("large", large), ("d", torch.ones(4))]
    buckets = list(make_buckets(named, bucket_bytes=40, splits_tensors=True))
    result = [
        [
            (spec.name, spec.start, spec.num_bytes, spec.num_bytes < spec.tensor_bytes)
            for spec in bucket.specs
        ]
        for bucket in buckets
    ]
    pieces = [[("large", start, size, True)] for start, size in ((0, 32), (32, 32), (64, 16))]
    assert result == [[("a", 0, 16, False)], *pieces, [("d", 0, 16, False)]]
    for bucket in buckets[1:4]:
        (spec,) = bucket.specs
        full[spec.start : spec.start + spec.num_bytes] = bucket.payload
    assert torch.equal(spec.tensor(full), large)
    assert len({bucket.digest for bucket in buckets[1:4]}) == 3
    swapped = dataclasses.replace(buckets[1].specs[0], start=32)
    assert bucket_digest((swapped,), buckets[1].payload) != buckets[1].digest


def test_no_weights_make_no_buckets() -> None:
    assert list(make_buckets([])) == []


@given(st.integers(0, 4 * 15 - 1), st.integers(0, 7))
def test_one_flipped_bit_changes_the_digest(position: int, bit: int) -> None:
    (bucket,) = make_buckets([("matrix", torch.ones(3, 5))])
    assert bucket_digest(bucket.specs, bucket.payload) == bucket.digest
    payload = bucket.payload.clone()
    payload[position] ^= 1 << bit
    damaged = dataclasses.replace(bucket, payload=payload)
    assert bucket_digest(damaged.specs, damaged.payload) != bucket.digest


def words_of(count: int) -> torch.Tensor:
    """Returns the bytes of this many words, in rows of four."""
    return torch.randint(256, (8 * count,), generator=torch.Generator().manual_seed(0)).byte()


@pytest.fixture
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_WORDS_PER_ROW", 4)


@pytest.mark.usefixtures("short_rows")
def test_each_flipped_bit_changes_the_sums_of_a_gpu() -> None:
    payload = words_of(14)
    result = {word_sums(payload)}
    for position in range(8 * len(payload)):
        damaged = payload.clone()
        damaged[position // 8] ^= 1 << position % 8
        result.add(word_sums(damaged))
    assert len(result) == 1 + 8 * len(payload)


@pytest.mark.usefixtures("short_rows")
def test_sums_of_a_gpu_by_hand() -> None:
    rows = [[1, 2, 3, 4], [5, 6, 7, 2**63 - 1], [-1, 0, 9, 1]]
    sums = [10, 18 + 2**63 - 1 - 2**64, 9]  # of a row, modulo 2^64
    sums += [5, 8, 19, 4 + 2**63 - 2**64]  # of a column
    left = [11, -12]
    payload = torch.tensor([*rows[0], *rows[1], *rows[2], *left]).view(torch.uint8)
    assert word_sums(payload) == np.array([*sums, *left], dtype=np.int64).tobytes()
    assert word_sums(payload[:-16]) == np.array(sums, dtype=np.int64).tobytes()
    assert word_sums(payload[:16]) == np.array([0, 0, 0, 0, 1, 2], dtype=np.int64).tobytes()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", [(0.0, -0.0), (1.0, 2.0), (1.0, -1.0), (2.0, 512.0)])
def test_a_change_that_all_words_share_changes_the_sums_of_a_gpu(
    dtype: torch.dtype, values: tuple[float, float]
) -> None:
    one, other = (torch.full((2**21,), value, dtype=dtype).view(torch.uint8) for value in values)
    assert word_sums(one) != word_sums(other)


@pytest.mark.usefixtures("short_rows")
def test_up_to_three_changed_words_change_the_sums_of_a_gpu() -> None:
    """Also if the changes cancel in the sum of all: brute force over all positions of 14 words."""
    payload = words_of(14)
    words, before = payload.view(torch.int64), word_sums(payload)
    for positions in combinations(range(14), 3):
        for changes in ([1, -1, 0], [1, 1, -2], [-(2**63), -(2**63), 0]):
            damaged = words.clone()
            damaged[list(positions)] += torch.tensor(changes)
            assert word_sums(damaged.view(torch.uint8)) != before
    for one, other in combinations(range(14), 2):
        damaged = words.clone()
        damaged[[one, other]] = words[[other, one]]
        assert word_sums(damaged.view(torch.uint8)) != before


@pytest.mark.usefixtures("short_rows")
def test_gpu_sums_miss_only_rectangles_whose_changes_cancel() -> None:
    words = words_of(14).view(torch.int64)
    damaged = words.clone()
    damaged[[0, 2, 8, 10]] += torch.tensor([3, -3, -3, 3])
    assert word_sums(damaged.view(torch.uint8)) == word_sums(words.view(torch.uint8))


def test_moved_rows_and_columns_change_the_sums_of_a_gpu() -> None:
    """Weights that arrive in another order: moved rows, moved columns, a transposed matrix."""
    matrix = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    wrong = [matrix.roll(2, 0), matrix.roll(2, 1), matrix.flip(0), matrix.T.contiguous()]
    result = {word_sums(each.view(-1).view(torch.uint8)) for each in (matrix, *wrong)}
    assert len(result) == 5


@pytest.mark.parametrize(
    "other",
    [("other", torch.zeros(2, 3)), ("w", torch.zeros(3, 2)), ("w", torch.zeros(2, 3).int())],
)
def test_name_shape_and_type_are_part_of_the_digest(other: tuple[str, torch.Tensor]) -> None:
    (bucket,) = make_buckets([("w", torch.zeros(2, 3))])
    (changed,) = make_buckets([other])
    assert torch.equal(bucket.payload, changed.payload)
    assert bucket.digest != changed.digest


def test_a_later_change_of_the_weights_does_not_reach_the_bucket() -> None:
    weight = torch.zeros(4)
    (bucket,) = make_buckets([("w", weight)])
    weight += 1
    assert tensors_of(bucket)[0][1].tolist() == [0.0] * 4


def test_a_parameter_is_sent_without_its_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    (bucket,) = make_buckets([("w", parameter)])
    assert not tensors_of(bucket)[0][1].requires_grad


def test_digests_that_differ_stop_the_run() -> None:
    compare_digests(sent="aa", received="aa")
    with pytest.raises(ConsistencyError, match="weights received") as caught:
        compare_digests(sent="aa", received="bb")
    assert caught.value.expected == "checksum aa"
    assert caught.value.got == "checksum bb"
    assert "resumes from the last save" in caught.value.fix
