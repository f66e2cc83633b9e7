"""Weights that come in, held against the model that they are for.

Every road ends here: a model that transformers loads, slices that ranks read, tensors that a
trainer hands over. Missing, surplus and misshapen tensors are refused by name, and so are NaN and
infinity, looked for in each tensor once, where it is read. Left out: which names a model expects
(`backends.training.dtensor.shards.check_weights`), since that needs the model.
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
        source: What error messages call the weights' origin.
        missing: Names that the model has and the source lacks.
        misshapen: By name, the shape in the source and the shape in the model.
        surplus: Names that the source has and the model lacks.

    Raises:
        ModelError: With the names of all three kinds.
    """
    shapes = [f"{name} {there} for {here}" for name, (there, here) in (misshapen or {}).items()]
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
        fix="name a complete checkpoint of the architecture that its config.json says; one with a "
        "scalar head has no language model's head",
    )


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def require_finite(source: str, named_tensors: Iterable[tuple[str, "Tensor"]]) -> None:
    """Reads every tensor once; no copy is made, but of one-byte floats.

    Raises:
        ModelError: Naming the first tensor that holds NaN or infinity.
    """
    import torch

    for name, tensor in named_tensors:
        values = tensor.detach()
        if not values.is_floating_point() or not values.numel():
            continue
        if values.element_size() == 1:
            values = values.float()
        # Both ends are NaN where any value is: one pass, where `isfinite` writes a mask and more.
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
    """What `kind.from_pretrained` loads, once it is seen that nothing of it was made up.

    Args:
        kind: A class of transformers, or one of its auto classes.
        source: A folder or a hub name; None where `options` have a `state_dict`.
        called: What error messages call the source.
        may_lack: Weights that a new head brings, to be filled by the caller.
        may_have: Whether a surplus weight, such as a head that is put aside, is expected.
        **options: Of `from_pretrained`.

    Returns:
        The model, and those of `may_lack` that the source lacks.

    Raises:
        ModelError: If transformers cannot load it, or weights are missing, surplus, misshapen or
            not finite.
    """
    if source is not None and (folder := Path(source)).is_dir():
        _refuse_damaged_files(folder)
        if "quantization_config" in options:  # 4 or 8 bits do not tell what the weights were
            require_finite(called, stored_tensors(folder))
    try:
        model, report = kind.from_pretrained(
            source, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except (NemoRLError, MemoryError):
        raise
    # Named fault boundary: a damaged folder fails in transformers, safetensors, torch or json, each
    # with errors of its own.
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
                pass  # transformers would not say which file it is


def unreadable(called: str, error: Exception) -> ModelError:
    """What transformers or safetensors say of a model, as an error that names it and the fix."""
    said = (str(error).strip().splitlines() or ["no message"])[0]
    return ModelError(
        f"transformers cannot load {called}",
        expected="a hub name, or a folder with config.json, *.safetensors and tokenizer.json",
        got=f"{type(error).__name__}: {said}"[:300],
        fix="correct the model's name; copy or save the model again where a file is damaged; "
        "without a network, name a folder on this machine",
    )


def distinct(model: Any) -> Iterator[tuple[str, "Tensor"]]:
    """Parameters and saved buffers of a model by name, shared ones once."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if hasattr(tensor, "is_floating_point") and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, by its index where it has one.

    Raises:
        ModelError: If one is missing, or the index is damaged or leads out of the folder.
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
    """The file name of each weight, as an index says; nothing where there is no index.

    Raises:
        ModelError: If the index is damaged, or names a file outside of its folder.
    """
    if not index.is_file():
        return {}
    try:
        files: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
        strange = sorted({name for name in files.values() if Path(name).name != name})
    except (ValueError, TypeError, KeyError) as error:
        raise unreadable(f"the index {index}", error) from error
    if strange:
        raise ModelError(
            f"the index {index} names files outside of its folder",
            expected="names of files that lie beside it",
            got=_listed(strange),
            fix="copy the files into the folder and correct the index, or save the model again",
        )
    return files


def stored_tensors(folder: Path) -> Iterator[tuple[str, "Tensor"]]:
    """The tensors of a folder's safetensors files on the CPU, one at a time."""
    for path in weight_files(folder):
        with open_weights(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield name, file.get_tensor(name)


def open_weights(path: Path) -> Any:
    """A safetensors file whose header is read and found to fit the file; a context manager.

    Raises:
        ModelError: If it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise unreadable(f"the weights in {path}", error) from error
