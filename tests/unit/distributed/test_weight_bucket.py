"""Weights in buckets: nothing lost, nothing changed in silence."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.distributed.weight_sync import (
    bucket_digest,
    combined_digest,
    compare_digests,
    make_buckets,
)
from nemo_rl_core.distributed.weight_sync.messages import word_sums
from nemo_rl_core.errors import ConsistencyError


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
        for pair in bucket.named_tensors()
    ]
    for (name, before), (other_name, after) in zip(sent, received, strict=True):
        assert other_name == name
        assert after.dtype == before.dtype, name
        assert torch.equal(after, before), name


def test_buckets_are_split_by_size() -> None:
    # Four floats are 16 bytes; two fit into 40, and the large one (80) gets a bucket of its own.
    sizes = {"a": 4, "b": 4, "c": 4, "large": 20, "d": 4}
    buckets = list(make_buckets(((n, torch.ones(s)) for n, s in sizes.items()), bucket_bytes=40))
    names = [[spec.name for spec in bucket.specs] for bucket in buckets]
    assert names == [["a", "b"], ["c"], ["large"], ["d"]]
    assert [bucket.payload.nbytes for bucket in buckets] == [32, 16, 80, 16]
    assert [spec.offset for spec in buckets[0].specs] == [0, 16]


def test_no_weights_make_no_buckets() -> None:
    assert list(make_buckets([])) == []


@given(st.integers(0, 4 * 15 - 1), st.integers(0, 7))
def test_one_flipped_bit_changes_the_digest(place: int, bit: int) -> None:
    (bucket,) = make_buckets([("matrix", torch.ones(3, 5))])
    assert bucket_digest(bucket.specs, bucket.payload) == bucket.digest
    payload = bucket.payload.copy()
    payload[place] ^= 1 << bit
    damaged = dataclasses.replace(bucket, payload=payload)
    assert bucket_digest(damaged.specs, damaged.payload) != bucket.digest


@given(st.integers(0, 8 * 64 - 1))
def test_one_flipped_bit_changes_both_sums_of_a_gpu(place: int) -> None:
    payload = torch.randint(256, (64,), generator=torch.Generator().manual_seed(0)).byte()
    damaged = payload.clone()
    damaged[place // 8] ^= 1 << place % 8
    before, after = word_sums(payload), word_sums(damaged)
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_sums_of_a_gpu_by_hand() -> None:
    """Of one word, in Python's integers; of words in another order, with two of them alike."""
    mask = 2**64 - 1

    def by_hand(words: list[int], odd: int) -> int:
        total = 0
        for place, word in enumerate(words, start=1):
            mixed = ((word & mask) ^ (place * odd & mask)) * (2 * place + odd) & mask
            total += (mixed ^ (mixed >> 29)) * odd
        total &= mask
        return total - 2**64 if total >= 2**63 else total

    odd_numbers = 0x1E3779B97F4A7C15, 0x5851F42D4C957F2D
    found = set()
    for words in ([7], [0, 0], [1, 2, 2], [2, 1, 2], [2, 2, 1], [-1, 2**62, -(2**63)]):
        sums = word_sums(torch.tensor(words).view(torch.uint8))
        assert sums == [by_hand(words, odd) for odd in odd_numbers]
        found.add(tuple(sums))
    assert len(found) == 6


@pytest.mark.parametrize(
    "other",
    [("other", torch.zeros(2, 3)), ("w", torch.zeros(3, 2)), ("w", torch.zeros(2, 3).int())],
)
def test_name_shape_and_type_are_part_of_the_digest(other: tuple[str, torch.Tensor]) -> None:
    (bucket,) = make_buckets([("w", torch.zeros(2, 3))])
    (changed,) = make_buckets([other])
    assert np.array_equal(bucket.payload, changed.payload)
    assert bucket.digest != changed.digest


def test_a_later_change_of_the_weights_does_not_reach_the_bucket() -> None:
    weight = torch.zeros(4)
    (bucket,) = make_buckets([("w", weight)])
    weight += 1
    assert next(bucket.named_tensors())[1].tolist() == [0.0] * 4


def test_a_parameter_is_sent_without_its_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    (bucket,) = make_buckets([("w", parameter)])
    assert not next(bucket.named_tensors())[1].requires_grad


def test_order_matters_to_the_digest_of_a_transfer() -> None:
    assert combined_digest(["ab", "cd"]) != combined_digest(["cd", "ab"])
    assert combined_digest(iter(["ab", "cd"])) == combined_digest(["ab", "cd"])


def test_digests_that_differ_stop_the_run() -> None:
    compare_digests(sent="aa", received="aa")
    with pytest.raises(ConsistencyError, match="weights that arrived") as caught:
        compare_digests(sent="aa", received="bb")
    assert caught.value.expected == "checksum aa"
    assert caught.value.got == "checksum bb"
    assert "resumes from the last save" in caught.value.fix
