"""Custom losses: what is refused before a weight moves, and the check by finite differences."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_core.algorithms.dpo.config import HingeLoss, ORPOLoss
from nemo_rl_core.algorithms.dpo.loss import DPOLossFn
from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.algorithms.grpo.loss_config import (
    CISPOLoss,
    ClippedLoss,
    GSPOLoss,
    TruncatedImportance,
)
from nemo_rl_core.algorithms.ppo.loss import PPOLossFn
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.functional.custom_advantage import AdvantageFunction
from nemo_rl_core.functional.custom_loss import CheckedLoss
from nemo_rl_core.functional.loss_check import check_loss, example_batch
from nemo_rl_core.functional.masked import masked_sum, valid_token_mask, zero_masked


def weighted(
    next_token_logprobs: Tensor,
    batch: Mapping[str, Tensor],
    *,
    global_valid_seqs: Tensor,
    global_valid_tokens: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    values = zero_masked(-batch["advantages"] * next_token_logprobs, mask)
    loss = masked_sum(values, mask, denominator=global_valid_tokens)
    return loss, {"loss": loss.detach()}


def _of_step(loss_fn: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    batch = BatchedDataDict(example_batch("grpo"))
    logprobs = (-torch.ones(4, 5, dtype=torch.float64)).requires_grad_()
    counts = {"global_valid_seqs": torch.tensor(3.0), "global_valid_tokens": torch.tensor(11.0)}
    checked = CheckedLoss(fn=loss_fn, name="mine:loss", is_first_step=True, **options)
    return checked(logprobs, batch, **counts)


def _with_result(returned: Any) -> Any:
    def loss(logprobs: Tensor, batch: Any, **counts: Any) -> Any:
        value, _ = weighted(logprobs, batch, **counts)
        return returned(value, logprobs, batch)

    return loss


def test_the_gradient_is_the_advantage_of_each_token() -> None:
    batch = example_batch("grpo")
    mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
    by_hand = torch.where(mask, -batch["advantages"] / 11, 0.0)  # 4 + 3 + 4 valid tokens
    assert torch.allclose(check_loss(weighted), by_hand)


@pytest.mark.parametrize(
    ("loss_fn", "algorithm"),
    [
        (GRPOLossFn(ClippedLoss(importance=TruncatedImportance(), entropy_bonus=0.1)), "grpo"),
        (GRPOLossFn(CISPOLoss()), "grpo"),  # detaches its ratio
        (GRPOLossFn(GSPOLoss(), prev_is_current=True), "grpo"),
        (DPOLossFn(HingeLoss()), "dpo"),
        (DPOLossFn(ORPOLoss()), "dpo"),
        (PPOLossFn(), "ppo"),
    ],
)
def test_losses_of_the_project_pass(loss_fn: Any, algorithm: str) -> None:
    check_loss(loss_fn, algorithm)


@pytest.mark.parametrize(
    ("returned", "problem", "got"),
    [
        (lambda loss, *_: loss, "returned a wrong type", "a tensor of shape []"),
        (lambda loss, *_: (loss, 1.0), "returned a wrong type", "(Tensor, float)"),
        (lambda loss, x, _: (-x, {}), "wrong type or shape", "the loss: a tensor of shape [4, 5]"),
        (lambda loss, *_: (loss.item(), {}), "wrong type or shape", "the loss: float"),
        (lambda loss, *_: (loss, {"a": 1.0}), "wrong type or shape", "a: float"),
        (lambda loss, *_: (loss, {"grad_norm": loss}), "names that the trainer uses", "grad_norm"),
        (lambda loss, *_: (loss * torch.nan, {}), "is not finite", "NaN or infinity in loss"),
        (lambda loss, *_: (loss, {"a": loss / 0}), "is not finite", "NaN or infinity in a"),
        (lambda loss, *_: (loss.detach(), {}), "has no gradient", "does not depend"),
        (lambda loss, x, _: (-x.sum() / 20, {}), "trains on masked tokens", "9 masked tokens"),
        (lambda loss, *_: (loss * loss, {}), "depends on the number of micro-batches", ""),
        (
            lambda loss, *_: (loss, {"a": torch.tensor(1.0)}),
            "the metric 'a' of 4 rows is not the sum of those of two parts",
            "2",
        ),
        (
            lambda loss, x, batch: (batch["weights"].sum() * loss, {}),
            "reads a column",
            "advantages",
        ),
    ],
)
def test_a_wrong_loss_is_refused_by_name(returned: Any, problem: str, got: str) -> None:
    with pytest.raises(ConfigError, match="mine:loss") as raised:
        _of_step(_with_result(returned))
    assert problem in raised.value.problem and got in (raised.value.got or "")
    assert raised.value.fix


def test_a_mean_over_the_micro_batch_is_refused() -> None:
    def mean(logprobs: Tensor, batch: Any, **counts: Tensor) -> Any:
        mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
        return masked_sum(-logprobs, mask, denominator=mask.sum()), {}

    for check in (lambda: check_loss(mean), lambda: _of_step(mean)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="number of micro-batches") as raised:
            check()
        assert "divide sums by global_valid_tokens" in (raised.value.fix or "")


def test_pairs_stay_in_one_part() -> None:
    batch = example_batch("dpo")
    batch["pair_ids"] = torch.tensor([0, 1, 0, 1])
    batch["is_chosen"] = torch.tensor([True, True, False, False])
    check_loss(DPOLossFn(), "dpo", batch=batch)


def test_a_product_with_a_mask_is_refused() -> None:
    def product(logprobs: Tensor, batch: Any, **counts: Tensor) -> Any:
        mask = batch["token_mask"] * batch["sample_mask"][:, None]
        return -(logprobs * mask).sum() / counts["global_valid_tokens"], {}

    with pytest.raises(ConfigError, match="reads masked tokens"):
        check_loss(product)  # type: ignore[arg-type]


def test_a_wrong_derivative_is_found() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Tensor) -> Tensor:
            return values.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient

    def loss(logprobs: Tensor, batch: Any, **counts: Any) -> Any:
        return weighted(Twice.apply(logprobs), batch, **counts)

    with pytest.raises(ConfigError, match="is not that of its values"):
        check_loss(loss)  # type: ignore[arg-type]


def test_detached_values_count_as_constants() -> None:
    def loss(logprobs: Tensor, batch: Any, **counts: Any) -> Any:
        mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
        logprobs = zero_masked(logprobs, mask)
        with torch.no_grad():
            ratio = logprobs.exp()
        return weighted(logprobs * ratio * logprobs.detach().tanh(), batch, **counts)

    check_loss(loss)  # type: ignore[arg-type]


def _numbers(values: Tensor) -> Tensor:
    return torch.stack([row * 0 + float(row.sum()) + int(row[2] * 9) for row in values]) + (
        torch.tensor(values.tolist())
    )


def _detached_in_place(values: Tensor) -> Tensor:
    doubled = values * 2
    doubled.detach_()
    return doubled


def _changed_in_place(values: Tensor) -> Tensor:
    with torch.no_grad():
        changed = values.contiguous().exp().mul_(2.0)
        changed[:, 2].add_(1.0)  # a view
        changed[:, 3] = values[:, 2]
        changed.div_(changed.sum(dim=1, keepdim=True))
        return changed.expand(2, *changed.shape).max(dim=0).values


@pytest.mark.parametrize("constant", [_numbers, _detached_in_place, _changed_in_place])
def test_constants_may_be_numbers_and_changed_in_place(constant: Any) -> None:
    def loss(logprobs: Tensor, batch: Any, **counts: Any) -> Any:
        mask = valid_token_mask(batch["token_mask"], batch["sample_mask"])
        logprobs = zero_masked(logprobs, mask)
        return weighted(logprobs * constant(logprobs).detach(), batch, **counts)

    check_loss(loss)  # type: ignore[arg-type]


def test_a_batch_of_one_sequence_or_pair_cannot_be_checked() -> None:
    for algorithm, size in (("sft", 1), ("dpo", 2)):
        batch = {name: column[:size] for name, column in example_batch(algorithm).items()}
        with pytest.raises(ConfigError, match="cannot be split"):
            check_loss(weighted, algorithm, batch=batch)


def test_a_missing_column_of_a_plain_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="reads a column that this run does not have"):
        check_loss(weighted, batch=example_batch("sft"))


def test_an_advantage_of_one_row_is_not_called_without_rows() -> None:
    def advantages(rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        assert len(rewards)
        return rewards - values, rewards

    columns = {"rewards": torch.ones(1, 3), "values": torch.zeros(1, 3)}
    columns["mask"] = torch.tensor([[True, True, False]])
    result, _ = AdvantageFunction(fn=advantages, name="a").of_critic(columns)
    assert result.tolist() == [[1.0, 1.0, 0.0]]


def test_prev_logprobs_may_be_those_of_the_forward_pass() -> None:
    def loss(logprobs: Tensor, batch: Any, **counts: Any) -> Any:
        value, _ = weighted(logprobs, batch, **counts)
        assert torch.equal(batch["prev_logprobs"], logprobs.detach())
        return value, {}

    value, metrics = _of_step(loss, prev_is_current=True)
    assert value.requires_grad and metrics["loss"] == value


def test_an_unknown_algorithm_names_the_choices() -> None:
    with pytest.raises(ConfigError, match="sft, dpo, grpo, ppo"):
        check_loss(weighted, "distillation")
