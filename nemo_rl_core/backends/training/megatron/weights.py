"""Loading and export of transformers weights for this rank's Megatron chunks.

Loading reads only this rank's slices from the safetensors files. Export gathers one tensor at a
time over tensor, expert and pipeline ranks. Neither has more than one transformers tensor in memory
beside the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_core.backends.training.dtensor.loading import called, empty_model
from nemo_rl_core.backends.training.dtensor.matching import check_folder
from nemo_rl_core.backends.training.megatron.bridge import export_with_bridge, load_with_bridge
from nemo_rl_core.backends.training.megatron.mapping import Entry, Rule, entries, fuse, unfuse
from nemo_rl_core.backends.training.megatron.settings import has_transformer_engine
from nemo_rl_core.checkpoints.weight_files import open_weights, weight_files
from nemo_rl_core.checkpoints.weights import refuse_wrong_weights, require_finite
from nemo_rl_core.errors import ModelError

_MAX_DIMENSIONS = 4
_HEAD = "lm_head.weight"


@torch.no_grad()
def load_hf_weights(chunks: list[Any], folder: Path) -> None:
    """Fills this rank's parameters, in their own dtype, with weights in transformers' layout.

    Args:
        chunks: This rank's chunks, as `build_model` returns them.
        folder: With `model.safetensors`, or with several and their index.

    Raises:
        ModelError: If the folder lacks a weight, or has one that is surplus, of another shape or,
            in this rank's slices, not finite.
    """
    if chunks[0].hf_family is None:
        load_with_bridge(chunks, folder)
        return
    tensors = _Safetensors(folder)
    expected = {name for entry in _entries(chunks) for name in entry.rule.hf}
    check_folder(empty_model(folder, "lm"), folder)
    refuse_wrong_weights(tensors.called, missing=expected - tensors.names)
    held_here = [entry for entry in _entries(chunks) if _held_here(entry)]
    for entry in held_here:
        _fill(chunks, entry, tensors)
    _assert_filled(chunks, held_here)


@torch.no_grad()
def take_hf_weights(chunks: list[Any], named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """As `load_hf_weights`, with whole tensors that are read one by one, in any order.

    A tensor is kept until the others of its parameter have arrived, such as queries, keys and
    values.

    Args:
        chunks: This rank's chunks.
        named_tensors: Of the trainer.

    Raises:
        ModelError: As `load_hf_weights`; some parameters have been filled by then.
    """
    expected = {name for entry in _entries(chunks) for name in entry.rule.hf}
    held_here = [entry for entry in _entries(chunks) if _held_here(entry)]
    due: dict[str, list[Entry]] = {}
    for entry in held_here:
        for name in entry.rule.hf:
            due.setdefault(name, []).append(entry)
    names, waiting = set(), dict[str, torch.Tensor]()
    for name, tensor in named_tensors:
        names.add(name)
        waiting[name] = tensor
        for entry in list(due.get(name, ())):
            if waiting.keys() >= set(entry.rule.hf):
                _fill(chunks, entry, _Tensors(waiting))
                for each in entry.rule.hf:
                    due[each].remove(entry)
        waiting = {each: kept for each, kept in waiting.items() if due.get(each)}
    # A tied head may be listed beside the embedding.
    surplus = names - expected - {_HEAD}
    refuse_wrong_weights(_Tensors.called, missing=expected - names, surplus=surplus)
    _assert_filled(chunks, held_here)


def _fill(chunks: list[Any], entry: Entry, tensors: "_Slices") -> None:
    group, rule = _tensor_group(entry), entry.rule
    parts = [tensors.read(name, rule, group.rank(), group.size()) for name in rule.hf]
    require_finite(tensors.called, zip(rule.hf, parts, strict=True))
    parameter = chunks[entry.chunk].get_parameter(rule.megatron)
    weight = fuse(rule, parts, chunks[0].config)
    if weight.shape != parameter.shape:
        raise ModelError(
            f"{tensors.called} has a weight of another shape than the model's",
            expected=f"{tuple(parameter.shape)} on this rank for {rule.megatron}",
            got=f"{tuple(weight.shape)} from {', '.join(rule.hf)}",
            fix="name a folder whose config belongs to its weights",
        )
    parameter.copy_(weight)


def _assert_filled(chunks: list[Any], entries: Iterable[Entry]) -> None:
    filled = {(entry.chunk, entry.rule.megatron) for entry in entries}
    held = {
        (index, name) for index, chunk in enumerate(chunks) for name, _ in chunk.named_parameters()
    }
    assert filled == held, f"not in the tables: {sorted(held ^ filled)}"


@torch.no_grad()
def iter_hf_weights(chunks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all weights of the model whole, under transformers' names, on every rank.

    A collective: every rank of the replica must iterate to the end. In the order of transformers'
    modules; tied weights come once. A tensor may share memory with a parameter: copy it to keep it
    over an optimizer step.

    Args:
        chunks: This rank's chunks, as `build_model` returns them.
    """
    if chunks[0].hf_family is None:
        yield from export_with_bridge(chunks)
        return
    config, hf_config = chunks[0].config, chunks[0].hf_config
    for entry in _entries(chunks):
        if not entry.exported:
            continue
        parts: list[torch.Tensor | None] = [None] * len(entry.rule.hf)
        if _held_here(entry):
            weight = chunks[entry.chunk].get_parameter(entry.rule.megatron).detach()
            parts = list(unfuse(entry.rule, weight, config))
        for name, part in zip(entry.rule.hf, parts, strict=True):
            whole = _whole(part, entry, config.params_dtype)
            yield name, whole[: hf_config.vocab_size] if entry.rule.padded else whole


def _entries(chunks: list[Any]) -> Iterator[Entry]:
    first = chunks[0]
    return entries(first.hf_family, first.hf_config, first.config, fused=has_transformer_engine())


def _held_here(entry: Entry) -> bool:
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


def _whole(part: torch.Tensor | None, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
    """Gathers the whole tensor on every rank from this rank's slice, or None if it holds none."""
    from megatron.core import parallel_state

    whole = part
    group = _tensor_group(entry)
    if part is not None and entry.rule.split is not None and group.size() > 1:
        slices = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(slices, part, group=group)
        whole = torch.cat(slices, dim=entry.rule.split)
    here = parallel_state.get_pipeline_model_parallel_rank() == entry.stage
    if entry.expert_rank is not None and here:
        experts = parallel_state.get_expert_model_parallel_group()
        whole = _broadcast(whole, entry.expert_rank, experts, dtype)
    return _broadcast(whole, entry.stage, parallel_state.get_pipeline_model_parallel_group(), dtype)


def _broadcast(
    tensor: torch.Tensor | None, source: int, group: dist.ProcessGroup, dtype: torch.dtype
) -> torch.Tensor:
    """Broadcasts `tensor` from the rank `source` of the group."""
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


class _Slices(ABC):
    """Whole tensors of which a rank reads its slices."""

    called: str
    """Name of the tensors' source in error messages."""
    names: Set[str]

    def read(self, name: str, rule: Rule, rank: int, num_ranks: int) -> torch.Tensor:
        """Reads the slice of a tensor for one of `num_ranks` tensor-parallel ranks."""
        tensor, shape = self._whole(name)
        if rule.split is None:
            return _tensor(tensor[:])
        size = shape[rule.split]
        share = -(-size // num_ranks) if rule.padded else size // num_ranks
        start, end = (min(index * share, size) for index in (rank, rank + 1))
        if rule.split == 1:
            return _tensor(tensor[:, start:end])
        rows = _tensor(tensor[start:end])
        if rows.shape[0] == share:
            return rows
        return torch.cat([rows, rows.new_zeros(share - rows.shape[0], *rows.shape[1:])])

    @abstractmethod
    def _whole(self, name: str) -> tuple[Any, Sequence[int]]:
        """Returns an object that slices the tensor, and the tensor's shape."""


class _Tensors(_Slices):
    """Tensors in memory."""

    called = "the trainer's weight transfer"

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors, self.names = tensors, tensors.keys()

    def _whole(self, name: str) -> tuple[Any, Sequence[int]]:
        return self._tensors[name], self._tensors[name].shape


class _Safetensors(_Slices):
    """The tensors of a folder."""

    def __init__(self, folder: Path) -> None:
        self.called = called(folder)
        files = [open_weights(path) for path in weight_files(folder)]
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        self.names = self._files.keys()

    def _whole(self, name: str) -> tuple[Any, Sequence[int]]:
        found = self._files[name].get_slice(name)
        return found, found.get_shape()


def _tensor(value: Any) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value
