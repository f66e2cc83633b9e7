"""A published model as a transformers folder in float32, one tensor in memory at a time.

The files are, to the byte, those that transformers writes when it loads the model in float32 and
saves it, which takes the memory of all weights at once: 263 GiB for 70 B. Only where there are
experts and more than one file of 50 GB are the same tensors divided otherwise.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_rl_core.backends.training.dtensor.loading import as_published, empty_model
from nemo_rl_core.backends.training.dtensor.matching import missing_weights, own_weights, plan
from nemo_rl_core.checkpoints.tensors import write_float32
from nemo_rl_core.checkpoints.weight_files import (
    INDICES,
    WEIGHTS,
    open_weights,
    unreadable,
    weight_files,
)
from nemo_rl_core.checkpoints.weights import Shape, refuse_wrong_weights, require_finite
from nemo_rl_core.data.pretrained import described
from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.store import files

if TYPE_CHECKING:
    from torch import Tensor

_MOST_IN_A_FILE = "50GB"
"""As `save_pretrained` has it."""
_WIDENED = {"F32", "F16", "BF16"}
"""Types of safetensors whose values are all float32's, too."""


class _Written(NamedTuple):
    """A tensor of the new folder: its name in the old one, and its shape."""

    stored: str
    shape: Shape


def copy_in_float32(source: Path, target: Path, *, called: str) -> int | None:
    """Writes config, generation config and weights of a causal model; no tokenizer.

    Args:
        source: A transformers folder.
        target: Created if missing.
        called: Name of the model in error messages.

    Returns:
        The number of parameters; None, and nothing is written, if transformers has to load the
        model whole: for pickled or quantized weights, classes that are not causal models, and tied
        weights that are stored twice.

    Raises:
        ModelError: If the model cannot be read, or weights are missing, surplus, misshapen or not
            finite.
        StoreError: If writing fails.
    """
    if not _is_plain(source):
        return None
    with ExitStack() as opened:
        file_of = {
            name: file
            for path in weight_files(source)
            for file in [opened.enter_context(open_weights(path))]
            for name in file.keys()  # noqa: SIM118
        }
        slices = {name: file.get_slice(name) for name, file in file_of.items()}
        if any(each.get_dtype() not in _WIDENED for each in slices.values()):
            return None
        model = _without_weights(source, called)
        written = _written(model, {n: tuple(s.get_shape()) for n, s in slices.items()}, called)
        if written is None:
            return None

        def read(name: str) -> "Tensor":
            stored = written[name].stored
            tensor: Tensor = file_of[stored].get_tensor(stored)
            require_finite(called, [(name, tensor)])
            return tensor.float()

        with files.storage_errors(target):
            target.mkdir(parents=True, exist_ok=True)
            _write_configs(model, target)
            _write_weights(model, {n: each.shape for n, each in written.items()}, target, read)
    return int(model.num_parameters())


def _is_plain(folder: Path) -> bool:
    """Whether the class that the config names loads safetensors as they are."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not any((folder / name).is_file() for name in (WEIGHTS, INDICES[0])):
        return False
    declared = described(folder)
    if {"quantization_config", "auto_map"} & declared.keys():
        return False
    try:
        config = AutoConfig.from_pretrained(folder)
    # Named fault boundary: what transformers cannot read, it explains when it loads the model.
    except Exception:  # noqa: BLE001
        return False
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return getattr(kind, "__name__", None) in (declared.get("architectures") or [])


def _without_weights(folder: Path, called: str) -> Any:
    try:
        return empty_model(folder, "lm")
    except (NemoRLError, MemoryError):
        raise
    # Named fault boundary: a damaged config raises errors of transformers, torch or json.
    except Exception as error:
        raise unreadable(called, error) from error


def _written(model: Any, stored: Mapping[str, Shape], called: str) -> dict[str, _Written] | None:
    """What the new folder has, by name, in the order in which transformers divides it into files.

    Returns:
        None if a weight comes from several stored tensors of equal rank, such as a tied head that
        is stored beside its embedding and may differ from it.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    refuse_wrong_weights(called, missing=missing_weights(model, stored, called))
    own = own_weights(model)
    names, _, _ = plan(model, own, {n: torch.empty(0, device="meta") for n in stored})
    stored_as = {id(own[name]): key for name, key in names.items()}
    if len(stored_as) < len(names) or not all(each.is_floating_point() for each in own.values()):
        return None
    first_names: dict[int, str] = {}  # of tied weights
    for name, tensor in own.items():
        first_names.setdefault(id(tensor), name)
    empty = {name: torch.empty(own[name].shape, device="meta") for name in first_names.values()}
    found: dict[str, _Written] = {}
    for name, tensor in empty.items():
        for published, piece in as_published(model, [(name, tensor)]):
            stored_name = stored_as.get(id(own[name]), published)
            found[published] = _Written(stored_name, tuple(piece.shape))
    return {name: found[name] for name in revert_weight_conversion(model, empty) if name in found}


def _write_configs(model: Any, folder: Path) -> None:
    model.config.dtype = "float32"
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        # Unlike save_pretrained, this takes configs as they are published, such as Vicuna's.
        model.generation_config.to_json_file(folder / "generation_config.json")


def _write_weights(
    model: Any, shapes: Mapping[str, Shape], folder: Path, read: Callable[[str], "Tensor"]
) -> None:
    """Divides the tensors into files, and writes these and their index, as transformers does."""
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards

    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    divided = split_torch_state_dict_into_shards(
        empty,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=_MOST_IN_A_FILE,
    )
    for file, names in divided.filename_to_tensors.items():
        write_float32(folder / file, {name: shapes[name] for name in names}, read)
    if divided.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **divided.metadata}
        index = {"metadata": metadata, "weight_map": divided.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / INDICES[0]).write_text(text)
