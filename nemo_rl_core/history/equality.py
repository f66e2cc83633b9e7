"""Whether two artifacts are the same to the bit, and if not, which tensor is how far off."""

from dataclasses import dataclass
from pathlib import Path

from nemo_rl_core.infra.lineage import Manifest


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that is not the same.

    Attributes:
        what: "differs", or which of the two has no such tensor, or another shape or dtype.
        largest: The largest absolute difference.
        share: Of elements that differ.
    """

    name: str
    what: str
    largest: float = 0.0
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Equality:
    """Two artifacts held against each other.

    Attributes:
        content: Their content hashes are the same.
        weights: Their weights' hashes are; None where neither has weights.
        tensors: Those that differ, the furthest first.
        num_tensors: How many were compared.
    """

    content: bool
    weights: bool | None
    tensors: tuple[TensorDifference, ...]
    num_tensors: int

    @property
    def to_the_bit(self) -> bool:
        """Whether nothing that means anything differs."""
        return self.content and self.weights is not False and not self.tensors


def compare_artifacts(one: Path, other: Path) -> Equality:
    """Compares hashes, and every tensor of the weights.

    Raises:
        StoreError: If one of the folders is no artifact.
    """
    first, second = Manifest.read(one), Manifest.read(other)
    hashes = (first.weights_hash, second.weights_hash)
    count, tensors = _compare_tensors(one / "model", other / "model")
    return Equality(
        content=first.content_hash == second.content_hash,
        weights=None if hashes == (None, None) else hashes[0] == hashes[1],
        tensors=tuple(sorted(tensors, key=lambda each: -each.largest)),
        num_tensors=count,
    )


def _compare_tensors(one: Path, other: Path) -> tuple[int, list[TensorDifference]]:
    from safetensors import safe_open

    places = []
    for folder in (one, other):
        names: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                names |= dict.fromkeys(file.keys(), path)
        places.append(names)
    found = []
    for name in sorted({*places[0], *places[1]}):
        if name not in places[0] or name not in places[1]:
            which = "first" if name in places[0] else "second"
            found.append(TensorDifference(name, f"only the {which} has it", float("inf")))
            continue
        with safe_open(places[0][name], "pt") as a, safe_open(places[1][name], "pt") as b:
            left, right = a.get_tensor(name), b.get_tensor(name)
        if left.shape != right.shape or left.dtype != right.dtype:
            what = f"{tuple(left.shape)} {left.dtype} and {tuple(right.shape)} {right.dtype}"
            found.append(TensorDifference(name, what, float("inf")))
        elif not left.equal(right):
            apart = (left.double() - right.double()).abs()
            share = float((left != right).double().mean())
            found.append(TensorDifference(name, "differs", float(apart.max()), share))
    return len({*places[0], *places[1]}), found
