"""`nemo-rl verify`: checks the content of a store against its records.

Files without a hash (decks, metrics) are not checked. A missing parent is only a warning, since
the artifact is intact and only its lineage is incomplete.
"""

import json
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from nemo_rl_core.errors import StoreError, UnsafePathError
from nemo_rl_core.history.database import FILE, open_for_reading, path_of
from nemo_rl_core.store import locks
from nemo_rl_core.store.manifest import Manifest, ParentRef
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store, damage

_REPAIR = "`--repair` sets it aside; its stage runs again"
_RERUN = "`nemo-rl verify --repair` sets it aside; its stage then runs again"


@dataclass(frozen=True)
class Finding:
    """A problem in a store.

    Attributes:
        state: "fail" for damage, "warn" for a problem that affects no run.
    """

    path: str
    state: Literal["warn", "fail"]
    problem: str
    fix: str
    repaired: bool = False


@dataclass(frozen=True)
class Verdict:
    """Result of a verification."""

    num_artifacts: int
    num_bytes: int
    findings: tuple[Finding, ...]

    @property
    def is_sound(self) -> bool:
        """True if nothing is damaged or all damage was set aside."""
        return all(each.state == "warn" or each.repaired for each in self.findings)


def verify(
    store: Store,
    names: Sequence[str] = (),
    *,
    num_threads: int = 2,
    on_checked: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Checks artifacts, and without names also records of work, the history and the stage cache.

    A name is that of a folder, its prefix, or a path inside it. Removed artifacts are not findings.
    """
    chosen = [_find(store, name) for name in names] if names else _all_artifacts(store)

    def check(folder: Path) -> tuple[int, list[Finding]]:
        result = _check_artifact(store, folder)
        on_checked(folder.name)
        return result

    with ThreadPoolExecutor(num_threads) as pool:
        checked = list(pool.map(check, chosen))
    # Each child of a damaged parent reports it.
    findings = list(
        dict.fromkeys(finding for _, findings_of_one in checked for finding in findings_of_one)
    )
    if not names:
        findings += [*_check_records(store), *_check_history(store), *_check_stage_cache(store)]
    return Verdict(len(checked), sum(size for size, _ in checked), tuple(findings))


def repair(store: Store, verdict: Verdict) -> Verdict:
    """Moves damaged artifacts and records into `damaged/`, except if runs may be using them."""
    return replace(verdict, findings=tuple(_repaired(store, each) for each in verdict.findings))


def _repaired(store: Store, finding: Finding) -> Finding:
    area = finding.path.partition("/")[0]
    if finding.state != "fail" or area not in ("artifacts", "work"):
        return finding
    with locks.exclusive(store.marks, finding.path) as free:
        if not free:
            return replace(finding, fix="a process uses it now; repair again when it has ended")
        try:
            aside = store.set_aside(store.root / finding.path)
        except FileNotFoundError:  # another process was faster
            return replace(finding, repaired=True)
    return replace(finding, repaired=True, fix=f"moved to {store.damaged.name}/{aside.name}")


def _all_artifacts(store: Store) -> list[Path]:
    return sorted(path for path in store.artifacts.glob("[!.]*") if path.is_dir())


def _find(store: Store, name: str) -> Path:
    path = Path(name).expanduser().resolve()
    if path.is_relative_to(store.artifacts) and path != store.artifacts:
        name = path.relative_to(store.artifacts).parts[0]
    matches = [each for each in _all_artifacts(store) if each.name.startswith(name)]
    exact = [each for each in matches if each.name == name]
    if len(exact or matches) != 1:
        raise StoreError(
            f"{'several artifacts begin' if matches else 'there is no artifact that begins'} "
            f"with {name!r}",
            expected="the name of one folder in the store's artifacts/, or its beginning",
            got=", ".join(each.name for each in matches[:5]) or "nothing of that name",
            fix="see `ls` of that folder, or `nemo-rl runs` for the artifacts of a run",
        )
    return (exact or matches)[0]


def _check_artifact(store: Store, folder: Path) -> tuple[int, list[Finding]]:
    location = f"artifacts/{folder.name}"
    try:
        manifest = Manifest.read(folder)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        problems = "; ".join(filter(None, [_misplaced(folder, manifest), damage(folder)]))
        findings = [Finding(location, "fail", problems, _RERUN)] if problems else []
    except StoreError as error:
        size, findings = 0, [Finding(location, "fail", error.in_one_line, _RERUN)]
    except OSError as error:
        size, findings = 0, [Finding(location, "fail", f"cannot be read: {error}", _RERUN)]
    else:
        for parent in manifest.parents:
            findings += _check_parent(store, location, parent)
    # An artifact that was removed while being read is not a finding.
    return (size, findings) if folder.is_dir() else (0, [])


def _misplaced(folder: Path, manifest: Manifest) -> str:
    stage = manifest.stage.partition(" ")[0]
    return "" if folder.name.startswith(f"{stage}-") else f"its manifest is of a {stage}"


def _check_parent(store: Store, child: str, parent: ParentRef) -> Iterator[Finding]:
    name = parent.name or Path(parent.path).name
    # Next to its child, since the store may have been moved or copied; else at the recorded path.
    lost = "its lineage ends there; nothing else needs it"
    try:
        in_store = resolve_below(store.artifacts, name, source=f"the manifest of {child}")
    except UnsafePathError as error:
        yield Finding(child, "warn", error.in_one_line, lost)
        return
    folder = next((each for each in (in_store, Path(parent.path)) if each.is_dir()), None)
    if folder is None:
        yield Finding(child, "warn", f"its parent {name} is gone", lost)
        return
    try:
        manifest = Manifest.read(folder)
    except StoreError:
        return  # reported when the parent itself is checked
    if manifest.content_hash != parent.content_hash:
        yield Finding(child, "warn", f"its parent {name} has another content hash now", lost)
    elif not parent.is_of(manifest):
        problem = "its manifest differs from the one that its children were made from"
        if folder.parent == store.artifacts:
            yield Finding(f"artifacts/{folder.name}", "fail", problem, _RERUN)
        else:
            yield Finding(child, "warn", f"about its parent {name}: {problem}", lost)


def _check_records(store: Store) -> Iterator[Finding]:
    """Checks that the record of each finished stage is intact and names a matching artifact."""
    for path in sorted(store.work.glob("[!.]*.done")):
        location = f"work/{path.name}"
        try:
            record = json.loads(path.read_text())
            name, digest = str(record["artifact"]), str(record["content_hash"])
            artifact = resolve_below(store.artifacts, name, source=path.name)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"a damaged record: {error!r}"
            yield Finding(location, "fail", problem, _REPAIR)
            continue
        # An artifact's name is its stage, a hyphen and 16 digits of the hash.
        if not name.endswith(f"-{digest[:16]}") or not path.name.startswith(name[:-17] + "-"):
            problem = f"it names {name}, which contradicts its own hash or stage"
            yield Finding(location, "fail", problem, _REPAIR)
        elif not artifact.is_dir():
            yield Finding(
                location, "warn", f"it names {name}, which is gone", "`nemo-rl gc` removes it"
            )


def _check_history(store: Store) -> Iterable[Finding]:
    """Checks the database of runs against the folders that it names."""
    location = path_of(store).name
    fix = "end all runs and move history.db* away; the next run creates it, and no artifact is lost"
    if not path_of(store).exists():
        return []
    try:
        with closing(open_for_reading(store)) as database:
            return [
                Finding(location, "fail", each, fix) for each in _history_damage(store, database)
            ]
    except (StoreError, sqlite3.Error) as error:
        problem = error.in_one_line if isinstance(error, StoreError) else str(error)
        return [Finding(location, "fail", problem, fix)]


def _check_stage_cache(store: Store) -> Iterator[Finding]:
    """Checks Flyte's database of finished stages."""
    path = store.cache / "flyte" / "cache.db"
    if not path.is_file():
        return
    fix = f"end all runs and move {path.parent} away; finished stages are found in the store"
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
            problems = [row[0] for row in database.execute("PRAGMA integrity_check(1)")]
    except sqlite3.Error as error:
        problems = [str(error)]
    if problems != ["ok"]:
        yield Finding("cache/flyte/cache.db", "fail", problems[0], fix)


def _history_damage(store: Store, database: sqlite3.Connection) -> Iterator[str]:
    for (message,) in database.execute("PRAGMA integrity_check(100)"):
        # SQLite up to 3.40 confuses columns of WITHOUT ROWID tables in this check and reports
        # NULLs that do not exist; writers do enforce NOT NULL.
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
