"""Names, tags, notes and pins that a person gives to runs; the record itself does not change.

They are in the file `labels.json` next to the database, except for pins: an empty file in the run's
folder, which also protects it from `nemo-rl gc`.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from nemo_rl_core.errors import StoreError
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.store.locks import locked
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store

LABELS = "labels.json"
PINNED = "pinned"


@dataclass(frozen=True, slots=True)
class Labels:
    """Name, tags and note of a run or a point of a sweep."""

    name: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""


NO_LABELS = Labels()


def read_labels(store: Store) -> dict[str, Labels]:
    """Returns the labels by id of the run, or of the point as in `results.RunRow`."""
    path = store.root / LABELS
    try:
        status = path.stat()
    except OSError:
        return {}
    return _parsed(path, status.st_mtime_ns, status.st_ino)


def rows_with(store: Store, *, name: str = "", text: str = "") -> list[str]:
    """Returns the ids of runs and points with this name, or with a text in any of their labels."""
    return [
        row
        for row, each in read_labels(store).items()
        if (name and name == each.name)
        or (text and text.casefold() in " ".join((each.name, *each.tags, each.note)).casefold())
    ]


def set_labels(
    store: Store,
    row: str,
    *,
    name: str | None = None,
    tags: Sequence[str] | None = None,
    note: str | None = None,
) -> Labels:
    """Changes the labels of a run that are not None, and returns all of them.

    The caller checks that the run exists, for example by `results.run_row`.
    """
    with locked(store.root / f"{LABELS}.lock", "labels"):
        labels = read_labels(store)
        before = labels.get(row, NO_LABELS)
        updated = Labels(
            before.name if name is None else name,
            before.tags if tags is None else tuple(tags),
            before.note if note is None else note,
        )
        texts = {key: asdict(each) for key, each in sorted((labels | {row: updated}).items())}
        write_atomic(store.root / LABELS, json.dumps(texts, indent=1))
    return updated


def pinned_runs(store: Store) -> set[str]:
    """Returns the ids of the pinned runs."""
    return {path.parent.name for path in store.runs.glob(f"*/{PINNED}")}


def set_pin(store: Store, run: str, *, pinned: bool) -> None:
    """Pins or unpins a run."""
    path = resolve_below(store.runs, run, source="the id of a run") / PINNED
    if pinned:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    else:
        path.unlink(missing_ok=True)


@functools.lru_cache(maxsize=4)
def _parsed(path: Path, _modified: int, _inode: int) -> dict[str, Labels]:
    try:
        return TypeAdapter(dict[str, Labels]).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise StoreError(
            f"the names and notes of runs in {path} cannot be read",
            expected="a file written by nemo-rl",
            got=str(error).splitlines()[0],
            fix="restore it from a backup, or move it away; runs and artifacts are not affected",
        ) from error
