"""Writes a published model as a float32 transformers folder, one tensor in memory at a time.

The files are byte-identical to those that transformers writes after loading the model in float32,
which needs memory for all weights at once: 263 GiB for 70 B. The only exceptions are models with
experts and more than one file of 50 GB, whose tensors are divided into files differently.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_rl_core.checkpoints.tensors import write_float32
from nemo_rl_core.checkpoints.weight_files import (
    INDICES,
    WEIGHTS,
    open_weights,
    unreadable,
    weight_files,
)
from nemo_rl_core.checkpoints.weights import (
    Shape,
    as_published,
    refuse_wrong_weights,
    require_finite,
)
from nemo_rl_core.data.pretrained import read_model_json
from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.model_files.loading import empty_model
from nemo_rl_core.model_files.weights import match_stored, missing_weights, plain_weights
from nemo_rl_core.store import files

if TYPE_CHECKING:
    from torch import Tensor

_MAX_FILE_SIZE = "50GB"
"""The default of `save_pretrained`."""
_WIDENED = {"F32", "F16", "BF16"}
"""Dtypes of safetensors that float32 represents exactly."""


class _Written(NamedTuple):
    stored: str
    shape: Shape


def copy_in_float32(source: Path, target: Path, *, source_name: str) -> int | None:
    """Writes config, generation config and weights of a causal model; no tokenizer.

    Returns the number of parameters. None, with nothing written, if transformers has to load the
    full model: for pickled or quantized weights, classes that are not causal models, and tied
    weights that are stored twice.
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
        model = _without_weights(source, source_name)
        written = _plan_tensors(
            model, {n: tuple(s.get_shape()) for n, s in slices.items()}, source_name
        )
        if written is None:
            return None

        def read(name: str) -> "Tensor":
            stored = written[name].stored
            tensor: Tensor = file_of[stored].get_tensor(stored)
            require_finite(source_name, [(name, tensor)])
            return tensor.float()

        with files.storage_errors(target):
            target.mkdir(parents=True, exist_ok=True)
            _write_configs(model, target)
            _write_weights(model, {n: each.shape for n, each in written.items()}, target, read)
    return int(model.num_parameters())


def _is_plain(folder: Path) -> bool:
    """Whether the class in the config can load the safetensors files directly."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not any((folder / name).is_file() for name in (WEIGHTS, INDICES[0])):
        return False
    declared = read_model_json(folder)
    if {"quantization_config", "auto_map"} & declared.keys():
        return False
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # Broad on purpose: transformers explains the problem when it loads the model.
    except Exception:  # noqa: BLE001
        return False
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    return getattr(kind, "__name__", None) in (declared.get("architectures") or [])


def _without_weights(folder: Path, source_name: str) -> Any:
    try:
        return empty_model(folder, "lm")
    except (NemoRLError, MemoryError):
        raise
    # Broad on purpose: a damaged config raises errors of transformers, torch or json.
    except Exception as error:
        raise unreadable(source_name, error) from error


def _plan_tensors(
    model: Any, stored: Mapping[str, Shape], source_name: str
) -> dict[str, _Written] | None:
    """Returns the new folder's tensors by name, in transformers' order for division into files.

    None if a weight comes from several stored tensors of equal rank, such as a tied head that is
    stored in addition to its embedding and may differ from it.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    refuse_wrong_weights(source_name, missing=missing_weights(model, stored, source_name))
    weights = plain_weights(model)
    names, _, _ = match_stored(model, weights, {n: torch.empty(0, device="meta") for n in stored})
    stored_as = {id(weights[name]): key for name, key in names.items()}
    if len(stored_as) < len(names) or not all(w.is_floating_point() for w in weights.values()):
        return None
    first_names: dict[int, str] = {}  # tied weights have several names
    for name, tensor in weights.items():
        first_names.setdefault(id(tensor), name)
    empty = {name: torch.empty(weights[name].shape, device="meta") for name in first_names.values()}
    planned: dict[str, _Written] = {}
    for name, tensor in empty.items():
        for published, piece in as_published(model, [(name, tensor)]):
            stored_name = stored_as.get(id(weights[name]), published)
            planned[published] = _Written(stored_name, tuple(piece.shape))
    order = revert_weight_conversion(model, empty)
    return {name: planned[name] for name in order if name in planned}


def _write_configs(model: Any, folder: Path) -> None:
    model.config.dtype = "float32"
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        # Unlike save_pretrained, this accepts published configs such as Vicuna's.
        model.generation_config.to_json_file(folder / "generation_config.json")


def _write_weights(
    model: Any, shapes: Mapping[str, Shape], folder: Path, read: Callable[[str], "Tensor"]
) -> None:
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards

    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    divided = split_torch_state_dict_into_shards(
        empty, filename_pattern="model{suffix}.safetensors", max_shard_size=_MAX_FILE_SIZE
    )
    for file, names in divided.filename_to_tensors.items():
        write_float32(folder / file, {name: shapes[name] for name in names}, read)
    if divided.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **divided.metadata}
        index = {"metadata": metadata, "weight_map": divided.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / INDICES[0]).write_text(text)
