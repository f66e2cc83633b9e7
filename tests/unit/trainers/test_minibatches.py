"""Splitting of a step's rollouts into minibatches, and the combined metrics."""

from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.algorithms.grpo.loss_config import ClippedLoss, ConstantDenominator
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.trainers.rollouts import combined, train_in_parts


class Rows:
    """A policy that records its rows and returns their means as metrics."""

    def __init__(self) -> None:
        self.parts: list[list[int]] = []

    def train(self, data: BatchedDataDict, loss_fn: Any) -> dict[str, float]:
        rows, tokens = data["row"].tolist(), data["token_mask"].sum(dim=1) * data["sample_mask"]
        self.parts.append(rows)
        values, total = data["value"], tokens.sum()
        return {
            "by_token": float((values * tokens).sum() / total),
            "by_sequence": float((values * data["sample_mask"]).sum() / data["sample_mask"].sum()),
            "grad_norm": float(len(self.parts)),
            "num_valid_tokens": float(total),
        }


def batch_of(num_rows: int) -> BatchedDataDict:
    """Row i has 1 + i % 4 tokens and the value i; every fifth row is masked out."""
    lengths = 1 + torch.arange(num_rows) % 4
    return BatchedDataDict(
        {
            "row": torch.arange(num_rows),
            "value": torch.arange(num_rows).float(),
            "token_mask": torch.arange(4)[None, :] < lengths[:, None],
            "sample_mask": (torch.arange(num_rows) % 5 != 0).float(),
        }
    )


@pytest.mark.parametrize(
    ("num_rows", "size", "expected"),
    [
        (64, 32, [32, 32]),
        (64, None, [64]),
        (33, 32, [33]),  # not 32 and 1
        (47, 32, [47]),
        (48, 32, [24, 24]),
        (63, 32, [32, 31]),
        (70, 32, [35, 35]),
        (81, 32, [27, 27, 27]),
        (3, 32, [3]),
        (1, 1, [1]),
    ],
)
def test_minibatches_are_even_and_contain_every_row_once(num_rows, size, expected):
    policy = Rows()
    train_in_parts(policy, batch_of(num_rows), None, size=size)
    assert [len(part) for part in policy.parts] == expected
    assert [row for part in policy.parts for row in part] == list(range(num_rows))


@pytest.mark.parametrize("num_rows", range(1, 40))
def test_no_minibatch_is_far_from_the_requested_size(num_rows):
    policy = Rows()
    train_in_parts(policy, batch_of(num_rows), None, size=8)
    sizes = [len(part) for part in policy.parts]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= 12
    assert min(sizes) >= min(num_rows, 6)


def test_a_metric_is_weighted_by_the_number_of_averaged_values():
    batch, policy = batch_of(15), Rows()
    metrics = train_in_parts(policy, batch, None, size=8, sequence_means=frozenset({"by_sequence"}))
    assert [len(part) for part in policy.parts] == [8, 7]
    full = Rows().train(batch, None)
    assert metrics == pytest.approx({**full, "grad_norm": 1.5})


class Measured:
    """A policy with a column of the batch as logprobs, which reports a real loss's metrics."""

    def train(self, data: BatchedDataDict, loss_fn: Any) -> dict[str, float]:
        mask = data["token_mask"] * data["sample_mask"][:, None]
        num_tokens, num_sequences = mask.sum(), data["sample_mask"].sum()
        _, metrics = loss_fn(
            data["current"], data, global_valid_seqs=num_sequences, global_valid_tokens=num_tokens
        )
        values = {name: float(value) for name, value in metrics.items()}
        return {**values, "num_valid_tokens": float(num_tokens)}


@pytest.mark.parametrize(
    "reduction", ["token_mean", "sequence_mean", ConstantDenominator(max_tokens=7)]
)
def test_metrics_of_minibatches_equal_those_of_the_full_batch(reduction):
    batch, generator = batch_of(15), torch.Generator().manual_seed(0)
    for name in ("current", "advantages", "prev_logprobs", "reference_logprobs"):
        batch[name] = torch.randn(15, 4, generator=generator, dtype=torch.float64)
    loss_fn = GRPOLossFn(ClippedLoss(reduction=reduction))
    parts = train_in_parts(
        Measured(), batch, loss_fn, size=8, sequence_means=loss_fn.sequence_means
    )
    full = Measured().train(batch, loss_fn)
    assert parts == pytest.approx(full)


def test_minibatches_without_tokens_have_metrics():
    batch = batch_of(2)
    batch["sample_mask"] = torch.zeros(2)

    class Nothing(Rows):
        def train(self, data: BatchedDataDict, loss_fn: Any) -> dict[str, float]:
            return {"loss": 0.0, "num_valid_tokens": 0.0, "grad_norm": 0.0}

    metrics = train_in_parts(Nothing(), batch, None, size=1, sequence_means=frozenset({"loss"}))
    assert metrics == {"loss": 0, "num_valid_tokens": 0, "grad_norm": 0}


def test_a_metric_that_some_parts_lack_is_0_there() -> None:
    parts = [
        {"loss": 1.0, "num_valid_tokens": 1.0},
        {"loss": 2.0, "num_valid_tokens": 3.0, "a": 4.0},
    ]
    by_hand = {"loss": 1.75, "a": 3.0, "num_valid_tokens": 4.0}
    assert combined(parts) == combined(parts[::-1]) == by_hand
