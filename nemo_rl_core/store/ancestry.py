"""Ancestors of an artifact: written beside its manifest, and read back as a tree."""

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nemo_rl_core.errors import StoreError
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.store.manifest import ANCESTORS, MANIFEST, Manifest, ParentRef


@dataclass(frozen=True, slots=True)
class Ancestor:
    """An ancestor of an artifact.

    Attributes:
        depth: 1 for a parent, 2 for its parent.
        ref: The reference in its child's manifest.
        state: "changed" if its folder holds another artifact or manifest; "recorded" if its files
            are not on this machine, but its manifest is in `ancestors.json`.
        manifest: None unless found or recorded.
    """

    depth: int
    ref: ParentRef
    state: Literal["found", "recorded", "missing", "damaged", "changed"]
    manifest: Manifest | None = None


def write_ancestors(folder: Path, parents: Iterable[Path]) -> None:
    """Writes `ancestors.json` of an artifact from the manifests of its parents and their ancestors.

    Raises:
        StoreError: If a parent has no valid manifest, or the disk refuses.
    """
    known: dict[str, Manifest] = {}
    for parent in parents:
        known |= recorded_ancestors(parent)
        manifest = Manifest.read(parent)
        known[manifest.ref(parent).key] = manifest
    dumped = {key: known[key].model_dump(mode="json") for key in sorted(known)}
    write_atomic(folder / ANCESTORS, json.dumps(dumped, indent=1) + "\n")


def recorded_ancestors(folder: Path) -> dict[str, Manifest]:
    """Reads the manifests in `ancestors.json`; empty if it is missing or damaged."""
    try:
        content = json.loads((folder / ANCESTORS).read_bytes())
        return {key: Manifest.model_validate(value) for key, value in content.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def ancestry_of(folder: Path) -> list[Ancestor]:
    """Returns every ancestor of an artifact once, nearest first, from disk or `ancestors.json`.

    Raises:
        StoreError: If the folder has no valid manifest.
    """
    return ancestry(Manifest.read(folder), recorded_ancestors(folder))


def ancestry(manifest: Manifest, recorded: Mapping[str, Manifest] | None = None) -> list[Ancestor]:
    """Returns every ancestor once, nearest first; a missing one ends its branch.

    Args:
        manifest: Manifest of the artifact.
        recorded: `recorded_ancestors` of it, for ancestors that are not on this machine.
    """
    found: list[Ancestor] = []
    seen: set[tuple[str, str]] = set()
    waiting = deque((1, parent) for parent in manifest.parents)
    while waiting:
        depth, ref = waiting.popleft()
        # One artifact has a different path in each pod.
        identity = (ref.key, "" if ref.name else ref.path)
        if identity in seen:
            continue
        seen.add(identity)
        ancestor = _look_up(depth, ref, recorded or {})
        found.append(ancestor)
        if ancestor.manifest is not None:
            waiting.extend((depth + 1, parent) for parent in ancestor.manifest.parents)
    return found


def _look_up(depth: int, ref: ParentRef, recorded: Mapping[str, Manifest]) -> Ancestor:
    folder = Path(ref.path)
    if not (folder / MANIFEST).is_file():
        known = recorded.get(ref.key)
        if known is not None and not ref.is_of(known):
            return Ancestor(depth, ref, "changed")
        return Ancestor(depth, ref, "recorded" if known else "missing", known)
    try:
        manifest = Manifest.read(folder)
    except StoreError:
        return Ancestor(depth, ref, "damaged")
    if not ref.is_of(manifest):
        return Ancestor(depth, ref, "changed")
    return Ancestor(depth, ref, "found", manifest)
