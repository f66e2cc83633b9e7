"""Validation of loaded weights against their model.

All loading uses it: models loaded by transformers, slices read by ranks, tensors sent by a trainer.
Missing, surplus and misshapen tensors are refused by name, and so are NaN and infinity, checked
once when a tensor is read. The names that a model expects are in
`backends.training.dtensor.shards.check_weights`, since they need the model.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_core.errors import ModelError, NemoRLError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"
_INDICES = (f"{WEIGHTS}.index.json", "pytorch_model.bin.index.json")
_SHOWN = 5

Shape = tuple[int, ...]


def refuse_wrong_weights(
    source: str,
    *,
    missing: Collection[str] = (),
    misshapen: Mapping[str, tuple[Shape, Shape]] | None = None,
    surplus: Collection[str] = (),
) -> None:
    """Raises unless all three are empty.

    Args:
        source: Name of the weights' source for error messages.
        missing: Names that the model has and the source lacks.
        misshapen: Shape in the source and shape in the model, by name.
        surplus: Names that the source has and the model lacks.

    Raises:
        ModelError: With the names of all three kinds.
    """
    shapes = [
        f"{name} {actual} for {expected}" for name, (actual, expected) in (misshapen or {}).items()
    ]
    kinds = {"missing": missing, "of another shape": shapes, "surplus": surplus}
    wrong = {kind: sorted(names) for kind, names in kinds.items() if names}
    if not wrong:
        return
    problems = {
        "missing": "lacks weights",
        "of another shape": "has weights of another shape than the model's",
        "surplus": "has weights that the model does not have",
    }
    raise ModelError(
        f"{source} {problems[next(iter(wrong))]}",
        expected="every weight of the model in its shape, and no other",
        got="; ".join(f"{len(names)} {kind}: {_listed(names)}" for kind, names in wrong.items()),
        fix="name a complete checkpoint of the architecture in its config.json; one with a "
        "scalar head has no language model's head",
    )


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def require_finite(source: str, named_tensors: Iterable[tuple[str, "Tensor"]]) -> None:
    """Checks every tensor for NaN and infinity, in one pass, without copies but of one-byte floats.

    Raises:
        ModelError: Naming the first tensor with NaN or infinity.
    """
    import torch

    for name, tensor in named_tensors:
        values = tensor.detach()
        if not values.is_floating_point() or not values.numel():
            continue
        if values.element_size() == 1:
            values = values.float()
        # Both are NaN if any value is: one pass, whereas `isfinite` writes a mask.
        low, high = torch.aminmax(values)
        if not (torch.isfinite(low) & torch.isfinite(high)):
            num_nan = int(torch.isnan(values).sum())
            num_infinite = int(torch.isinf(values).sum())
            raise ModelError(
                f"{source} has weights that are not finite",
                expected="finite numbers",
                got=f"{name}: {num_nan} NaN and {num_infinite} infinite of {values.numel()}",
                fix="name a checkpoint from before the training diverged, or download it again",
            )


def load_pretrained(
    kind: Any,
    source: str | Path | None,
    *,
    called: str,
    may_lack: Collection[str] = (),
    may_have: Callable[[str], bool] = lambda _: False,
    **options: Any,
) -> tuple[Any, set[str]]:
    """Loads a model by `kind.from_pretrained`, and checks that no weight was initialized randomly.

    Args:
        kind: A class of transformers, or one of its auto classes.
        source: A folder or a hub name; None if `options` have a `state_dict`.
        called: Name of the source for error messages.
        may_lack: Weights of a new head, to be filled by the caller.
        may_have: Returns whether a surplus weight, such as of an unused head, is expected.
        **options: Options of `from_pretrained`.

    Returns:
        The model, and those of `may_lack` that the source lacks.

    Raises:
        ModelError: If transformers cannot load it, or weights are missing, surplus, misshapen or
            not finite.
    """
    if source is not None and (folder := Path(source)).is_dir():
        _refuse_damaged_files(folder)
        if "quantization_config" in options:  # 4 or 8 bits do not show NaN or infinity
            require_finite(called, stored_tensors(folder))
    try:
        model, report = kind.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except (NemoRLError, MemoryError):
        raise
    # Named fault boundary: a damaged folder raises errors of transformers, safetensors, torch or
    # json.
    except Exception as error:
        raise unreadable(called, error) from error
    missing = set(report["missing_keys"]) - {name for name, *_ in report["mismatched_keys"]}
    misshapen = {name: (tuple(a), tuple(b)) for name, a, b in report["mismatched_keys"]}
    refuse_wrong_weights(
        called,
        missing=missing - {*may_lack},
        misshapen=misshapen,
        surplus=[name for name in report["unexpected_keys"] if not may_have(name)],
    )
    require_finite(called, distinct(model))
    return model, missing


def _refuse_damaged_files(folder: Path) -> None:
    for index in _INDICES:
        files_of_index(folder / index)
    if any((folder / name).is_file() for name in (WEIGHTS, _INDICES[0])):
        for path in weight_files(folder):
            with open_weights(path):
                pass  # the error of transformers would not name the file


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
    index = folder / _INDICES[0]
    names = sorted(set(files_of_index(index).values())) if index.is_file() else [WEIGHTS]
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(
            f"the model folder {folder.name!r} has no {missing[0]}",
            expected=f"{WEIGHTS}, or the safetensors files that {index.name} names",
            got=", ".join(sorted(path.name for path in folder.glob("*"))[:6]) or "nothing",
            fix="save the model with save_pretrained, or name a complete checkpoint",
        )
    return [folder / name for name in names]


def files_of_index(index: Path) -> dict[str, str]:
    """Reads the file name of each weight from an index; empty without an index.

    Raises:
        ModelError: If the index is damaged, or names a file outside of its folder.
    """
    if not index.is_file():
        return {}
    try:
        files: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
        outside = sorted({name for name in files.values() if Path(name).name != name})
    except (ValueError, TypeError, KeyError) as error:
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
            got=_listed(outside),
            fix="copy the files into the folder and correct the index, or save the model again",
        )
    return files


def stored_tensors(folder: Path) -> Iterator[tuple[str, "Tensor"]]:
    """Yields the tensors of a folder's safetensors files on the CPU, one at a time."""
    for path in weight_files(folder):
        with open_weights(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield name, file.get_tensor(name)


def open_weights(path: Path) -> Any:
    """Opens a safetensors file and validates its header; a context manager.

    Raises:
        ModelError: If it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        found = unreadable(f"the weights in {path}", error)
        raise ModelError(
            found.problem,
            expected="a whole file of safetensors, whose header fits its size",
            got=f"{found.got}; {path.stat().st_size:,} bytes",
            fix="copy or download this file again, or save the model again",
        ) from error
