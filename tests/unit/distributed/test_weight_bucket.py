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
    messages,
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


def test_large_tensors_are_cut_into_pieces() -> None:
    # 80 bytes in buckets of 40, which hold 32 where pieces begin at multiples of 16.
    large, whole = torch.arange(20.0).view(4, 5), torch.empty(80, dtype=torch.uint8)
    named = [("a", torch.ones(4)), ("large", large), ("d", torch.ones(4))]
    buckets = list(make_buckets(named, bucket_bytes=40, splits_tensors=True))
    found = [
        [(spec.name, spec.start, spec.num_bytes, spec.is_piece) for spec in bucket.specs]
        for bucket in buckets
    ]
    pieces = [[("large", start, size, True)] for start, size in ((0, 32), (32, 32), (64, 16))]
    assert found == [[("a", 0, 16, False)], *pieces, [("d", 0, 16, False)]]
    for bucket in buckets[1:4]:
        (spec,) = bucket.specs
        whole[spec.start : spec.start + spec.num_bytes] = torch.as_tensor(bucket.payload)
    assert torch.equal(spec.tensor(whole), large)
    assert len({bucket.digest for bucket in buckets[1:4]}) == 3
    swapped = dataclasses.replace(buckets[1].specs[0], start=32)
    assert bucket_digest((swapped,), buckets[1].payload) != buckets[1].digest


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


def test_sums_of_a_gpu_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python's integers; words in another order, two of them alike, in one part and in two."""
    monkeypatch.setattr(messages, "_MIXED_WORDS", 2)
    mask = 2**64 - 1

    def split_mix(count: int) -> int:
        found = count * 0x9E3779B97F4A7C15 & mask
        found = (found ^ found >> 30) * 0xBF58476D1CE4E5B9 & mask
        found = (found ^ found >> 27) * 0x94D049BB133111EB & mask
        return (found ^ found >> 31) | 1

    def by_hand(words: list[int], row: int) -> int:
        places, total = min(len(words), 2), 0
        for index, word in enumerate(words):
            part, place = divmod(index, 2)
            mixed = (word & mask) * split_mix(place + 1) & mask
            mixed ^= mixed >> 29
            total += mixed * split_mix(row * places + place + 1) * (2 * part + 1)
        total &= mask
        return total - 2**64 if total >= 2**63 else total

    found = set()
    for words in ([7], [0, 0], [1, 2, 2], [2, 1, 2], [2, 2, 1], [-1, 2**62, -(2**63), 5]):
        sums = word_sums(torch.tensor(words).view(torch.uint8))
        assert sums == [by_hand(words, row) for row in (1, 2)]
        found.add(tuple(sums))
    assert len(found) == 6


def test_keys_of_places_are_those_of_the_reference() -> None:
    # The first outputs of SplitMix64 under seed 0, as its reference implementation gives them.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    keys = messages._odd_keys(1, 3, torch.device("cpu"))[0]
    assert [key % 2**64 for key in keys.tolist()] == [each | 1 for each in published]


def test_two_flipped_signs_change_the_sums_of_a_gpu() -> None:
    generator = torch.Generator().manual_seed(0)
    payload = torch.randint(256, (8 * 64,), generator=generator).byte()
    before = word_sums(payload)
    for one in range(64):
        for other in range(one):
            damaged = payload.clone()
            damaged[[8 * one + 7, 8 * other + 7]] ^= 128  # the highest bits of two words
            assert not set(word_sums(damaged)) & set(before)


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
