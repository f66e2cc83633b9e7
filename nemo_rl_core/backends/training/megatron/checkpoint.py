"""Checkpoints of the Megatron backend: `model/` in transformers' layout, `trainer/` to resume.

`trainer/` has Megatron's distributed format, which any layout can read. There is no random state,
since the models have no dropout.

Two of the files that a load reads are pickles: `.metadata` and `common.pt`. The first is checked
against a list of allowed names before Megatron reads it; Megatron reads the second with torch's
restricted unpickler. Objects inside the tensor files would be unpickled without restriction, so
none are written or read.
"""

import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject

from nemo_rl_core.backends.training.megatron.mapping import EMBEDDING
from nemo_rl_core.backends.training.megatron.writing import PendingWrite, on_rank_0
from nemo_rl_core.checkpoints.dcp_metadata import read_metadata
from nemo_rl_core.checkpoints.state_file import read_state, write_state
from nemo_rl_core.checkpoints.tensors import save_weights
from nemo_rl_core.checkpoints.weights import require_finite
from nemo_rl_core.config.model import DType
from nemo_rl_core.data.pretrained import copy_description
from nemo_rl_core.distributed.gathered_writes import write_on_rank_0
from nemo_rl_core.errors import StoreError

_EXTRA = "._extra_state"
# Stores the distributed optimizer's state per parameter; buffers depend on the layout.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": False,
}

_FROM_CONFIG = ("betas", "eps", "weight_decay")
"""Settings of parameter groups that a load does not change."""

_UNREADABLE = (
    OSError,
    KeyError,
    ValueError,
    EOFError,
    pickle.UnpicklingError,
    CheckpointingException,
)


def start_saving_trainer(
    folder: Path, chunks: list[Any], optimizer: Any, num_updates: int
) -> PendingWrite:
    """Starts to write this rank's shards of weights and optimizer state into a new folder."""

    def begin() -> None:
        folder.mkdir(parents=True)
        write_state(folder, backend="megatron", num_updates=num_updates)

    on_rank_0(begin)
    _allocate_state(optimizer)  # not allocated before the first step
    return PendingWrite(folder, _sharded_state(chunks, optimizer, is_loading=False))


def load_trainer(folder: Path, chunks: list[Any], optimizer: Any) -> int:
    """Restores a save of `start_saving_trainer` bit-identically; returns its number of steps."""
    try:
        read_metadata(folder)
        num_updates = int(read_state(folder, backend="megatron")["num_updates"])
        _allocate_state(optimizer)
        settings = [
            {name: group[name] for name in _FROM_CONFIG} for group in optimizer.param_groups
        ]
        targets = _sharded_state(chunks, optimizer, is_loading=True)
        loaded = dist_checkpointing.load(targets, str(folder))
    except _UNREADABLE as error:
        raise _unreadable(folder, error) from error
    for index, chunk in enumerate(chunks):
        _take_weights(chunk.module, loaded[f"model{index}"], folder)
    for part in optimizer.chained_optimizers:
        _keep_steps(part)
    optimizer.load_state_dict(loaded["optimizer"])
    for part in optimizer.chained_optimizers:
        _separate_steps(part)
    for group, configured in zip(optimizer.param_groups, settings, strict=True):
        group.update(configured)
    return num_updates


def save_native_weights(folder: Path, models: list[Any]) -> None:
    """Writes only the weights in the trainer's layout; training cannot resume from them."""
    on_rank_0(lambda: folder.mkdir(parents=True))
    PendingWrite(folder, _sharded_weights(models)).finish()


def load_native_weights(folder: Path, models: list[Any]) -> None:
    """Fills the chunks with the weights of a `trainer` folder of any layout."""
    try:
        read_metadata(folder)
        loaded = dist_checkpointing.load(_sharded_weights(models), str(folder))
    except _UNREADABLE as error:
        raise _unreadable(folder, error) from error
    for index, model in enumerate(models):
        _take_weights(model, loaded[f"model{index}"], folder)


def _take_weights(model: Any, weights: dict[str, Any], folder: Path) -> None:
    tensors = ((name, each) for name, each in weights.items() if isinstance(each, torch.Tensor))
    require_finite(f"the checkpoint {folder}", tensors)
    # FP8 state of Transformer Engine's layers; it is empty, and not saved, since Megatron would
    # pickle it.
    extra = {name: each for name, each in model.state_dict().items() if name.endswith(_EXTRA)}
    model.load_state_dict({**extra, **weights}, strict=True)


def dtype_of(folder: Path) -> str:
    """Returns the dtype of the weights in a `trainer` folder, such as `float32`."""
    try:
        described = read_metadata(folder).state_dict_metadata[EMBEDDING.megatron]
    except _UNREADABLE as error:
        raise _unreadable(folder, error) from error
    return str(described.properties.dtype).removeprefix("torch.")


def save_model(
    folder: Path, weights: Iterator[tuple[str, torch.Tensor]], source: Path, *, dtype: DType
) -> None:
    """Writes the transformers folder, one shard at a time."""
    on_rank_0(lambda: folder.mkdir(parents=True))

    def write(gathered: Iterable[tuple[str, torch.Tensor]]) -> None:
        save_weights(folder, gathered)
        copy_description(source, folder, dtype=dtype)

    write_on_rank_0(weights, write)


def _sharded_state(chunks: list[Any], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    state = _sharded_weights([chunk.module for chunk in chunks])
    # The optimizer derives the layout of its shards from the model's.
    state["optimizer"] = optimizer.sharded_state_dict(
        state, is_loading=is_loading, metadata=dict(_METADATA)
    )
    return state


def _sharded_weights(models: list[Any]) -> dict[str, Any]:
    """Returns this rank's shards by chunk, without the objects that Megatron would pickle."""
    state: dict[str, Any] = {}
    for index, model in enumerate(models):
        shards = model.sharded_state_dict(metadata=dict(_METADATA))
        state[f"model{index}"] = {
            key: value for key, value in shards.items() if not isinstance(value, ShardedObject)
        }
    return state


def _allocate_state(optimizer: Any) -> None:
    """Allocates the state that AdamW would create in its first step."""
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            if not inner.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                # Transformer Engine's AdamW counts steps in its groups, not for each parameter.
                count = {"step": torch.tensor(0.0)} if isinstance(inner, torch.optim.AdamW) else {}
                inner.state[parameter] = {**count, **moments}


def _keep_steps(part: Any) -> None:
    """Fixes Megatron's loading into torch's AdamW, which counts steps per parameter.

    Megatron sets the counts earlier, but does not copy them, and then raises for missing keys.
    """
    copy_states = type(part)._set_main_param_and_optimizer_states

    def copy_with_step(model_parameter: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, index = part.model_param_group_index_map[model_parameter]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][index]]
        count = {"step": state["step"]} if "step" in state else {}
        copy_states(part, model_parameter, count | tensors)

    part._set_main_param_and_optimizer_states = copy_with_step


def _separate_steps(part: Any) -> None:
    """Gives each parameter a separate step count.

    Megatron loads one tensor for all of them, which AdamW would increment once per parameter.
    """
    for state in part.optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].clone()


def _unreadable(folder: Path, error: Exception) -> StoreError:
    return StoreError(
        f"cannot resume from {folder}",
        expected="the trainer folder of a megatron checkpoint of the same model",
        got=f"{type(error).__name__}: {error}",
        fix="resume from an older checkpoint, with its model config",
    )
