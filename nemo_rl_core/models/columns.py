"""Columns of a batch that follow from others: lengths, and masks of what is trained on."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConsistencyError, DataError


def with_lengths(data: BatchedDataDict) -> BatchedDataDict:
    """A copy of a batch that has `input_lengths [B]` in place of `attention_mask [B, T]`.

    Raises:
        MissingColumnError: If the batch has neither.
        DataError: If the batch is not padded on the right.
    """
    batch = data.copy()
    if "input_lengths" in batch:
        return batch
    mask = torch.as_tensor(batch["attention_mask"]).bool()
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        raise DataError(
            "prompts of a batch are padded on the left",
            expected="attention_mask of ones, and zeros behind them",
            fix="pad on the right",
        )
    del batch["attention_mask"]
    batch["input_lengths"] = mask.sum(dim=1)
    return batch


def training_columns(data: BatchedDataDict) -> BatchedDataDict:
    """A copy of a batch with the columns that every training backend reads.

    What is missing follows from what is there: from `output_ids`, the output of `generate`, the
    completions are trained on, and its `logprobs` are the `generation_logprobs`; `input_lengths`
    follow from `attention_mask`; without `token_mask` every token but the first is trained on, and
    without `sample_mask` every row. `advantages [B]` count for all tokens of their row.

    Args:
        data: `input_ids [B, T]` with `input_lengths [B]` or `attention_mask [B, T]`, or what
            `generate` returns.

    Raises:
        MissingColumnError: Names the column that does not follow.
        DataError: If the batch is padded on the left.
    """
    batch = _of_generated(data) if "output_ids" in data and "input_ids" not in data else data
    batch = with_lengths(batch)
    ids = batch["input_ids"]
    if "token_mask" not in batch:
        place = torch.arange(1, ids.shape[1])  # position t of a mask stands for token t + 1
        batch["token_mask"] = place < batch["input_lengths"][:, None].cpu()
    if "sample_mask" not in batch:
        batch["sample_mask"] = torch.ones(len(ids))
    advantages = batch.get("advantages")
    if isinstance(advantages, Tensor) and advantages.dim() == 1:
        batch["advantages"] = advantages[:, None].expand(batch["token_mask"].shape).contiguous()
    return batch


def as_training_batch(output: BatchedDataDict) -> BatchedDataDict:
    """What an engine has generated, as a trainer reads it: the completions alone count.

    Raises:
        ConsistencyError: If there are none.
    """
    mask = _completions(output)
    if not mask.any():
        raise ConsistencyError(
            "the engine has generated no token, so there is nothing to compare",
            expected="prompts that leave room for a completion",
            got=f"{len(mask)} rows without one",
        )
    return BatchedDataDict(
        {
            "input_ids": output["output_ids"],
            "input_lengths": output["unpadded_sequence_lengths"],
            "token_mask": mask,
            "sample_mask": torch.ones(len(mask)),
        }
    )


def fill(
    batch: BatchedDataDict, wanted: Iterable[str], sources: dict[str, Callable[[], Tensor]]
) -> None:
    """Adds columns that a loss reads and the batch lacks, where something computes them.

    Args:
        batch: Gets the columns.
        wanted: The names that the loss reads.
        sources: What computes a column.
    """
    for name in wanted:
        if name not in batch and name in sources:
            batch[name] = sources[name]()


def _of_generated(output: BatchedDataDict) -> BatchedDataDict:
    of_engine = {"output_ids", "unpadded_sequence_lengths", "generation_lengths", "logprobs"}
    others = {name: value for name, value in output.items() if name not in of_engine}
    found = {
        **others,
        "input_ids": output["output_ids"],
        "input_lengths": output["unpadded_sequence_lengths"],
        "token_mask": _completions(output),
    }
    if "logprobs" in output:
        found["generation_logprobs"] = output["logprobs"][:, 1:]
    return BatchedDataDict(found)


def _completions(output: BatchedDataDict) -> Tensor:
    """`[B, T-1]`: whether the next token is one of the completion's."""
    ends = output["unpadded_sequence_lengths"]
    starts = ends - output["generation_lengths"]
    place = torch.arange(1, output["output_ids"].shape[1])
    mask: Tensor = (place >= starts[:, None]) & (place < ends[:, None])
    return mask
