"""Micro-batches of a step, equal in number and, if needed, shape on all data-parallel ranks."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from nemo_rl_core.backends.training.megatron.rows import MegatronRows, megatron_rows
from nemo_rl_core.backends.training.padded import cropped, target_positions
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.packing.plan import Microbatch, agreed_plan, pack
from nemo_rl_core.distributed.packing.prefixes import PrefixSharing
from nemo_rl_core.distributed.packing.ranks import plan_shard


@dataclass(frozen=True)
class MegatronMicrobatch:
    """One micro-batch.

    Attributes:
        batch: Rows of the micro-batch, in packing order; a filler has an unused row.
        indices: Indices of the rows in the full batch; empty for a filler.
    """

    batch: BatchedDataDict
    indices: tuple[int, ...]
    rows: MegatronRows


def make_parts(
    batch: BatchedDataDict,
    config: Any,
    *,
    max_tokens: int,
    device: torch.device,
    sharing: PrefixSharing | None = None,
) -> list[MegatronMicrobatch]:
    """Splits this rank's rows into micro-batches, and adds fillers without weight.

    Ranks that share experts wait for one another in every micro-batch, so all data-parallel ranks
    need the same number.
    """
    plan, needed = agreed_plan(
        lambda: _plan(batch, max_tokens, sharing),
        lambda count: _maximum_over_data_ranks([count], device)[0],
    )
    stages = config.pipeline_model_parallel_size
    if config.virtual_pipeline_model_parallel_size:
        # The interleaved schedule needs a multiple of the stages.
        needed = -(-needed // stages) * stages
    shapes = _shapes(plan + [_FILLER] * (needed - len(plan)), config, device)
    return [
        _part(batch, plan[index], *shape, device) if index < len(plan) else _filler(*shape, device)
        for index, shape in enumerate(shapes)
    ]


_FILLER = Microbatch(rows=((0,),), row_length=2)


def _plan(
    batch: BatchedDataDict, max_tokens: int, sharing: PrefixSharing | None
) -> list[Microbatch]:
    plan: list[Microbatch] | None = getattr(batch, "microbatches", None)
    if plan is not None and (sharing is not None or not any(part.shared for part in plan)):
        return plan
    if batch.size == 0:
        return []
    return plan_shard(batch, max_tokens=max_tokens, sharing=sharing)


def _shapes(plan: list[Microbatch], config: Any, device: torch.device) -> list[tuple[int, int]]:
    """Returns the number of rows and the row length of each micro-batch.

    Row lengths are divisible by the ranks of context and sequence parallelism. The dispatcher that
    gathers the tokens of expert ranks needs the same shape on all of them.
    """
    parallel = config.sequence_parallel
    multiple = config.context_parallel_size
    multiple *= config.tensor_model_parallel_size if parallel else 1
    shapes = [(len(part.rows), -(-part.row_length // multiple) * multiple) for part in plan]
    if config.expert_model_parallel_size == 1:
        return shapes
    flat = _maximum_over_data_ranks([size for shape in shapes for size in shape], device)
    return list(zip(flat[::2], flat[1::2], strict=True))


def _maximum_over_data_ranks(counts: list[int], device: torch.device) -> list[int]:
    largest = torch.tensor(counts, device=device)
    group = parallel_state.get_data_parallel_group()
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
    return [int(count) for count in largest.tolist()]


def _part(
    batch: BatchedDataDict,
    microbatch: Microbatch,
    num_rows: int,
    row_length: int,
    device: torch.device,
) -> MegatronMicrobatch:
    # Done on the host: reading lengths and masks from a GPU would wait for it.
    chosen = batch.select_indices(microbatch.indices)
    chosen = cropped(chosen, int(chosen["input_lengths"].max()))
    empty_rows = ((),) * (num_rows - len(microbatch.rows))
    layout = Microbatch((*microbatch.rows, *empty_rows), row_length, microbatch.shared)
    packed = pack(chosen["input_ids"], chosen["input_lengths"], layout)
    # Fillers, and batches that are only run through the model, have no mask.
    selected = (
        target_positions(chosen)
        if "token_mask" in chosen
        else torch.zeros(len(chosen["input_ids"]), 0, dtype=torch.bool)
    )
    moved, rows = megatron_rows(packed, selected).moved_with(chosen, device)
    return MegatronMicrobatch(moved, tuple(microbatch.indices), rows)


def _filler(num_rows: int, row_length: int, device: torch.device) -> MegatronMicrobatch:
    row = BatchedDataDict(
        {
            "input_ids": torch.zeros(1, 2, dtype=torch.long),
            "input_lengths": torch.full((1,), 2),
        }
    )
    return MegatronMicrobatch(row, (), _part(row, _FILLER, num_rows, row_length, device).rows)
