"""`nemo-rl usage`: disk usage in allocated blocks; the parts sum to the total of `du`."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_core.errors import StoreError
from nemo_rl_core.maintenance.disk import DiskUse, Snapshot, allocated
from nemo_rl_core.maintenance.retention import with_ancestors
from nemo_rl_core.maintenance.survey import Survey, survey
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store


@dataclass(frozen=True)
class Share:
    """A part of the store; a file with several hard links counts in the first part."""

    name: str
    count: int
    num_bytes: int


@dataclass(frozen=True)
class RunShare:
    """Disk usage of a run, its artifacts and their ancestors; no other run uses `only_bytes`."""

    name: str
    num_bytes: int
    only_bytes: int


@dataclass(frozen=True)
class Usage:
    """Disk usage of a store, by area, stage and kind, and by run, newest first.

    Areas sum to `num_bytes`, stages to the area `artifacts`; the share `.` is the folder itself.
    Runs overlap, so their sum has no meaning.
    """

    num_bytes: int
    areas: tuple[Share, ...]
    stages: tuple[Share, ...]
    kinds: tuple[Share, ...]
    runs: tuple[RunShare, ...]
    problem: str = ""


def measure_disk(store: Store) -> Usage:
    """Measures the store without changing anything."""
    surveyed = survey(store)
    artifacts = _by_label(store, surveyed.artifacts)
    return Usage(
        num_bytes=allocated(store.root),
        areas=_areas(store),
        stages=_shares(store, {name: stage for name, (stage, _) in artifacts.items()}),
        kinds=_shares(store, {name: kind for name, (_, kind) in artifacts.items()}),
        runs=_runs(store, surveyed),
        problem=surveyed.problem,
    )


def _areas(store: Store) -> tuple[Share, ...]:
    use = DiskUse()
    areas = []
    for path in sorted(store.root.iterdir()) if store.root.is_dir() else ():
        count = len(list(path.iterdir())) if path.is_dir() and not path.is_symlink() else 1
        areas.append(Share(path.name, count, use.add(path)))
    return (*areas, Share(".", 1, use.add(store.root)))


def _by_label(store: Store, names: Iterable[str]) -> dict[str, tuple[str, str]]:
    labels = {}
    for name in names:
        try:
            manifest = Manifest.read(store.artifacts / name)
        except StoreError:
            labels[name] = ("damaged", "damaged")
        else:
            labels[name] = (manifest.stage.partition(" ")[0], manifest.kind)
    return labels


def _shares(store: Store, labels: Mapping[str, str]) -> tuple[Share, ...]:
    use = DiskUse()
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for name, label in sorted(labels.items()):
        counts[label] = counts.get(label, 0) + 1
        sizes[label] = sizes.get(label, 0) + use.add(store.artifacts / name)
    shares = [Share(label, counts[label], sizes[label]) for label in sizes]
    remainder = Share(".", 1, use.add(store.artifacts))
    return (*sorted(shares, key=lambda share: -share.num_bytes), remainder)


def _runs(store: Store, surveyed: Survey) -> tuple[RunShare, ...]:
    snapshot = Snapshot(store.root)
    needs = {run.name: with_ancestors(run.artifacts, surveyed.artifacts) for run in surveyed.runs}
    num_users = Counter(name for names in needs.values() for name in names)

    def paths(run: str, names: Iterable[str]) -> list[Path]:
        return [store.runs / run, *(store.artifacts / name for name in names)]

    shares = []
    for run in reversed(surveyed.runs):
        exclusive = [name for name in needs[run.name] if num_users[name] == 1]
        use = DiskUse()
        for path in paths(run.name, needs[run.name]):
            use.add(path)
        only = snapshot.freed_by(paths(run.name, exclusive))
        shares.append(RunShare(run.name, use.num_bytes, only))
    return tuple(shares)
