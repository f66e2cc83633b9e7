import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.environments.interfaces import attempt, checked, raise_first, shorten
from nemo_rl_core.errors import RewardError

EXCHANGE = {"prompt": "12+34=", "completion": "forty-six", "source": "the reward function 'f'"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.array(2), 2.0),
        (torch.tensor(0.75), 0.75),
    ],
)
def test_numbers_of_every_kind_become_floats(value: object, expected: float) -> None:
    result = checked(value, **EXCHANGE)
    assert result == expected
    assert type(result) is float


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        10**400,
        torch.tensor(math.nan),
        torch.tensor([1.0, 2.0]),
        None,
        "1.0",
        [1.0],
        1j,
    ],
)
def test_other_values_are_errors_that_name_prompt_and_completion(
    value: object,
) -> None:
    result = checked(value, **EXCHANGE)
    assert isinstance(result, RewardError)
    text = str(result)
    assert "'12+34='" in text
    assert "'forty-six'" in text
    assert len(text.splitlines()) < 10


@pytest.mark.parametrize("raised", [ValueError("no digits"), SystemExit(0), RecursionError("deep")])
def test_an_exception_of_a_reward_becomes_an_outcome(raised: BaseException) -> None:
    def reward() -> float:
        raise raised

    result = attempt(reward, **EXCHANGE)
    assert isinstance(result, RewardError)
    assert type(raised).__name__ in str(result)
    assert str(raised) in str(result)


def test_an_interrupt_is_not_an_outcome() -> None:
    def reward() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(reward, **EXCHANGE)


def test_raise_first_returns_scores_or_raises_the_first_failure() -> None:
    first, second = RewardError("first"), RewardError("second")
    assert raise_first([0.0, 1.0]) == [0.0, 1.0]
    with pytest.raises(RewardError, match="first"):
        raise_first([1.0, first, second])


@given(st.text(max_size=2000), st.integers(20, 200))
def test_shorten_gives_one_line_within_the_limit(text: str, limit: int) -> None:
    short = shorten(text, limit)
    assert len(short) <= limit
    assert "\n" not in short


def test_shorten_keeps_both_ends_of_a_megabyte() -> None:
    # 100 // 3 = 33 from the start, 100 - 33 - 5 = 62 from the end.
    assert shorten("a" * 500_000 + "b" * 500_000) == "a" * 33 + " ... " + "b" * 62


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("value", [1e308, -3.5e38, math.nextafter(LARGEST, math.inf)])
def test_a_reward_beyond_float32_is_an_error(value: float) -> None:
    # Batches are float32: the reward would be infinite there, and the gradient not finite.
    result = checked(value, **EXCHANGE)
    assert isinstance(result, RewardError)
    assert "returned a number that is not finite in float32 for prompt '12+34='" in str(result)
    assert checked(LARGEST, **EXCHANGE) == LARGEST
    assert torch.tensor(LARGEST, dtype=torch.float32).isfinite()
