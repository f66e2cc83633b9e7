"""Files with a model's weights: which they are, and the tensors in them."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_core.errors import ModelError, UnsafePathError
from nemo_rl_core.store.node_cache import near
from nemo_rl_core.store.paths import checked_name, resolve_below

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
INDICES = (f"{WEIGHTS}.index.json", "pytorch_model.bin.index.json")
_SHOWN = 5


def first_names(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def unreadable(called: str, error: Exception) -> ModelError:
    """Returns an error of transformers or safetensors as one that names the model and the fix."""
    message = (str(error).strip().splitlines() or ["no message"])[0]
    return ModelError(
        f"transformers cannot load {called}",
        expected="a hub name, or a folder with config.json, *.safetensors and tokenizer.json",
        got=f"{type(error).__name__}: {message}"[:300],
        fix="correct the model's name; copy or save the model again if a file is damaged; "
        "without a network, name a folder on this machine",
    )


def distinct(model: Any) -> Iterator[tuple[str, "Tensor"]]:
    """Yields parameters and saved buffers of a model by name, shared ones once."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if hasattr(tensor, "is_floating_point") and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a model, by its index if it has one.

    Raises:
        ModelError: If one is missing, or the index is damaged or names files outside of the folder.
    """
    index = folder / INDICES[0]
    names = sorted(set(files_of_index(index).values())) if index.is_file() else [WEIGHTS]
    # Links lead into the cache of the hub, or of the node.
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
    """Reads the file name of each weight from an index; empty without an index.

    Raises:
        ModelError: If the index is damaged, or names a file outside of its folder.
    """
    if not index.is_file():
        return {}
    try:
        files: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
        outside = sorted({name for name in files.values() if not _is_beside(name)})
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
            expected="names of files beside it",
            got=first_names(outside),
            fix="copy the files into the folder and correct the index, or save the model again",
        )
    return files


def _is_beside(name: str) -> bool:
    with suppress(UnsafePathError):
        return "/" not in checked_name(name, source="an index")
    return False


def stored_tensors(folder: Path) -> Iterator[tuple[str, "Tensor"]]:
    """Yields the tensors of a folder's safetensors files on the CPU, in the order of their names.

    The order does not depend on how the tensors are divided into files. A tensor is read when it is
    asked for, and nothing is held of those before it: all files are mapped, none is in memory.

    Raises:
        ModelError: If a file is missing or damaged.
    """
    with ExitStack() as opened:
        files = [opened.enter_context(open_weights(path)) for path in weight_files(folder)]
        file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        for name in sorted(file_of):
            yield name, file_of[name].get_tensor(name)


def open_weights(path: Path) -> Any:
    """Opens a safetensors file and validates its header; a context manager.

    On a node with a cache, what is opened is the file in there, with the same content.

    Raises:
        ModelError: If it is damaged.
    """
    return _opened(near(path), path)


def refuse_damaged(path: Path) -> None:
    """Validates the header of a safetensors file, where it lies.

    Raises:
        ModelError: If it is damaged.
    """
    with _opened(path, path):
        pass


def _opened(there: Path, path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(there, framework="pt")
    except (SafetensorError, OSError) as error:
        found = unreadable(f"the weights in {path}", error)
        raise ModelError(
            found.problem,
            expected="a whole file of safetensors, whose header fits its size",
            got=f"{found.got}; {path.stat().st_size:,} bytes",
            fix="copy or download this file again, or save the model again",
        ) from error
