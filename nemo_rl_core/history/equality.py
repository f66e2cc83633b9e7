"""Bitwise comparison of two artifacts, with the difference of each tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_core.store.files import hash_folder
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import CARD, VOLATILE

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs.

    Attributes:
        what: "differs", the artifact that lacks the tensor, or both shapes and dtypes.
        share: Fraction of the elements that differ.
    """

    name: str
    what: str
    largest: float = 0.0
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Equality:
    """Result of comparing two artifacts.

    Attributes:
        content: True if all files in the content hash are equal.
        weights: True if the files of the model are equal; None if neither artifact has a model.
    """

    content: bool
    weights: bool | None
    tensors: tuple[TensorDifference, ...]
    num_tensors: int

    @property
    def is_bitwise_identical(self) -> bool:
        """True if content, weights and tensors are equal."""
        return self.content and self.weights is not False and not self.tensors


def compare_artifacts(one: Path, other: Path) -> Equality:
    """Compares the files on disk, and every tensor of the weights."""
    for folder in (one, other):
        Manifest.read(folder)
    weights = [_hash(folder / "model", (CARD,)) for folder in (one, other)]
    count, tensors = _compare_tensors(one / "model", other / "model")
    return Equality(
        content=_hash(one, VOLATILE) == _hash(other, VOLATILE),
        weights=weights[0] == weights[1] if any(weights) else None,
        tensors=tuple(sorted(tensors, key=lambda each: -each.largest)),
        num_tensors=count,
    )


def _hash(folder: Path, exclude: Sequence[str]) -> str | None:
    """Hash of the files on disk, which may have changed since the manifest was written."""
    return hash_folder(folder, exclude=exclude) if folder.is_dir() else None


def _compare_tensors(one: Path, other: Path) -> tuple[int, list[TensorDifference]]:
    from safetensors import safe_open

    files_by_name = []
    for folder in (one, other):
        names: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                names |= dict.fromkeys(file.keys(), path)
        files_by_name.append(names)
    differing = []
    for name in sorted({*files_by_name[0], *files_by_name[1]}):
        if name not in files_by_name[0] or name not in files_by_name[1]:
            which = "first" if name in files_by_name[0] else "second"
            differing.append(TensorDifference(name, f"only the {which} has it", float("inf")))
            continue
        with (
            safe_open(files_by_name[0][name], "pt") as a,
            safe_open(files_by_name[1][name], "pt") as b,
        ):
            left, right = a.get_tensor(name), b.get_tensor(name)
        if left.shape != right.shape or left.dtype != right.dtype:
            what = f"{tuple(left.shape)} {left.dtype} and {tuple(right.shape)} {right.dtype}"
            differing.append(TensorDifference(name, what, float("inf")))
        elif difference := _difference(name, left, right):
            differing.append(difference)
    return len({*files_by_name[0], *files_by_name[1]}), differing


def _difference(name: str, left: "Tensor", right: "Tensor") -> TensorDifference | None:
    """Compares bits: 0 differs from -0, and a NaN equals a NaN with the same bits."""
    differs = _bits(left).ne(_bits(right)).any(-1)
    if not differs.any():
        return None
    distances = (left.reshape(-1)[differs].double() - right.reshape(-1)[differs].double()).abs()
    largest = float(distances.nan_to_num(nan=float("inf")).max())
    return TensorDifference(name, "differs", largest, float(differs.double().mean()))


def _bits(tensor: "Tensor") -> "Tensor":
    import torch

    return tensor.contiguous().view(-1, 1).view(torch.uint8)
