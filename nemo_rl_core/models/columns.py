"""Columns of a batch that are derived from others: lengths and masks of trained tokens."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConsistencyError, DataError


def with_lengths(data: BatchedDataDict) -> BatchedDataDict:
    """Copies a batch, with `input_lengths [B]` instead of `attention_mask` and `__extra__`."""
    batch = data.copy()
    batch.data.pop("__extra__", None)
    if "input_lengths" in batch:
        return batch
    mask = torch.as_tensor(batch["attention_mask"]).bool()
    if (mask[:, 1:] & ~mask[:, :-1]).any():
        raise DataError(
            "prompts of a batch are padded on the left",
            expected="attention_mask of ones, then zeros",
            fix="pad on the right",
        )
    del batch["attention_mask"]
    batch["input_lengths"] = mask.sum(dim=1)
    return batch


def with_documented_columns(batch: BatchedDataDict) -> BatchedDataDict:
    """Adds the columns of NeMo RL's documents: `attention_mask [B, T]` and an empty `__extra__`."""
    position = torch.arange(batch["input_ids"].shape[1])
    mask = (position < batch["input_lengths"][:, None]).long()
    extra: list[dict[str, Any]] = [{} for _ in range(len(mask))]
    return BatchedDataDict({**batch, "attention_mask": mask, "__extra__": extra})


def training_columns(data: BatchedDataDict) -> BatchedDataDict:
    """Copies a batch, with local values of all columns that every training backend reads.

    Missing columns are derived from the others. The output of `generate`, with `output_ids`, trains
    on the completions, and its `logprobs` become `generation_logprobs`; `input_lengths` are derived
    from `attention_mask`; without `token_mask` every token except the first is trained on, and
    without `sample_mask` every row. `advantages [B]` apply to all tokens of their row.

    Args:
        data: `input_ids [B, T]` with `input_lengths [B]` or `attention_mask [B, T]`, or the output
            of `generate`.
    """
    batch = _from_generated(data) if "output_ids" in data and "input_ids" not in data else data
    batch = with_lengths(batch.fetched())
    ids = batch["input_ids"]
    if "token_mask" not in batch:
        position = torch.arange(1, ids.shape[1])  # index t of a mask is for token t + 1
        batch["token_mask"] = position < batch["input_lengths"][:, None].cpu()
    if "sample_mask" not in batch:
        batch["sample_mask"] = torch.ones(len(ids))
    advantages = batch.get("advantages")
    if isinstance(advantages, Tensor) and advantages.dim() == 1:
        batch["advantages"] = advantages[:, None].expand(batch["token_mask"].shape).contiguous()
    return batch


def joined_outputs(outputs: Sequence[BatchedDataDict]) -> BatchedDataDict:
    """Joins outputs of engines, without `logprobs` if any of them lacks the column."""
    if not all("logprobs" in output for output in outputs):
        outputs = [
            BatchedDataDict({name: each for name, each in output.items() if name != "logprobs"})
            for output in outputs
        ]
    return BatchedDataDict.from_batches(outputs)


def as_training_batch(output: BatchedDataDict) -> BatchedDataDict:
    """Converts the output of an engine to a training batch of its completions."""
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
    batch: BatchedDataDict, names: Iterable[str], sources: dict[str, Callable[[], Tensor]]
) -> None:
    """Adds missing columns of a loss to a batch, if a source can compute them."""
    for name in names:
        if name not in batch and name in sources:
            batch[name] = sources[name]()


def _from_generated(output: BatchedDataDict) -> BatchedDataDict:
    engine_columns = {"output_ids", "unpadded_sequence_lengths", "generation_lengths", "logprobs"}
    others = {name: value for name, value in output.items() if name not in engine_columns}
    batch = {
        **others,
        "input_ids": output["output_ids"],
        "input_lengths": output["unpadded_sequence_lengths"],
        "token_mask": _completions(output),
    }
    if "logprobs" in output:
        batch["generation_logprobs"] = output["logprobs"][:, 1:]
    return BatchedDataDict(batch)


def _completions(output: BatchedDataDict) -> Tensor:
    """Returns `[B, T-1]`, whether the next token is part of the completion."""
    ends = output["unpadded_sequence_lengths"]
    starts = ends - output["generation_lengths"]
    position = torch.arange(1, output["output_ids"].shape[1])
    mask: Tensor = (position >= starts[:, None]) & (position < ends[:, None])
    return mask
