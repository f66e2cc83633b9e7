"""Padding and masks, against values worked out by hand."""

import pytest
import torch

from nemo_rl_core.distributed.batched_data_dict import collate, collate_completions


def test_a_batch_by_hand() -> None:
    batch = collate(
        [[5, 6, 7, 8], [9, 4]],
        [[False, False, True, True], [False, True]],
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [9, 4, 0, 0]]
    assert batch["input_lengths"].tolist() == [4, 2]
    # Position t is the mask of token t+1: 6 no, 7 yes, 8 yes; 4 yes, then padding.
    assert batch["token_mask"].tolist() == [[False, True, True], [True, False, False]]
    assert batch["sample_mask"].tolist() == [1.0, 1.0]
    assert batch["input_ids"].dtype == batch["input_lengths"].dtype == torch.int64
    assert batch["token_mask"].dtype == torch.bool


def test_completions_without_masks_are_collated_like_full_masks() -> None:
    prompts, completions = [[5, 6], [9], [3]], [[7, 8], [4], []]
    result = collate_completions(prompts, completions)
    expected = collate(
        [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)],
        [[False, False, True, True], [False, True], [False]],
    )
    assert result.keys() == expected.keys()
    for name, column in expected.items():
        assert torch.equal(result[name], column), name


def test_the_first_token_is_never_trained_on() -> None:
    assert collate([[1, 2, 3]], [[True, False, False]])["token_mask"].sum() == 0


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 1: 2 tokens but 3 mask values"):
        collate([[1, 2], [3, 4]], [[True, True], [True, True, True]])


def test_a_missing_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        collate([[1, 2], [3, 4]], [[True, True]])
