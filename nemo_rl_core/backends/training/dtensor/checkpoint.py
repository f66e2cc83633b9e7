"""The trainer's state on disk: each rank writes its shards, and any layout of ranks reads them.

torch's distributed checkpoint writes safetensors, since its default storage pickles the metadata.
Adapters are part of the state, and so is the model if it is not saved in the transformers layout.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.distributed_c10d import default_pg_timeout

from nemo_rl_core.checkpoints.state_file import STATE_FILE, STATE_NAME, read_state, write_state
from nemo_rl_core.checkpoints.tensors import order_metadata
from nemo_rl_core.checkpoints.weights import require_finite
from nemo_rl_core.checkpoints.written_files import WrittenFile, describe_written
from nemo_rl_core.distributed.process_group import collective_timeout, rank
from nemo_rl_core.errors import StoreError
from nemo_rl_core.model_files.weights import local
from nemo_rl_core.store.files import list_files

_OPTIMIZER, _WEIGHTS, _MODEL, _RANDOM = "optimizer.", "weights.", "model.", "random."
_BLOCK_STATE = ("absmax1", "absmax2", "qmap1", "qmap2")
"""State that bitsandbytes keeps per block of moments and for their 8-bit codes."""


class TrainerState:
    """Optimizer, random state, number of updates and, as `weights`, adapters of one rank.

    Every rank creates one and calls its methods together with the others; only one save runs at a
    time.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trained: Mapping[str, torch.Tensor],
        *,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._optimizer, self._trained, self._weights = optimizer, trained, weights or {}
        self._written: Future[dict[str, WrittenFile]] | None = None
        has_peers = dist.is_initialized() and dist.get_world_size() > 1
        self._group = _writer_group(dist.group.WORLD) if has_peers else None

    def start_saving(
        self,
        folder: Path,
        *,
        num_updates: int,
        model: Mapping[str, torch.Tensor] | None = None,
        other_files: Sequence[str] = (),
    ) -> None:
        """Copies the state, and writes the copy in the background into an existing folder.

        Call `finish_saving` before using the folder. `other_files`, relative to it, are files that
        this rank has written already; they are hashed with its shards.
        """
        self.finish_saving()
        tensors = {_OPTIMIZER + name: tensor for name, tensor in self._moments().items()}
        tensors |= {_WEIGHTS + name: tensor.detach() for name, tensor in self._weights.items()}
        tensors |= {_MODEL + name: tensor.detach() for name, tensor in (model or {}).items()}
        tensors |= _random_state()
        if rank() == 0:
            numbers = self._numbers()
            write_state(folder, backend="dtensor", num_updates=num_updates, numbers=numbers)
        response = async_save(
            # A loaded optimizer has its parameters in a different order. They are sorted, so that
            # equal states give equal files.
            dict(sorted(tensors.items())),
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            # Copies tensors on the CPU too, before this call returns.
            async_stager=DefaultStager(StagingOptions(False, False, False, False)),
            process_group=self._group,
            no_dist=self._group is None,
        )
        assert isinstance(response, Future)
        executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written = executor.submit(_complete, folder, response, other_files)
        executor.shutdown(wait=False)
        self._folder = folder

    def is_saved(self) -> bool:
        """Returns True if this rank has finished writing or failed."""
        return self._written is None or self._written.done()

    def finish_saving(self) -> dict[str, WrittenFile]:
        """Waits for the background save, if any; returns this rank's files by relative path."""
        written, self._written = self._written, None
        if written is None:
            return {}
        try:
            return written.result()
        except (Exception, CheckpointException) as error:  # the latter is not an Exception
            raise StoreError(
                f"the trainer's state could not be written to {self._folder}",
                got=_cause(error),
                fix="free some space, or point NEMO_RL_HOME at another disk",
            ) from error

    def load(self, folder: Path, *, model: Mapping[str, torch.Tensor] | None = None) -> int:
        """Restores a save of `start_saving` bit-identically, at any number of ranks.

        Settings of parameter groups (learning rate, betas) come from the config and the schedule.
        Returns the number of updates. If it raises, the state is unchanged, except that damaged
        files may have changed weights.
        """
        try:
            state = read_state(folder, backend="dtensor")
            reader = HuggingFaceStorageReader(str(folder))
            saved = reader.read_metadata().state_dict_metadata
            num_updates, numbers = int(state["num_updates"]), state["numbers"]
        except StoreError:
            raise
        except Exception as error:
            raise _unreadable(folder, error) from error
        moments = self._empty_moments(saved)
        weights = _targets(_WEIGHTS, self._weights, saved) | _targets(_MODEL, model or {}, saved)
        random = {name: value for name, value in _random_state().items() if name in saved}
        state_dict = _flat(moments) | weights | random
        try:
            load(
                state_dict,
                storage_reader=reader,
                process_group=self._group,
                no_dist=not self._group,
            )
        except (Exception, CheckpointException) as error:
            raise _unreadable(folder, error) from error
        require_finite(f"the checkpoint {folder}", ((n, local(w)) for n, w in weights.items()))
        self._optimizer.state.clear()
        for name, values in moments.items():
            self._optimizer.state[self._trained[name]] = values | numbers.get(name, {})
        _restore_random(random)
        return num_updates

    def _moments(self) -> dict[str, torch.Tensor]:
        name_of = {parameter: name for name, parameter in self._trained.items()}
        return {
            f"{name_of[parameter]}.{key}": value
            for parameter, values in self._optimizer.state.items()
            for key, value in values.items()
            if isinstance(value, torch.Tensor)
        }

    def _numbers(self) -> dict[str, dict[str, int]]:
        """Returns integer state by parameter: bitsandbytes counts its steps in plain integers."""
        numbers = {}
        for name, parameter in self._trained.items():
            state = self._optimizer.state.get(parameter, {})
            if integers := {key: value for key, value in state.items() if isinstance(value, int)}:
                numbers[name] = integers
        return numbers

    def _empty_moments(self, saved: Mapping[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
        groups = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        moments: dict[str, dict[str, torch.Tensor]] = {}
        for full_name, entry in saved.items():
            if not full_name.startswith(_OPTIMIZER):
                continue
            name, _, key = full_name.removeprefix(_OPTIMIZER).rpartition(".")
            parameter = self._trained.get(name)
            if parameter is None or parameter not in groups:
                raise _mismatch(f"{name}.{key}, but no such parameter is trained")
            group = groups[parameter]
            if key == "step":
                # On the device that a fused or capturable optimizer expects.
                on_device = group.get("fused") or group.get("capturable")
                device = parameter.device if on_device else torch.device("cpu")
                value = torch.zeros((), dtype=entry.properties.dtype, device=device)
            elif key in _BLOCK_STATE:
                dtype = entry.properties.dtype
                value = torch.zeros(entry.size, dtype=dtype, device=parameter.device)
            elif entry.size == parameter.shape:
                value = torch.zeros_like(parameter.detach(), dtype=entry.properties.dtype)
            else:
                shapes = f"{tuple(entry.size)}, but the parameter has {tuple(parameter.shape)}"
                raise _mismatch(f"{name}.{key} has shape {shapes}")
            moments.setdefault(name, {})[key] = value
        return moments


def _complete(
    folder: Path, response: "Future[Any]", other_files: Sequence[str]
) -> dict[str, WrittenFile]:
    response.result()
    shards = list(folder.glob(f"shard-{rank() + 1:05d}-*.safetensors"))
    for file in shards:
        order_metadata(file)
    state = [STATE_NAME] if rank() == 0 else []
    return describe_written(folder, [*(file.name for file in shards), *state, *other_files])


def written_by_rank_0(checkpoint: Path) -> list[str]:
    """Returns files of a checkpoint other than shards, relative to `trainer/`; only on rank 0."""
    if rank() != 0:
        return []
    names = [name for name in list_files(checkpoint) if "/shard-" not in name]
    return [f"../{name}" for name in names if name != STATE_FILE]


def _targets(
    prefix: str, weights: Mapping[str, torch.Tensor], saved: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    saved_shapes = {
        name.removeprefix(prefix): tuple(entry.size)
        for name, entry in saved.items()
        if name.startswith(prefix)
    }
    if shapes != saved_shapes:
        differing = sorted(name for name, _ in shapes.items() ^ saved_shapes.items())
        raise _mismatch(f"other weights, such as {differing[0]}")
    return {prefix + name: tensor.detach() for name, tensor in weights.items()}


def _flat(moments: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        f"{_OPTIMIZER}{name}.{key}": value
        for name, values in moments.items()
        for key, value in values.items()
    }


def _cause(error: BaseException) -> str:
    """Returns the last line of an error; a `CheckpointException` has traces of all ranks before."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]}"[:500]


@cache
def _writer_group(_: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a separate process group, shared by all setups of this process.

    The writing thread plans shards with other ranks while the main thread trains. Planning always
    uses the CPU. Ranks that have written wait in this group for the slowest disk.
    """
    group = dist.new_group(backend="gloo", timeout=max(collective_timeout(), default_pg_timeout))
    assert isinstance(group, dist.ProcessGroup)
    return group


def _random_state() -> dict[str, torch.Tensor]:
    """Returns this rank's generator states. Ranks without one in a checkpoint keep their seeds."""
    states = {f"{_RANDOM}{rank()}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{_RANDOM}{rank()}.cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random(states: Mapping[str, torch.Tensor]) -> None:
    for name, state in states.items():
        if name.endswith(".cuda"):
            torch.cuda.set_rng_state(state)
        else:
            torch.set_rng_state(state)


def _unreadable(folder: Path, error: BaseException) -> StoreError:
    return StoreError(
        f"cannot read the trainer's state from {folder}",
        expected="state.json and the safetensors files of every rank",
        got=f"{type(error).__name__}: {error}"[:500],
        fix="remove its folder, and run the stage again",
    )


def _mismatch(got: str) -> StoreError:
    return StoreError(
        "the saved optimizer state does not fit this model",
        expected="the state of the same parameters",
        got=got,
        fix="resume with the model config of the checkpoint",
    )
