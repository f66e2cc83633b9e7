"""Checkpoints of the Megatron backend: `model/` for everyone, `trainer/` to go on from.

`trainer/` is Megatron's own distributed format: each rank writes its shards, under names that do
not depend on the layout, so that another layout can read them. Nothing random is kept: the models
have no dropout, and draw nothing.

Of the files that a load reads, two are pickles: `.metadata` and `common.pt`. The first is read once
here with a list of the only things that it may name, before Megatron reads it; the second Megatron
itself reads with torch's restricted unpickler. Objects inside the tensor files would be unpickled
without restriction, so none are written, and none are asked for.
"""

import pickle
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject

from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.errors import StoreError
from nemo_rl_core.infra.state_file import read_num_updates, write_state
from nemo_rl_core.infra.tensors import save_weights

# The distributed optimizer's state by parameter, not by buffer, as no layout of ranks decides.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": False,
}


def save_trainer(folder: Path, chunks: list[Any], optimizer: Any, num_updates: int) -> None:
    """Writes weights and optimizer, each rank its shards, into a folder that is made.

    Args:
        folder: Seen by all ranks.
        chunks: This rank's wrapped chunks.
        optimizer: Megatron's.
        num_updates: Optimizer steps so far, off which the warm-up goes on.
    """
    _make_on_rank_0(folder)
    dist_checkpointing.save(_sharded_state(chunks, optimizer, is_loading=False), str(folder))
    if dist.get_rank() == 0:
        write_state(folder, backend="megatron", num_updates=num_updates)
    dist.barrier()


def load_trainer(folder: Path, chunks: list[Any], optimizer: Any) -> int:
    """Reads what `save_trainer` wrote, over any layout, to the bit.

    Returns:
        Optimizer steps so far.

    Raises:
        StoreError: If a file is missing, names something that a checkpoint need not name, or is
            that of another model.
    """
    try:
        _refuse_foreign_code(folder / ".metadata")
        num_updates = read_num_updates(folder, backend="megatron")
        _allocate_state(optimizer)
        wanted = _sharded_state(chunks, optimizer, is_loading=True)
        loaded = dist_checkpointing.load(wanted, str(folder))
    except (
        OSError,
        KeyError,
        ValueError,
        EOFError,
        pickle.UnpicklingError,
        CheckpointingException,
    ) as error:
        raise _unreadable(folder, error) from error
    for index, chunk in enumerate(chunks):
        chunk.module.load_state_dict(loaded[f"model{index}"], strict=True)
    for part in optimizer.chained_optimizers:
        _keep_steps(part)
    optimizer.load_state_dict(loaded["optimizer"])
    for part in optimizer.chained_optimizers:
        _part_steps(part)
    return num_updates


def save_model(folder: Path, weights: Iterator[tuple[str, torch.Tensor]], source: Path) -> None:
    """Writes the transformers folder, a shard at a time.

    Args:
        folder: Seen by all ranks, and made.
        weights: Of all ranks together; every rank iterates.
        source: The folder that the model was built from, for config and tokenizer.
    """
    _make_on_rank_0(folder)
    if dist.get_rank() > 0:
        deque(weights, maxlen=0)
    else:
        from transformers import AutoConfig

        save_weights(folder, weights)
        AutoConfig.from_pretrained(source).save_pretrained(folder)
        load_tokenizer(source).save_pretrained(folder)
    dist.barrier()


def _make_on_rank_0(folder: Path) -> None:
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()


def _sharded_state(chunks: list[Any], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        f"model{index}": chunk.module.sharded_state_dict(metadata=dict(_METADATA))
        for index, chunk in enumerate(chunks)
    }
    for name in list(state):
        state[name] = {
            key: value for key, value in state[name].items() if not isinstance(value, ShardedObject)
        }
    # The optimizer reads off the model's shards how its own lie in the whole.
    state["optimizer"] = optimizer.sharded_state_dict(
        state, is_loading=is_loading, metadata=dict(_METADATA)
    )
    return state


def _allocate_state(optimizer: Any) -> None:
    """Makes the state that AdamW would make in its first step, for the loaded one to go into."""
    for part in optimizer.chained_optimizers:
        inner = part.optimizer
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            if not inner.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                inner.state[parameter] = {"step": torch.tensor(0.0), **moments}


def _keep_steps(part: Any) -> None:
    """Mends Megatron's loading into torch's AdamW, which counts steps by parameter.

    Megatron has set the counts by then, leaves them out of what it copies, and then misses them.
    """
    copy_states = type(part)._set_main_param_and_optimizer_states

    def copy_with_step(model_parameter: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, place = part.model_param_group_index_map[model_parameter]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][place]]
        count = {"step": state["step"]} if "step" in state else {}
        copy_states(part, model_parameter, count | tensors)

    part._set_main_param_and_optimizer_states = copy_with_step


def _part_steps(part: Any) -> None:
    """Gives each parameter a count of its own: Megatron loads one tensor for all of them.

    AdamW would count it up once for every parameter.
    """
    for state in part.optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].clone()


class _MetadataUnpickler(pickle.Unpickler):
    """Reads torch's description of shards, and nothing that names other things."""

    _ALLOWED = frozenset(
        {
            ("torch", "Size"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "Metadata"),
            ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
            ("torch.distributed.checkpoint.metadata", "StorageMeta"),
            ("torch.distributed.checkpoint.metadata", "TensorProperties"),
            ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
            ("torch.distributed.checkpoint.planner", "SavePlan"),
            ("torch.distributed.checkpoint.planner", "TensorWriteData"),
            ("torch.distributed.checkpoint.planner", "WriteItem"),
            ("torch.distributed.checkpoint.planner", "WriteItemType"),
            ("torch.serialization", "_get_layout"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        is_type_of_tensor = module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype
        )
        if not is_type_of_tensor and (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def _refuse_foreign_code(path: Path) -> None:
    with path.open("rb") as file:
        _MetadataUnpickler(file).load()


def _unreadable(folder: Path, error: Exception) -> StoreError:
    return StoreError(
        f"cannot go on from {folder}",
        expected="the trainer folder of a megatron checkpoint of the same model",
        got=f"{type(error).__name__}: {error}",
        fix="resume from an older checkpoint, with the model config that it was made with",
    )
