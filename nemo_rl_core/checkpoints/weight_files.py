"""The weight files of a model and their tensors."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_core.errors import ModelError, UnsafePathError
from nemo_rl_core.store.node_cache import on_node_disk
from nemo_rl_core.store.paths import checked_name, resolve_below

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
INDICES = (f"{WEIGHTS}.index.json", "pytorch_model.bin.index.json")
_SHOWN = 5


def first_names(names: list[str]) -> str:
    """Joins the first names and adds how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def unreadable(source_name: str, error: Exception) -> ModelError:
    """Turns an error of transformers or safetensors into one that names the model and the fix."""
    message = (str(error).strip().splitlines() or ["no message"])[0]
    return ModelError(
        f"transformers cannot load {source_name}",
        expected="a hub name, or a folder with config.json, *.safetensors and tokenizer.json",
        got=f"{type(error).__name__}: {message}"[:300],
        fix="correct the model's name; if a file is damaged, copy or save the model again; "
        "without a network, name a folder on this machine",
    )


def distinct(model: Any) -> Iterator[tuple[str, "Tensor"]]:
    """Yields the parameters and saved buffers of a model by name, shared ones once."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if hasattr(tensor, "is_floating_point") and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a model, from its index if it has one."""
    index = folder / INDICES[0]
    names = sorted(set(files_of_index(index).values())) if index.is_file() else [WEIGHTS]
    # Links point into the cache of the hub or of the node.
    paths = [resolve_below(folder, name, source=str(index), may_link=True) for name in names]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ModelError(
            f"the model folder {folder.name!r} has no {missing[0]}",
            expected=f"{WEIGHTS}, or the safetensors files that {index.name} names",
            got=", ".join(sorted(path.name for path in folder.glob("*"))[:6]) or "nothing",
            fix="save the model with save_pretrained, or name a complete checkpoint",
        )
    return paths


def files_of_index(index: Path) -> dict[str, str]:
    """Reads the file name of each weight from an index; empty without an index."""
    if not index.is_file():
        return {}
    try:
        files: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
        outside = sorted({name for name in files.values() if not _is_in_folder(name)})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            f"the index {index} cannot be read",
            expected="a JSON object with weight_map, the file of each weight",
            got=f"{type(error).__name__}: {error}"[:200],
            fix="copy the file again, or save the model again",
        ) from error
    if outside:
        raise ModelError(
            f"the index {index} names files outside of its folder",
            expected="names of files in the same folder",
            got=first_names(outside),
            fix="copy the files into the folder and correct the index, or save the model again",
        )
    return files


def _is_in_folder(name: str) -> bool:
    with suppress(UnsafePathError):
        return "/" not in checked_name(name, source="an index")
    return False


def stored_tensors(folder: Path) -> Iterator[tuple[str, "Tensor"]]:
    """Yields the tensors of a folder's safetensors files on the CPU, ordered by name.

    The order does not depend on how the tensors are divided into files. Files are memory-mapped: a
    tensor is read on demand, and earlier tensors are not kept.
    """
    with ExitStack() as opened:
        files = [opened.enter_context(open_weights(path)) for path in weight_files(folder)]
        file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        for name in sorted(file_of):
            yield name, file_of[name].get_tensor(name)


def open_weights(path: Path) -> Any:
    """Opens a safetensors file and validates its header; a context manager.

    On a node with a cache, opens the cached copy.
    """
    return _opened(on_node_disk(path), path)


def refuse_damaged(path: Path) -> None:
    """Validates the header of a safetensors file, without the node's cache."""
    with _opened(path, path):
        pass


def _opened(copy: Path, path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(copy, framework="pt")
    except (SafetensorError, OSError) as error:
        explained = unreadable(f"the weights in {path}", error)
        raise ModelError(
            explained.problem,
            expected="a complete safetensors file, whose header matches its size",
            got=f"{explained.got}; {path.stat().st_size:,} bytes",
            fix="copy or download this file again, or save the model again",
        ) from error
