"""Checks of what the store keeps beside artifacts: records of stages, history, Flyte's cache."""

import json
import re
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from nemo_rl_core.errors import StoreError, UnsafePathError
from nemo_rl_core.history.database import FILE, open_for_reading, path_of
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store


@dataclass(frozen=True)
class Finding:
    """A problem in a store.

    Attributes:
        place: Path relative to the store's root.
        state: "fail" for damage, "warn" for a problem that affects no run.
        problem: Description of the problem.
        fix: The fix.
        repaired: True if it was fixed.
    """

    place: str
    state: Literal["warn", "fail"]
    problem: str
    fix: str
    repaired: bool = False


def check_records(store: Store) -> Iterator[Finding]:
    """Checks the record of each finished stage: whole, and of an artifact of its own name."""
    for path in sorted(store.work.glob("[!.]*.done")):
        place = f"work/{path.name}"
        try:
            record = json.loads(path.read_text())
            name, digest = str(record["artifact"]), str(record["content_hash"])
            artifact = resolve_below(store.artifacts, name, source=path.name)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"a damaged record: {error!r}"
            yield Finding(place, "fail", problem, "`--repair` sets it aside; its stage runs again")
            continue
        if not name.endswith(f"-{digest[:16]}") or not path.name.startswith(name[:-17] + "-"):
            problem = f"it names {name}, which contradicts its own hash or stage"
            yield Finding(place, "fail", problem, "`--repair` sets it aside; its stage runs again")
        elif not artifact.is_dir():
            yield Finding(
                place, "warn", f"it names {name}, which is gone", "`nemo-rl gc` removes it"
            )


def check_history(store: Store) -> Iterable[Finding]:
    """Checks the database of runs, and that the folders it names are there."""
    place = path_of(store).name
    fix = "end all runs, move history.db* away: the next run creates a new one, no artifact is lost"
    if not path_of(store).exists():
        return []
    try:
        with closing(open_for_reading(store)) as database:
            return [Finding(place, "fail", each, fix) for each in _history_damage(store, database)]
    except (StoreError, sqlite3.Error) as error:
        problem = error.in_one_line if isinstance(error, StoreError) else str(error)
        return [Finding(place, "fail", problem, fix)]


def check_stage_cache(store: Store) -> Iterator[Finding]:
    """Checks the database in which Flyte remembers finished stages."""
    path = store.cache / "flyte" / "cache.db"
    if not path.is_file():
        return
    fix = f"end all runs, move {path.parent} away: finished stages are found in the store again"
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
            problems = [row[0] for row in database.execute("PRAGMA integrity_check(1)")]
    except sqlite3.Error as error:
        problems = [str(error)]
    if problems != ["ok"]:
        yield Finding("cache/flyte/cache.db", "fail", problems[0], fix)


def _history_damage(store: Store, database: sqlite3.Connection) -> Iterator[str]:
    for (message,) in database.execute("PRAGMA integrity_check(100)"):
        # SQLite up to 3.40 confuses columns of WITHOUT ROWID tables in this check, and reports
        # NULLs that do not exist; its writers do enforce NOT NULL.
        if message != "ok" and not message.startswith("NULL value in"):
            yield re.sub(r"\s+", " ", message)
    broken = database.execute("PRAGMA foreign_key_check").fetchall()
    if broken:
        yield f"{len(broken)} rows refer to missing rows, such as in the table {broken[0][0]}"
    for row in database.execute("SELECT id, content_hash FROM artifacts"):
        try:
            folder = resolve_below(store.artifacts, str(row["id"]), source=FILE)
            content = Manifest.read(folder).content_hash
        except UnsafePathError as error:
            yield error.in_one_line
            continue
        except StoreError:
            continue  # removed, or reported as damaged
        if content != row["content_hash"]:
            yield f"it records {row['id']} with another content hash"
