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
