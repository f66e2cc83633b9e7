"""The gate between trainer and engine, on numbers worked out by hand."""

import math

import pytest
import torch

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConsistencyError
from nemo_rl_core.models.validation import check_consistency


def make_batch(gaps: list[list[float]]) -> BatchedDataDict:
    """Three places a sequence, the first of them a prompt's; trainer = engine - gap elsewhere."""
    gap = torch.tensor(gaps)
    generated = torch.full(gap.shape, -1.0)
    return BatchedDataDict(
        {
            "generation_logprobs": generated,
            "prev_logprobs": generated - gap,
            "token_mask": torch.tensor([[False, True, True]] * len(gaps)),
        }
    )


def test_agreement_is_one() -> None:
    assert check_consistency(make_batch([[0, 0, 0]]), bound=1.05) == 1.0


def test_the_mean_over_completion_tokens() -> None:
    # exp|ln 1.02| = 1.02 and exp|-ln 1.04| = 1.04 at two places, 1 at two: (1.02+1.04+1+1)/4.
    # What stands at the prompt's place counts for nothing.
    batch = make_batch([[9, math.log(1.02), 0], [9, 0, -math.log(1.04)]])
    assert check_consistency(batch, bound=1.05) == pytest.approx(1.015)


def test_past_the_bound_the_worst_place_is_named() -> None:
    # Sequence 1 is off at its last place, e^0.5 = 1.6487: (1 + 1 + 1 + 1.6487) / 4 = 1.1622.
    with pytest.raises(ConsistencyError, match=r"token_mult_prob_error is 1\.162") as caught:
        check_consistency(make_batch([[0, 0, 0], [0, 0, 0.5]]), bound=1.05)
    assert caught.value.expected == "at most 1.05 (1 is agreement)"
    assert "50% of sequences" in caught.value.got
    assert "sequence 1 at position 2: engine -1.0000, trainer -1.5000 nats" in caught.value.got
    assert "max_token_mult_prob_error" in caught.value.fix
    assert len(str(caught.value).splitlines()) < 10


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_is_never_accepted(value: float) -> None:
    with pytest.raises(ConsistencyError) as caught:
        check_consistency(make_batch([[0, 0, 0], [0, value, 0], [0, 0, 0.1]]), bound=1e30)
    assert "worst is sequence 1 at position 1" in caught.value.got


def test_what_is_not_a_number_outside_the_mask_is_no_matter() -> None:
    assert check_consistency(make_batch([[math.nan, 0, 0]]), bound=1.05) == 1.0
