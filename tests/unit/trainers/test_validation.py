"""The schedule of validation, and metrics of a loss on held-out rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.trainers.callbacks import Callbacks
from nemo_rl_core.trainers.validation import ValidationRunner, loss_metrics


def runner(every: int | None, *, last: int = 7) -> ValidationRunner:
    return ValidationRunner(lambda: {"loss": 0.25}, every_num_steps=every, last=last)


@pytest.mark.parametrize(
    ("every", "due"),
    [(None, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (7, [7]), (100, [7])],
)
def test_validation_is_due_regularly_and_at_the_end(every: int | None, due: list[int]) -> None:
    assert [step for step in range(1, 8) if runner(every).is_due(step)] == due


def test_metrics_are_prefixed_and_passed_to_callbacks(
    make_trainer: Callable[..., Any], make_journal: Callable[[], Any]
) -> None:
    journal = make_journal()
    called = Callbacks(make_trainer({}), [journal])
    assert runner(2).after_step(1, called) == {}
    assert journal.calls == []
    assert runner(2).after_step(2, called) == {"validation_loss": 0.25}
    assert journal.calls == [
        ("on_validation_begin", 2),
        ("on_validation_end", 2, {"validation_loss": 0.25}),
    ]


def test_the_validation_loss_excludes_masked_rows() -> None:
    batch = BatchedDataDict(
        {
            "token_mask": torch.tensor([[1, 1], [1, 1]]),
            "sample_mask": torch.tensor([1, 0]),
        }
    )
    logprobs = torch.tensor([[-1.0, -2.0], [float("nan"), -9.0]], requires_grad=True)
    # (1 + 2) / 2 tokens; the second row does not count.
    assert loss_metrics(NLLLoss(), logprobs, batch) == {"loss": 1.5}
