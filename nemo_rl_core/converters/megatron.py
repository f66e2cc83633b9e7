"""Conversion between transformers folders and Megatron checkpoints, on the ranks of a layout.

A converted checkpoint has weights only: `trainer/` in Megatron's format, and `model/` with config
and tokenizer. The model, sharded over the ranks, and one file of the folder must fit in memory.
"""

from collections import deque
from pathlib import Path

from nemo_rl_core.checkpoints.tensors import DEFAULT_SHARD_BYTES, save_weights
from nemo_rl_core.config.model import DType
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.converters.folders import new_folder, require_folder
from nemo_rl_core.data.pretrained import copy_description
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import rank
from nemo_rl_core.errors import ModelError

_ONE_RANK = MegatronTraining()


def hf_to_megatron(
    model_folder: Path,
    target: Path,
    *,
    training: MegatronTraining = _ONE_RANK,
    dtype: DType = "float32",
) -> None:
    """Writes a Megatron checkpoint with the weights of a transformers folder.

    Args:
        target: A folder that does not exist yet; `model/` and `trainer/` are created in it.
        training: Layout of the writing ranks; any other layout can read the checkpoint.
        dtype: Dtype of the weights in the checkpoint. A narrower dtype than the source's loses
            bits.
    """
    require_folder(model_folder, "config.json")
    _refuse_unfit(model_folder, training, may_be_of_bridge=False)

    def convert(folder: Path) -> None:
        from nemo_rl_core.backends.training.megatron.checkpoint import save_native_weights
        from nemo_rl_core.backends.training.megatron.model import build_model
        from nemo_rl_core.backends.training.megatron.topology import initialize_topology
        from nemo_rl_core.backends.training.megatron.weights import load_hf_weights

        initialize_topology(training)
        models = build_model(model_folder, training, dtype)
        load_hf_weights(models, model_folder)
        save_native_weights(folder / "trainer", models)

    with new_folder(target) as folder:
        (folder / "model").mkdir()
        copy_description(model_folder, folder / "model", dtype=dtype)
        run_ranks(convert, folder, world_size=num_ranks_of(training))


def megatron_to_hf(
    checkpoint: Path,
    target: Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    training: MegatronTraining = _ONE_RANK,
) -> None:
    """Writes a transformers folder with the weights of a checkpoint's `trainer/`.

    Args:
        checkpoint: A checkpoint that `MegatronBackend.save_checkpoint`, with any layout, or
            `hf_to_megatron` wrote.
        training: Layout of the reading ranks.
    """
    dtype = native_dtype(checkpoint)
    _refuse_unfit(checkpoint / "model", training, may_be_of_bridge=True)

    def convert(folder: Path) -> None:
        from nemo_rl_core.backends.training.megatron.checkpoint import load_native_weights
        from nemo_rl_core.backends.training.megatron.model import build_model
        from nemo_rl_core.backends.training.megatron.topology import initialize_topology
        from nemo_rl_core.backends.training.megatron.weights import iter_hf_weights

        initialize_topology(training)
        models = build_model(checkpoint / "model", training, dtype)
        load_native_weights(checkpoint / "trainer", models)
        weights = iter_hf_weights(models)
        if rank() == 0:
            save_weights(folder, weights, max_shard_bytes=max_shard_bytes)
        else:
            deque(weights, maxlen=0)

    with new_folder(target) as folder:
        copy_description(checkpoint / "model", folder, dtype=dtype)
        run_ranks(convert, folder, world_size=num_ranks_of(training))


def is_megatron_checkpoint(folder: Path) -> bool:
    """Whether `trainer/` is in Megatron's distributed format."""
    return (folder / "trainer" / ".metadata").is_file()


def native_dtype(checkpoint: Path) -> DType:
    """Returns the dtype of the weights in a Megatron checkpoint."""
    from nemo_rl_core.backends.training.megatron.checkpoint import dtype_of

    if not is_megatron_checkpoint(checkpoint):
        raise ModelError(
            f"{checkpoint} is not a Megatron checkpoint",
            expected="a folder with model/config.json and trainer/.metadata",
            got=_contents(checkpoint),
            fix="name the folder of one checkpoint that the megatron backend saved, such as "
            "checkpoints/step-00000010",
        )
    require_folder(checkpoint / "model", "config.json")
    return "bfloat16" if dtype_of(checkpoint / "trainer") == "bfloat16" else "float32"


def _refuse_unfit(
    model_folder: Path, training: MegatronTraining, *, may_be_of_bridge: bool
) -> None:
    # Checked before the ranks start, because on a rank it would become a WorkerError.
    from nemo_rl_core.backends.training.megatron.families import (
        family_of,
        is_for_bridge,
        refuse_indivisible,
    )

    if is_for_bridge(model_folder):
        # The ranks import Megatron-Bridge, which checks the sizes.
        if any(model_folder.glob("*.safetensors")) and may_be_of_bridge:
            return
        raise ModelError(
            f"{model_folder} cannot be converted with Megatron-Bridge",
            expected="model/ of a complete training checkpoint, in whose files the bridge reads "
            "the names of weights",
            got="a folder to train from" if not may_be_of_bridge else "a folder without weights",
            fix="train from the transformers folder itself; convert a checkpoint with weights",
        )
    refuse_indivisible(*family_of(model_folder), training)


def _contents(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder"
    return ", ".join(sorted(path.name for path in folder.iterdir())[:6]) or "an empty folder"


def num_ranks_of(training: MegatronTraining) -> int:
    """Returns the number of ranks for one copy of the model; experts use data-parallel ranks."""
    return training.ranks_per_replica * training.expert_parallel_size
