"""Masked reductions: values, and nothing leaking from masked entries."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.functional.masked import (
    masked_mean,
    masked_sequence_mean,
    masked_sum,
    valid_token_mask,
    zero_masked,
)

POISON = [math.nan, math.inf, -math.inf]


def test_valid_token_mask_is_the_product_of_both_masks():
    token_mask = torch.tensor([[0, 1, 1], [1, 0, 1]])
    sample_mask = torch.tensor([1.0, 0.0])
    expected = torch.tensor([[False, True, True], [False, False, False]])
    assert torch.equal(valid_token_mask(token_mask, sample_mask), expected)


def test_reductions_by_hand():
    values = torch.tensor([[1.0, 2.0, 30.0], [4.0, 50.0, 60.0], [7.0, 8.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    # valid: 1 + 2 + 4 = 7
    assert masked_sum(values, mask, denominator=torch.tensor(14.0)).item() == 0.5
    assert masked_mean(values, mask).item() == pytest.approx(7 / 3)
    # rows: (1 + 2) / 2, 4 / 1, none
    assert masked_sequence_mean(values, mask).tolist() == [1.5, 4.0, 0.0]


def test_nothing_valid_gives_zero_not_nan():
    values, mask = torch.full((2, 3), math.nan), torch.zeros(2, 3, dtype=torch.bool)
    assert masked_sum(values, mask, denominator=torch.tensor(0.0)).item() == 0
    assert masked_mean(values, mask).item() == 0
    assert masked_sequence_mean(values, mask).tolist() == [0, 0]


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("reduction", [masked_mean, masked_sequence_mean])
def test_poison_at_masked_entries_reaches_neither_value_nor_gradient(poison, reduction):
    mask = torch.tensor([[True, False], [True, True]])
    values = torch.tensor([[1.0, poison], [2.0, 3.0]], requires_grad=True)
    clean = torch.tensor([[1.0, 0.0], [2.0, 3.0]], requires_grad=True)
    # exp behind zero_masked is the pattern of a loss: its derivative at inf is inf.
    result = reduction(torch.exp(zero_masked(values, mask)), mask).sum()
    expected = reduction(torch.exp(zero_masked(clean, mask)), mask).sum()
    result.backward()
    expected.backward()
    assert result.item() == expected.item()
    assert torch.equal(values.grad, clean.grad)
    assert values.grad[0, 1].item() == 0
    assert values.grad[0, 0].item() > 0


def test_a_mask_of_another_shape_is_refused_not_broadcast():
    with pytest.raises(AssertionError, match="differ"):
        masked_mean(torch.zeros(2, 3), torch.ones(3, dtype=torch.bool))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(-100, 100), st.booleans()), min_size=1, max_size=30),
    st.integers(0, 30),
)
def test_sums_of_parts_are_the_sum(entries, cut):
    values = torch.tensor([value for value, _ in entries], dtype=torch.float64)
    mask = torch.tensor([valid for _, valid in entries])
    count = mask.sum()
    full = masked_sum(values, mask, denominator=count)
    parts = [
        masked_sum(values[part], mask[part], denominator=count)
        for part in (slice(None, cut), slice(cut, None))
    ]
    torch.testing.assert_close(sum(parts), full)
    valid = [value for value, is_valid in entries if is_valid]
    assert full.item() == pytest.approx(math.fsum(valid) / max(len(valid), 1), abs=1e-9)
