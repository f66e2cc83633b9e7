"""Tokenized rows for supervised fine-tuning, with loss masks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_core.data.frames import row_kind
from nemo_rl_core.data.loader import LazyRows, load_records, load_tokenized
from nemo_rl_core.data.loss_masks import SupervisedExample
from nemo_rl_core.data.tools import ToolsByTask
from nemo_rl_core.data.written import written_tools
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.errors import DataError


def load_examples(
    folder: Path, tokenizer: Any, offered: ToolsByTask | None = None
) -> Sequence[SupervisedExample]:
    """Tokenizes all rows of a data set folder: prompts, conversations or plain text.

    The columns `mask` (trained turns) and `max_tokens` (truncation) come from
    `schemas.checked_rows`. Rows without completions are refused. Prompts show the offered tools,
    as they do when completions are sampled.
    """
    rows = load_records(folder)
    if rows and row_kind(rows[0]) == "preferences":
        raise DataError(
            "the data set has preference pairs, which supervised training cannot use",
            expected="prompts with completions, conversations (messages), or text",
            got=f"the columns {', '.join(rows[0])}",
            fix="train on it with dpo or as a reward model, or rename chosen to completion",
        )
    # Conversations and texts do not have the column.
    if rows and "completion" in rows[0] and not rows[0]["completion"]:
        raise DataError(
            "the data set has only prompts, which supervised training cannot use",
            expected="the column completion or answer in addition to prompt",
            got="rows without completions",
            fix="add one of the columns, or train with an algorithm that samples",
        )
    tools = written_tools(offered or {}, tokenizer)
    tokenized = load_tokenized(folder, rows, tokenizer, tools)
    examples: Sequence[SupervisedExample] = (
        [each["row"] for each in tokenized]
        if isinstance(tokenized, list)
        else LazyRows(tokenized, lambda each: each["row"])
    )
    # Rows were checked without the tools of the environment.
    if tools and not all(each.num_trained_tokens for each in examples):
        raise DataError(
            "the tools of the environment leave no room for the completion of a row",
            expected="trained tokens in each truncated row (data.max_sequence_tokens)",
            got="a row whose prompt is as long as the limit",
            fix="raise data.max_sequence_tokens, or offer fewer tools",
        )
    return examples


def sft_batch(examples: Sequence[SupervisedExample]) -> BatchedDataDict:
    """Pads examples to a batch: `input_ids [B, T]`, `input_lengths [B]`, `token_mask [B, T-1]`."""
    return collate(
        [example.token_ids for example in examples], [example.loss_mask for example in examples]
    )
