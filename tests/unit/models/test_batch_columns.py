"""Document 004's batches: derivable columns are filled in, missing ones are named."""

import copy
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms import DPOLossFn, GRPOLossFn
from nemo_rl_core.algorithms.grpo.loss_config import ClippedLoss, OnPolicyLoss
from nemo_rl_core.distributed import BatchedDataDict
from nemo_rl_core.errors import DataError, MissingColumnError
from nemo_rl_core.models import HuggingFacePolicy
from nemo_rl_core.models.columns import training_columns

DATUM = {
    "input_ids": torch.tensor([[1, 5, 6, 7], [1, 8, 9, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
}
GENERATED = {
    "output_ids": torch.tensor([[1, 5, 6, 7], [1, 8, 2, 0]]),
    "generation_lengths": torch.tensor([2, 1]),
    "unpadded_sequence_lengths": torch.tensor([4, 3]),
    "logprobs": torch.tensor([[0.0, 0, -1, -2], [0, 0, -3, 0]]),
    "truncated": torch.tensor([True, False]),
}


def test_all_tokens_of_a_generation_datum_are_trained_on() -> None:
    batch = training_columns(BatchedDataDict(DATUM))
    assert batch["input_lengths"].tolist() == [4, 3]
    assert batch["token_mask"].tolist() == [[True, True, True], [True, True, False]]
    assert batch["sample_mask"].tolist() == [1.0, 1.0]
    assert "input_lengths" not in DATUM


def test_only_completions_of_generated_sequences_are_trained_on() -> None:
    columns = {**GENERATED, "advantages": torch.tensor([1.0, -1.0])}
    batch = training_columns(BatchedDataDict(columns))
    assert batch["input_ids"] is GENERATED["output_ids"]
    assert batch["token_mask"].tolist() == [[False, True, True], [False, True, False]]
    assert batch["generation_logprobs"].tolist() == [[0, -1, -2], [0, -3, 0]]
    assert batch["advantages"].tolist() == [[1.0] * 3, [-1.0] * 3]
    assert batch["truncated"].tolist() == [True, False]


@pytest.mark.parametrize("columns", [DATUM, GENERATED])
def test_extra_data_of_any_form_is_left_out(columns: dict[str, Any]) -> None:
    batch = training_columns(BatchedDataDict({**columns, "__extra__": {"any": 1}}))
    assert "__extra__" not in batch
    assert batch.size == 2


def test_existing_columns_are_kept() -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    batch = training_columns(BatchedDataDict({**DATUM, "token_mask": mask}))
    assert batch["token_mask"] is mask


def test_missing_columns_are_named() -> None:
    with pytest.raises(MissingColumnError, match="no column 'attention_mask'") as missing:
        training_columns(BatchedDataDict({"input_ids": DATUM["input_ids"]}))
    assert "input_lengths [B] instead" in str(missing.value)
    left = BatchedDataDict({**DATUM, "attention_mask": DATUM["attention_mask"].flip(1)})
    with pytest.raises(DataError, match="padded on the left"):
        training_columns(left)


def test_a_missing_column_raises_a_key_error_that_can_be_pickled() -> None:
    batch = BatchedDataDict({"input_ids": torch.zeros(1, 2)})
    assert batch.get("advantages") is None
    assert batch.pop("advantages", 3) == 3
    with pytest.raises(KeyError) as raised:
        batch["advantages"]
    assert str(copy.copy(raised.value)) == str(raised.value)  # restored like by pickle


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (GRPOLossFn(), ("advantages", "prev_logprobs", "reference_logprobs")),
        (GRPOLossFn(ClippedLoss(kl=None)), ("advantages", "prev_logprobs")),
        (GRPOLossFn(OnPolicyLoss(kl=None)), ("advantages",)),
        (DPOLossFn(), ("is_chosen", "pair_ids", "reference_logprobs")),
    ],
)
def test_a_loss_lists_the_columns_it_reads(loss: Any, expected: tuple[str, ...]) -> None:
    assert loss.columns == expected


def test_a_policy_names_all_missing_columns_before_it_starts_a_worker() -> None:
    policy = HuggingFacePolicy("no/such-model")
    with pytest.raises(MissingColumnError, match="no column 'is_chosen', 'pair_ids'"):
        policy.train(BatchedDataDict(GENERATED), DPOLossFn())
    with pytest.raises(MissingColumnError, match="no column 'advantages'"):
        policy.train(BatchedDataDict(GENERATED), GRPOLossFn())
