"""The trainer's state on disk: each rank writes its shards, and any layout of ranks reads them.

torch's distributed checkpoint does the planning; its safetensors storage is used, because the
default one keeps its metadata as a pickle. Adapters are part of the state. The model is one where
it is not saved in the transformers layout as well (`checkpoints.tensors.save_weights`).
"""

import posixpath
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

from nemo_rl_core.backends.training.dtensor.shards import local
from nemo_rl_core.checkpoints.state_file import STATE_FILE, STATE_NAME, read_state, write_state
from nemo_rl_core.checkpoints.tensors import order_metadata
from nemo_rl_core.checkpoints.weights import require_finite
from nemo_rl_core.checkpoints.written_files import WrittenFile, describe_written
from nemo_rl_core.distributed.process_group import collective_timeout, rank
from nemo_rl_core.errors import StoreError
from nemo_rl_core.store.files import list_files

_OPTIMIZER, _WEIGHTS, _MODEL, _RANDOM = "optimizer.", "weights.", "model.", "random."
_OF_BLOCKS = ("absmax1", "absmax2", "qmap1", "qmap2")
"""State of bitsandbytes per block of a parameter's moments, and for their 8-bit codes."""


class TrainerState:
    """Optimizer, random state, number of updates and additional weights of one rank.

    Every rank creates one and calls its methods together with the others; only one save runs at a
    time.

    Args:
        optimizer: AdamW or another optimizer with tensors and integers as state per parameter.
        trained: The trained parameters by name: `dict(model.named_parameters())`.
        weights: Additional weights to save and restore, such as adapters.
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
        self._group = _writer_group(dist.group.WORLD) if _has_peers() else None

    def start_saving(
        self,
        folder: Path,
        *,
        num_updates: int,
        model: Mapping[str, torch.Tensor] | None = None,
        beside: Sequence[str] = (),
    ) -> None:
        """Copies the state, and writes the copy in the background into an existing folder.

        Training may continue at once. Call `finish_saving` before using the folder.

        Args:
            folder: All ranks see it.
            num_updates: Optimizer steps so far.
            model: Weights and buffers of the model by name, sharded or not, to write as well.
            beside: Files that this rank has written already, relative to the folder; they are
                hashed with its shards.
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
            # A loaded optimizer has its parameters in another order; the files list them in the
            # given order, so that equal states give equal files.
            dict(sorted(tensors.items())),
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            # Copies tensors on the CPU too, before this call returns.
            async_stager=DefaultStager(StagingOptions(False, False, False, False)),
            process_group=self._group,
            no_dist=self._group is None,
        )
        assert isinstance(response, Future)
        executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written = executor.submit(_complete, folder, response, beside)
        executor.shutdown(wait=False)
        self._folder = folder

    def is_saved(self) -> bool:
        """Returns True if this rank has nothing left to write, or failed."""
        return self._written is None or self._written.done()

    def finish_saving(self) -> dict[str, WrittenFile]:
        """Waits for the background save, if any.

        Returns:
            The files that this rank has written, by their paths relative to the folder.

        Raises:
            StoreError: If writing failed.
        """
        written, self._written = self._written, None
        if written is None:
            return {}
        try:
            return written.result()
        except (Exception, CheckpointException) as error:  # which is no Exception
            raise StoreError(
                f"the trainer's state could not be written to {self._folder}",
                got=_cause(error),
                fix="free some space, or point NEMO_RL_HOME at another disk",
            ) from error

    def load(self, folder: Path, *, model: Mapping[str, torch.Tensor] | None = None) -> int:
        """Restores a save of `start_saving` bit-identically, at any number of ranks.

        Settings of parameter groups (learning rate, betas) come from the config and the schedule.

        Args:
            folder: All ranks see it.
            model: Weights and buffers to fill, if the save has them.

        Returns:
            The number of updates made so far.

        Raises:
            StoreError: If files are missing or damaged, or belong to other parameters; the state is
                then unchanged, except weights after damage.
            ModelError: If weights are not finite.
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
        wanted = _flat(moments) | weights | random
        try:
            load(wanted, storage_reader=reader, process_group=self._group, no_dist=not self._group)
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
        """Integer state by parameter: bitsandbytes counts its steps in plain numbers."""
        return {
            name: numbers
            for name, parameter in self._trained.items()
            if (
                numbers := {
                    key: value
                    for key, value in self._optimizer.state.get(parameter, {}).items()
                    if isinstance(value, int)
                }
            )
        }

    def _empty_moments(self, saved: Mapping[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
        """Empty tensors to read the optimizer's state into: by parameter, then by key."""
        groups = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        moments: dict[str, dict[str, torch.Tensor]] = {}
        for full_name, entry in saved.items():
            if not full_name.startswith(_OPTIMIZER):
                continue
            name, _, key = full_name.removeprefix(_OPTIMIZER).rpartition(".")
            parameter = self._trained.get(name)
            if parameter is None or parameter not in groups:
                raise _mismatch(f"{name}.{key}, and no such parameter is trained")
            group = groups[parameter]
            if key == "step":
                # On the device that a fused or capturable optimizer expects.
                on_device = group.get("fused") or group.get("capturable")
                device = parameter.device if on_device else torch.device("cpu")
                value = torch.zeros((), dtype=entry.properties.dtype, device=device)
            elif key in _OF_BLOCKS:
                dtype = entry.properties.dtype
                value = torch.zeros(entry.size, dtype=dtype, device=parameter.device)
            elif entry.size == parameter.shape:
                value = torch.zeros_like(parameter.detach(), dtype=entry.properties.dtype)
            else:
                shapes = f"{tuple(entry.size)}, and the parameter {tuple(parameter.shape)}"
                raise _mismatch(f"{name}.{key} has shape {shapes}")
            moments.setdefault(name, {})[key] = value
        return moments


def _complete(
    folder: Path, response: "Future[Any]", beside: Sequence[str]
) -> dict[str, WrittenFile]:
    """Waits until all ranks have written, and completes the files of this one."""
    response.result()
    own = list(folder.glob(f"shard-{rank() + 1:05d}-*.safetensors"))
    for file in own:
        order_metadata(file)
    state = [STATE_NAME] if rank() == 0 else []
    return describe_written(folder, [*(file.name for file in own), *state, *beside])


def written_by_rank_0(checkpoint: Path) -> list[str]:
    """Paths of what a checkpoint has beside shards, relative to its `trainer/`; empty elsewhere."""
    if rank() != 0:
        return []
    names = [name for name in list_files(checkpoint) if "/shard-" not in name]
    return [f"../{name}" for name in names if name != STATE_FILE]


def in_checkpoint(written: Mapping[str, WrittenFile]) -> dict[str, WrittenFile]:
    """Files by their paths in a checkpoint, of those by their paths relative to its `trainer/`."""
    return {posixpath.normpath(f"trainer/{name}"): file for name, file in written.items()}


def _targets(
    prefix: str, own: Mapping[str, torch.Tensor], saved: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The tensors to fill by their names in the save, which must have the same ones."""
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    there = {
        name.removeprefix(prefix): tuple(entry.size)
        for name, entry in saved.items()
        if name.startswith(prefix)
    }
    if shapes != there:
        differing = sorted(name for name, _ in shapes.items() ^ there.items())
        raise _mismatch(f"other weights, such as {differing[0]}")
    return {prefix + name: tensor.detach() for name, tensor in own.items()}


def _flat(moments: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        f"{_OPTIMIZER}{name}.{key}": value
        for name, values in moments.items()
        for key, value in values.items()
    }


def _cause(error: BaseException) -> str:
    """What went wrong: a `CheckpointException` has the traces of all ranks before its last line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]}"[:500]


def _has_peers() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


@cache
def _writer_group(_: dist.ProcessGroup) -> dist.ProcessGroup:
    """A separate process group, shared by all set-ups of this process.

    The writing thread plans shards with other ranks while this thread trains. Planning uses the CPU
    for any training device. Ranks that have written wait in it for the slowest disk.
    """
    group = dist.new_group(backend="gloo", timeout=max(collective_timeout(), default_pg_timeout))
    assert isinstance(group, dist.ProcessGroup)
    return group


def _random_state() -> dict[str, torch.Tensor]:
    """This rank's generators. Ranks without a state in the checkpoint keep their seeds."""
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
