"""`nemo-rl verify`: checks the content of a store against its records.

Content is hashed and compared with manifests; manifests are compared with their checksums and with
the hashes in their children; records of work and the history are compared with the folders. Files
without a hash (decks, metrics) are not checked. A missing parent is a warning: the artifact is
intact, its lineage is not.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_rl_core.errors import StoreError, UnsafePathError
from nemo_rl_core.maintenance.verify_records import (
    Finding,
    check_history,
    check_records,
    check_stage_cache,
)
from nemo_rl_core.store import locks
from nemo_rl_core.store.manifest import Manifest, ParentRef
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store, damage

_RERUN = "`nemo-rl verify --repair` sets it aside; its stage then runs again"


@dataclass(frozen=True)
class Verdict:
    """Result of a verification.

    Attributes:
        num_artifacts: Number of hashed artifacts.
        num_bytes: Bytes that were read.
        findings: Problems, of artifacts first.
    """

    num_artifacts: int
    num_bytes: int
    findings: tuple[Finding, ...]

    @property
    def is_sound(self) -> bool:
        """True if nothing is damaged, or all damage was set aside."""
        return all(each.state == "warn" or each.repaired for each in self.findings)


def verify(
    store: Store,
    names: Sequence[str] = (),
    *,
    num_threads: int = 2,
    on_checked: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Checks artifacts; without names also the records of work, the history and the stage cache.

    Args:
        store: The store; artifacts that are removed meanwhile are no findings.
        names: Artifacts by folder name, prefix, or a path inside; empty for all.
        num_threads: Number of threads that hash.
        on_checked: Called with each artifact's name, for a display.

    Raises:
        StoreError: If a name matches no artifact or several.
    """
    chosen = [_find(store, name) for name in names] if names else _all_artifacts(store)

    def check(folder: Path) -> tuple[int, list[Finding]]:
        found = _check_artifact(store, folder)
        on_checked(folder.name)
        return found

    with ThreadPoolExecutor(num_threads) as pool:
        checked = list(pool.map(check, chosen))
    # A parent is found once for each of its children.
    findings = list(dict.fromkeys(finding for _, found in checked for finding in found))
    if not names:
        findings += [*check_records(store), *check_history(store), *check_stage_cache(store)]
    return Verdict(len(checked), sum(size for size, _ in checked), tuple(findings))


def repair(store: Store, verdict: Verdict) -> Verdict:
    """Moves damaged artifacts and records into `damaged/`.

    An artifact that a process uses stays, and so does a damaged history: runs may be writing it.
    """
    return replace(verdict, findings=tuple(_repaired(store, each) for each in verdict.findings))


def _repaired(store: Store, finding: Finding) -> Finding:
    area = finding.place.partition("/")[0]
    if finding.state != "fail" or area not in ("artifacts", "work"):
        return finding
    with locks.exclusive(store.marks, finding.place) as free:
        if not free:
            return replace(finding, fix="a process uses it now; repair again when it has ended")
        try:
            aside = store.set_aside(store.root / finding.place)
        except FileNotFoundError:  # another process was quicker
            return replace(finding, repaired=True)
    return replace(finding, repaired=True, fix=f"moved to {store.damaged.name}/{aside.name}")


def _all_artifacts(store: Store) -> list[Path]:
    return sorted(path for path in store.artifacts.glob("[!.]*") if path.is_dir())


def _find(store: Store, name: str) -> Path:
    path = Path(name).expanduser().resolve()
    if path.is_relative_to(store.artifacts) and path != store.artifacts:
        name = path.relative_to(store.artifacts).parts[0]
    found = [each for each in _all_artifacts(store) if each.name.startswith(name)]
    exact = [each for each in found if each.name == name]
    if len(exact or found) != 1:
        raise StoreError(
            f"{'several artifacts begin' if found else 'there is no artifact that begins'} "
            f"with {name!r}",
            expected="the name of one folder in the store's artifacts/, or its beginning",
            got=", ".join(each.name for each in found[:5]) or "nothing of that name",
            fix="see `ls` of that folder, or `nemo-rl runs` for what a run has made",
        )
    return (exact or found)[0]


def _check_artifact(store: Store, folder: Path) -> tuple[int, list[Finding]]:
    place = f"artifacts/{folder.name}"
    try:
        manifest = Manifest.read(folder)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        problems = "; ".join(filter(None, [_misplaced(folder, manifest), damage(folder)]))
        findings = [Finding(place, "fail", problems, _RERUN)] if problems else []
    except StoreError as error:
        size, findings = 0, [Finding(place, "fail", error.in_one_line, _RERUN)]
    except OSError as error:
        size, findings = 0, [Finding(place, "fail", f"cannot be read: {error}", _RERUN)]
    else:
        for parent in manifest.parents:
            findings += _check_parent(store, place, parent)
    # Removed while it was read: no finding.
    return (size, findings) if folder.is_dir() else (0, [])


def _misplaced(folder: Path, manifest: Manifest) -> str:
    stage = manifest.stage.partition(" ")[0]
    return "" if folder.name.startswith(f"{stage}-") else f"its manifest is of a {stage}"


def _check_parent(store: Store, child: str, parent: ParentRef) -> Iterator[Finding]:
    """Compares a parent with the reference in its child's manifest."""
    name = parent.name or Path(parent.path).name
    # Beside its child, as the store may have been moved or copied; else at the recorded path.
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
        problem = "its manifest is not the one that its children were made from"
        if folder.parent == store.artifacts:
            yield Finding(f"artifacts/{folder.name}", "fail", problem, _RERUN)
        else:
            yield Finding(child, "warn", f"of its parent {name}: {problem}", lost)
