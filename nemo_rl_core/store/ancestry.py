"""Ancestors of an artifact: written next to its manifest and read back as a tree."""

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
        state: "changed" if its folder has another artifact or manifest; "recorded" if its files
            are not on this machine, but its manifest is in `ancestors.json`.
    """

    depth: int
    ref: ParentRef
    state: Literal["found", "recorded", "missing", "damaged", "changed"]
    manifest: Manifest | None = None


def write_ancestors(folder: Path, parents: Iterable[Path]) -> None:
    """Writes `ancestors.json` from the manifests of the parents and their ancestors."""
    manifests: dict[str, Manifest] = {}
    for parent in parents:
        manifests |= recorded_ancestors(parent)
        manifest = Manifest.read(parent)
        manifests[manifest.ref(parent).key] = manifest
    dumped = {key: manifests[key].model_dump(mode="json") for key in sorted(manifests)}
    write_atomic(folder / ANCESTORS, json.dumps(dumped, indent=1) + "\n")


def recorded_ancestors(folder: Path) -> dict[str, Manifest]:
    """Reads the manifests in `ancestors.json`; empty if it is missing or damaged."""
    try:
        content = json.loads((folder / ANCESTORS).read_bytes())
        return {key: Manifest.model_validate(value) for key, value in content.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def ancestry_of(folder: Path) -> list[Ancestor]:
    """Returns every ancestor of an artifact once, nearest first, from disk or `ancestors.json`."""
    return ancestry(Manifest.read(folder), recorded_ancestors(folder))


def ancestry(manifest: Manifest, recorded: Mapping[str, Manifest] | None = None) -> list[Ancestor]:
    """Returns every ancestor once, nearest first; a missing one ends its branch."""
    ancestors: list[Ancestor] = []
    seen: set[tuple[str, str]] = set()
    queue = deque((1, parent) for parent in manifest.parents)
    while queue:
        depth, ref = queue.popleft()
        # One artifact has a different path in each pod.
        identity = (ref.key, "" if ref.name else ref.path)
        if identity in seen:
            continue
        seen.add(identity)
        ancestor = _look_up(depth, ref, recorded or {})
        ancestors.append(ancestor)
        if ancestor.manifest is not None:
            queue.extend((depth + 1, parent) for parent in ancestor.manifest.parents)
    return ancestors


def _look_up(depth: int, ref: ParentRef, recorded: Mapping[str, Manifest]) -> Ancestor:
    folder = Path(ref.path)
    if not (folder / MANIFEST).is_file():
        record = recorded.get(ref.key)
        if record is not None and not ref.is_of(record):
            return Ancestor(depth, ref, "changed")
        return Ancestor(depth, ref, "recorded" if record else "missing", record)
    try:
        manifest = Manifest.read(folder)
    except StoreError:
        return Ancestor(depth, ref, "damaged")
    if not ref.is_of(manifest):
        return Ancestor(depth, ref, "changed")
    return Ancestor(depth, ref, "found", manifest)
