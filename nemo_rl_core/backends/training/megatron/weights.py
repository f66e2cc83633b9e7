"""Loading and export of transformers weights for this rank's Megatron chunks.

In addition to the model, loading and export need memory for at most one transformers tensor.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_core.backends.experimental.megatron_bridge import export_with_bridge, load_with_bridge
from nemo_rl_core.backends.training.megatron.mapping import Entry, Rule, entries, fuse, unfuse
from nemo_rl_core.backends.training.megatron.settings import has_transformer_engine
from nemo_rl_core.checkpoints.weights import refuse_wrong_weights, require_finite
from nemo_rl_core.errors import ModelError
from nemo_rl_core.model_files.loading import empty_model, name_in_errors
from nemo_rl_core.model_files.weights import check_folder, stored_slices

_MAX_DIMENSIONS = 4
_HEAD = "lm_head.weight"
_SOURCE = "the trainer's weight transfer"


@torch.no_grad()
def load_hf_weights(chunks: list[Any], folder: Path) -> None:
    """Fills this rank's parameters, in their dtype, with weights in transformers' layout."""
    if chunks[0].hf_family is None:
        load_with_bridge(chunks, folder)
        return
    expected = {name for entry in _entries(chunks) for name in entry.rule.hf}
    check_folder(empty_model(folder, "lm"), folder)
    local_entries = [entry for entry in _entries(chunks) if _is_local(entry)]
    with ExitStack() as files:
        stored = stored_slices(folder, files)
        refuse_wrong_weights(name_in_errors(folder), missing=expected - stored.keys())
        for entry in local_entries:
            _fill(chunks, entry, stored, name_in_errors(folder))
    _assert_filled(chunks, local_entries)


@torch.no_grad()
def take_hf_weights(chunks: list[Any], named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fills this rank's parameters with full tensors that arrive one by one, in any order.

    A tensor is kept until all tensors of its parameter, such as queries, keys and values, have
    arrived.
    """
    expected = {name for entry in _entries(chunks) for name in entry.rule.hf}
    local_entries = [entry for entry in _entries(chunks) if _is_local(entry)]
    due: dict[str, list[Entry]] = {}
    for entry in local_entries:
        for name in entry.rule.hf:
            due.setdefault(name, []).append(entry)
    names, waiting = set(), dict[str, torch.Tensor]()
    for name, tensor in named_tensors:
        names.add(name)
        waiting[name] = tensor
        for entry in list(due.get(name, ())):
            if waiting.keys() >= set(entry.rule.hf):
                _fill(chunks, entry, waiting, _SOURCE)
                for part in entry.rule.hf:
                    due[part].remove(entry)
        waiting = {part: kept for part, kept in waiting.items() if due.get(part)}
    # A tied head may be sent in addition to the embedding.
    surplus = names - expected - {_HEAD}
    refuse_wrong_weights(_SOURCE, missing=expected - names, surplus=surplus)
    _assert_filled(chunks, local_entries)


def _fill(chunks: list[Any], entry: Entry, tensors: Mapping[str, Any], source: str) -> None:
    group, rule = _tensor_group(entry), entry.rule
    parts = [_read(tensors[name], rule, group.rank(), group.size()) for name in rule.hf]
    require_finite(source, zip(rule.hf, parts, strict=True))
    parameter = chunks[entry.chunk].get_parameter(rule.megatron)
    weight = fuse(rule, parts, chunks[0].config)
    if weight.shape != parameter.shape:
        raise ModelError(
            f"{source} has a weight with the wrong shape",
            expected=f"{tuple(parameter.shape)} on this rank for {rule.megatron}",
            got=f"{tuple(weight.shape)} from {', '.join(rule.hf)}",
            fix="use a folder whose config matches its weights",
        )
    parameter.copy_(weight)


def _assert_filled(chunks: list[Any], entries: Iterable[Entry]) -> None:
    filled = {(entry.chunk, entry.rule.megatron) for entry in entries}
    parameters = {
        (index, name) for index, chunk in enumerate(chunks) for name, _ in chunk.named_parameters()
    }
    assert filled == parameters, f"not in the tables: {sorted(parameters ^ filled)}"


@torch.no_grad()
def iter_hf_weights(chunks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the full weights of the model under transformers' names, on every rank.

    A collective: every rank of the replica must iterate to the end. Weights are in the order of
    transformers' modules, tied weights once. A tensor may share memory with a parameter; copy it to
    keep it across an optimizer step.
    """
    if chunks[0].hf_family is None:
        yield from export_with_bridge(chunks)
        return
    config, hf_config = chunks[0].config, chunks[0].hf_config
    for entry in _entries(chunks):
        if not entry.exported:
            continue
        parts: list[torch.Tensor | None] = [None] * len(entry.rule.hf)
        if _is_local(entry):
            weight = chunks[entry.chunk].get_parameter(entry.rule.megatron).detach()
            parts = list(unfuse(entry.rule, weight, config))
        for name, part in zip(entry.rule.hf, parts, strict=True):
            tensor = _gathered(part, entry, config.params_dtype)
            yield name, tensor[: hf_config.vocab_size] if entry.rule.padded else tensor


def _entries(chunks: list[Any]) -> Iterator[Entry]:
    first = chunks[0]
    return entries(first.hf_family, first.hf_config, first.config, fused=has_transformer_engine())


def _is_local(entry: Entry) -> bool:
    from megatron.core import parallel_state

    if entry.stage != parallel_state.get_pipeline_model_parallel_rank():
        return False
    return entry.expert_rank in (None, parallel_state.get_expert_model_parallel_rank())


def _tensor_group(entry: Entry) -> dist.ProcessGroup:
    from megatron.core import parallel_state

    if entry.expert_rank is None:
        group = parallel_state.get_tensor_model_parallel_group()
    else:
        group = parallel_state.get_expert_tensor_parallel_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def _gathered(part: torch.Tensor | None, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
    """Gathers the full tensor on every rank from this rank's slice, None if it has none."""
    from megatron.core import parallel_state

    tensor = part
    group = _tensor_group(entry)
    if part is not None and entry.rule.split is not None and group.size() > 1:
        slices = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(slices, part, group=group)
        tensor = torch.cat(slices, dim=entry.rule.split)
    is_stage = parallel_state.get_pipeline_model_parallel_rank() == entry.stage
    if entry.expert_rank is not None and is_stage:
        experts = parallel_state.get_expert_model_parallel_group()
        tensor = _broadcast(tensor, entry.expert_rank, experts, dtype)
    stages = parallel_state.get_pipeline_model_parallel_group()
    return _broadcast(tensor, entry.stage, stages, dtype)


def _broadcast(
    tensor: torch.Tensor | None, source: int, group: dist.ProcessGroup, dtype: torch.dtype
) -> torch.Tensor:
    if group.size() == 1:
        assert tensor is not None
        return tensor
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    header = torch.zeros(_MAX_DIMENSIONS, dtype=torch.int64, device=device)
    if tensor is not None:
        header[: tensor.dim()] = torch.tensor(tensor.shape)
    dist.broadcast(header, group=group, group_src=source)
    if tensor is None:
        shape = [size for size in header.tolist() if size]
        tensor = torch.empty(shape, dtype=dtype, device=device)
    dist.broadcast(tensor, group=group, group_src=source)
    return tensor


def _read(tensor: Any, rule: Rule, rank: int, num_ranks: int) -> torch.Tensor:
    """Reads the part of a full tensor, or of a safetensors slice, for a tensor-parallel rank."""
    if rule.split is None:
        full: torch.Tensor = tensor[:]
        return full
    shape = tensor.shape if isinstance(tensor, torch.Tensor) else tensor.get_shape()
    size = shape[rule.split]
    share = -(-size // num_ranks) if rule.padded else size // num_ranks
    start, end = (min(index * share, size) for index in (rank, rank + 1))
    part: torch.Tensor = tensor[:, start:end] if rule.split == 1 else tensor[start:end]
    num_missing = share - part.shape[rule.split]
    if rule.split == 1 or not num_missing:
        return part
    return torch.cat([part, part.new_zeros(num_missing, *part.shape[1:])])
