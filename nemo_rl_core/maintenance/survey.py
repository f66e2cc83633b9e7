"""Survey of a store: runs, artifacts, and the artifacts that each run made or used.

An artifact without a known run is treated like a run that ended when the artifact was made.
"""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import StoreError, UnsafePathError
from nemo_rl_core.history.database import path_of
from nemo_rl_core.history.labels import PINNED
from nemo_rl_core.history.liveness import is_alive
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import Execution
from nemo_rl_core.maintenance.disk import newest_change
from nemo_rl_core.store import locks
from nemo_rl_core.store.aliases import Aliases
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store

_START_SECONDS = 60.0
"""Longest time between the creation of a run's folder and of its lock."""


@dataclass(frozen=True)
class RunRecord:
    """A run with a folder."""

    name: str
    started_at: float
    artifacts: frozenset[str] = frozenset()
    pinned: bool = False
    running: bool = False


@dataclass(frozen=True)
class ArtifactRecord:
    """An artifact with a folder; a process or an alias may use it."""

    name: str
    created_at: float
    parents: frozenset[str] = frozenset()
    in_use: bool = False


@dataclass(frozen=True)
class Survey:
    """The content of a store; `claimed` artifacts include those of runs without a folder."""

    runs: tuple[RunRecord, ...]
    artifacts: Mapping[str, ArtifactRecord]
    claimed: frozenset[str] = frozenset()
    problem: str = ""


@dataclass(frozen=True)
class _Recorded:
    executions: Mapping[str, Execution]
    uses: Mapping[str, frozenset[str]]
    problem: str = ""


def survey(store: Store) -> Survey:
    """Reads the store's folders, manifests and history without changing anything."""
    recorded = _read_history(store)
    names = _folders(store.runs)
    # Shared aliases refer to artifacts by addresses or folders, not by names in this store.
    aliases = Aliases(store, str(store.root / "aliases"))
    aliased = frozenset(Path(each).name for each in aliases.artifacts())
    runs = [_run(store, name, recorded) for name in names]
    return Survey(
        runs=tuple(sorted(runs, key=lambda run: (run.started_at, run.name))),
        artifacts={name: _artifact(store, name, aliased) for name in _folders(store.artifacts)},
        claimed=frozenset().union(*recorded.uses.values()),
        problem=recorded.problem,
    )


def find_run(store: Store, name: str) -> Path:
    """Returns the folder of a run by its name or a prefix."""
    matches = [each for each in _folders(store.runs) if each.startswith(name)]
    if name in matches:
        matches = [name]
    if len(matches) != 1:
        raise StoreError(
            f"{'several runs begin' if matches else 'no run begins'} with {name!r}",
            expected="the name of one folder in the store's runs/, or its beginning",
            got=", ".join(matches[:5]) or f"{len(_folders(store.runs))} runs, none of that name",
            fix="see `nemo-rl runs` for their names",
        )
    return store.runs / matches[0]


def parent_names(store: Store, manifest: Manifest) -> frozenset[str]:
    """Returns the artifacts that an artifact depends on: its parents, and folders in its config."""
    parents = {parent.name or Path(parent.path).name for parent in manifest.parents}
    return frozenset(parents.union(named_artifacts(store, manifest.config)))


def named_artifacts(store: Store, value: Any) -> Iterator[str]:
    """Yields artifacts with paths anywhere in a JSON value, even if the store was moved."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from named_artifacts(store, each)
    elif isinstance(value, str):
        for name in _IN_ARTIFACTS.findall(value):
            with suppress(UnsafePathError):
                if resolve_below(store.artifacts, name, source="a config").is_dir():
                    yield name


_IN_ARTIFACTS = re.compile(r"/artifacts/([^/\0]+)")


def _folders(parent: Path) -> list[str]:
    if not parent.is_dir():
        return []
    return sorted(path.name for path in parent.iterdir() if path.is_dir() and path.name[0] != ".")


def _artifact(store: Store, name: str, aliased: frozenset[str]) -> ArtifactRecord:
    folder = store.artifacts / name
    in_use = name in aliased or locks.is_shared(store.marks, f"artifacts/{name}")
    try:
        manifest = Manifest.read(folder)
        created = datetime.fromisoformat(manifest.created_at).timestamp()
    except (StoreError, ValueError):
        return ArtifactRecord(name, newest_change(folder), in_use=in_use)
    return ArtifactRecord(name, created, parent_names(store, manifest) - {name}, in_use)


def _run(store: Store, name: str, recorded: _Recorded) -> RunRecord:
    folder = store.runs / name
    execution = recorded.executions.get(name)
    started_at = execution.started_at if execution else _started(folder)
    input_names = named_artifacts(store, execution.inputs) if execution else ()
    return RunRecord(
        name,
        started_at=started_at,
        artifacts=recorded.uses.get(name, frozenset()).union(input_names),
        pinned=(folder / PINNED).exists(),
        running=is_alive(store, name) or time.time() - started_at < _START_SECONDS,
    )


def _started(folder: Path) -> float:
    try:
        stamp = datetime.strptime(folder.name.partition("-")[0], "%Y%m%dT%H%M%SZ")
    except ValueError:
        return newest_change(folder)
    return stamp.replace(tzinfo=UTC).timestamp()


def _read_history(store: Store) -> _Recorded:
    if not path_of(store).exists():
        return _Recorded({}, {})
    try:
        with History(store) as history:
            executions = {run.id: run for run in _all_executions(history)}
            uses = {name: frozenset(history.artifacts_used(name)) for name in executions}
    except StoreError as error:
        return _Recorded({}, {}, problem=error.in_one_line)
    return _Recorded(executions, uses)


def _all_executions(history: History) -> Iterator[Execution]:
    offset, total = 0, 1
    while offset < total:
        page = history.executions(limit=500, offset=offset)
        if page.damaged:  # the artifacts of the damaged run are unknown
            raise StoreError(page.damaged[0])
        yield from page.items
        offset, total = offset + 500, page.total
