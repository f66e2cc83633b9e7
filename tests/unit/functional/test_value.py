"""The value loss and the explained variance by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.functional.value import (
    clipped_value_loss,
    explained_variance,
    return_moments,
    value_loss,
)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_clipped_by_hand():
    values = tensor(0.1, 0.5, -0.5, 0.9).requires_grad_()
    returns = tensor(1, 1, 1, 0)
    losses = clipped_value_loss(values, returns, torch.zeros(4).double(), clip=0.2)
    losses.sum().backward()
    # 0.1 is inside: 0.5 * 0.81. 0.5 -> 0.2: max(0.25, 0.64), moved towards its return: no gradient.
    # -0.5 -> -0.2: max(2.25, 1.44), moved away: gradient v - R. 0.9 -> 0.2: max(0.81, 0.04).
    torch.testing.assert_close(losses.detach(), tensor(0.405, 0.32, 1.125, 0.405))
    torch.testing.assert_close(values.grad, tensor(-0.9, 0, -1.5, 0.9))


def test_unclipped_by_hand():
    assert value_loss(tensor(1, 3), tensor(2, 1)).tolist() == [0.5, 2]


def test_gradients():
    values = tensor(0.1, 0.5, -0.5, 0.9, 0.17).requires_grad_()
    returns, old = tensor(1, 1, 1, 0, -0.4), tensor(0, 0.1, 0, 0.2, 0.1)
    assert torch.autograd.gradcheck(
        lambda v: clipped_value_loss(v, returns, old, clip=0.2), (values,)
    )
    assert torch.autograd.gradcheck(lambda v: value_loss(v, returns), (values,))


def explained(values, returns):
    moments = return_moments(tensor(*values), tensor(*returns))
    return explained_variance({name: moment.mean().item() for name, moment in moments.items()})


def test_explained_variance_by_hand():
    assert explained([1, 3], [1, 3]) == 1
    assert explained([2, 2], [1, 3]) == 0
    assert explained([6, 8], [1, 3]) == 1  # a constant offset is no variance
    assert explained([3, 1], [1, 3]) == 1 - 4 / 1  # R - v = -2, 2
    assert math.isnan(explained([1, 2], [5, 5]))
    assert math.isnan(explained([1, 2], [0, 0]))


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=2, max_size=8))
def test_explained_variance_is_that_of_the_definition(pairs):
    values, returns = (tensor(*column) for column in zip(*pairs, strict=True))
    variance = returns.var(correction=0).item()
    result = explained(values.tolist(), returns.tolist())
    if variance > 1e-3:
        unexplained = (returns - values).var(correction=0).item()
        assert result == pytest.approx(1 - unexplained / variance, abs=1e-6)
        assert result <= 1 + 1e-9
