"""Rows of prompt and completion as token sequences with a mask on the completion."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.data.chat import SupervisedExample, supervised_example
from nemo_rl_core.data.collate import collate
from nemo_rl_core.data.loader import load_frame
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict


def load_examples(folder: Path, tokenizer: Any) -> list[SupervisedExample]:
    """All rows of a data set folder, tokenized."""
    frame = load_frame(folder)
    return [
        supervised_example(tokenizer, prompt, completion)
        for prompt, completion in zip(frame["prompt"], frame["completion"], strict=True)
    ]


def sft_batch(examples: Sequence[SupervisedExample]) -> BatchedDataDict:
    """A padded batch: `input_ids [B, T]`, `input_lengths [B]`, `token_mask [B, T-1]`."""
    return collate(
        [example.token_ids for example in examples], [example.loss_mask for example in examples]
    )
