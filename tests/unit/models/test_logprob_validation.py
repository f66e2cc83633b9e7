"""Trainer against engine on hand-computed numbers; tests/ray compares real ones."""

import math

import pytest
import torch

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConsistencyError
from nemo_rl_core.models.generation.interfaces import GenerationInterface
from nemo_rl_core.models.interfaces import PolicyInterface
from nemo_rl_core.models.validation import (
    log_probability_error,
    validate_log_probability_consistency,
)

LN2 = math.log(2)


class HalvingEngine(GenerationInterface):
    """Appends `num_tokens` tokens of probability 1/2 to each prompt."""

    def __init__(self, num_tokens: list[int]) -> None:
        self.num_tokens = torch.tensor(num_tokens)
        self.asked: BatchedDataDict | None = None

    def generate(self, data: BatchedDataDict, greedy: bool) -> BatchedDataDict:
        assert not greedy
        self.asked = data
        starts, ends = data["input_lengths"], data["input_lengths"] + self.num_tokens
        position = torch.arange(int(ends.max()))
        is_new = (position >= starts[:, None]) & (position < ends[:, None])
        return BatchedDataDict(
            {
                "output_ids": torch.ones(is_new.shape, dtype=torch.long),
                "generation_lengths": self.num_tokens,
                "unpadded_sequence_lengths": ends,
                "logprobs": torch.where(is_new, -LN2, 0.0),
                "truncated": torch.zeros(len(starts), dtype=torch.bool),
            }
        )

    def prepare_for_generation(self) -> None: ...

    def finish_generation(self) -> None: ...


class ConstantPolicy(PolicyInterface):
    """Returns `logprobs` in order for valid tokens, and NaN for others."""

    def __init__(self, logprobs: list[float]) -> None:
        self.logprobs = torch.tensor(logprobs)

    def train(self, data: BatchedDataDict, loss_fn: object) -> dict[str, float]:
        raise NotImplementedError

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        logprobs = torch.full(data["token_mask"].shape, math.nan)
        logprobs[data["token_mask"]] = self.logprobs
        return BatchedDataDict({"logprobs": logprobs})


PROMPTS = BatchedDataDict(
    {
        "input_ids": torch.tensor([[5, 6, 0], [7, 8, 9]]),
        "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
    }
)


def test_equal_logprobs_agree_and_only_completions_count() -> None:
    engine = HalvingEngine([2, 1])
    policy = ConstantPolicy([-LN2] * 3)
    assert log_probability_error(policy, engine, PROMPTS) == 1.0
    assert engine.asked is not None
    assert engine.asked["input_lengths"].tolist() == [2, 3]
    assert engine.asked["seeds"].tolist() == [0, 1]


def test_the_threshold_bounds_the_mean_factor() -> None:
    # One token of three at 1/4 instead of 1/2: (1 + 1 + 2) / 3.
    policy, engine = ConstantPolicy([-LN2, -LN2, -2 * LN2]), HalvingEngine([2, 1])
    assert log_probability_error(policy, engine, PROMPTS) == pytest.approx(4 / 3)
    assert validate_log_probability_consistency(policy, engine, PROMPTS, threshold=1.34)
    assert not validate_log_probability_consistency(policy, engine, PROMPTS)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_nan_is_never_within_the_threshold(value: float) -> None:
    policy = ConstantPolicy([value, -LN2, -LN2])
    assert not validate_log_probability_consistency(
        policy, HalvingEngine([2, 1]), PROMPTS, threshold=1e30
    )


def test_an_engine_that_generates_nothing_does_not_agree() -> None:
    with pytest.raises(ConsistencyError, match="nothing to compare"):
        validate_log_probability_consistency(ConstantPolicy([]), HalvingEngine([0, 0]), PROMPTS)
