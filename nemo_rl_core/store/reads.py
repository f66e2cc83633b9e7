"""Records of inputs that user code read in a stage, and their comparison with current inputs.

The files, modules and variables that user code reads are only known after a run (`watching`). They
are recorded in `reads/ARTIFACT.json` of the store: a later cache hit counts only if every recorded
input is unchanged. An artifact without a record is always a hit.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from nemo_rl_core.store.files import hash_file, storage_errors, write_atomic
from nemo_rl_core.store.source_files import read_source
from nemo_rl_core.store.user_source import package_version

logger = logging.getLogger(__name__)
Reads = dict[str, str]
"""Digests by input: `file PATH`, `module PATH`, `folder PATH`, `variable NAME` or `package NAME`.

The digest of a missing input is empty. A path below the current directory begins with `./`."""

_RECORD = TypeAdapter(list[Reads])
_MAX_KEPT = 32


def present_digest(name: str) -> str:
    """Returns the current digest of an input; empty if it does not exist."""
    kind, _, rest = name.partition(" ")
    if kind == "variable":
        return digest_of_variable(rest, os.environ.get(rest))
    try:
        if kind == "package":
            return package_version(rest)
        path = Path(rest)
        if kind == "folder":
            return _digest_of_names(path)
        return _digest_of_source(path) if kind == "module" else hash_file(path)
    except OSError:
        return ""


def digest_of_variable(name: str, value: str | None) -> str:
    """Returns a digest of an environment variable; empty if it is not set."""
    if value is None:
        return ""
    return hashlib.sha256(f"{name}={value}".encode(errors="surrogateescape")).hexdigest()


def changed_inputs(reads: Mapping[str, str]) -> list[str]:
    """Returns the names of the recorded inputs that have changed."""
    return [name for name, digest in reads.items() if present_digest(name) != digest]


def read_record(path: Path) -> list[Reads]:
    """Returns the sets of inputs in a record, newest first; none without a record."""
    try:
        return _RECORD.validate_json(path.read_bytes())
    except FileNotFoundError:
        return []
    except ValidationError:
        return [{"variable": "damaged record"}]  # matches nothing: the stage runs again


def is_current(path: Path) -> bool:
    """Whether the record is missing, or the inputs of some run in it are unchanged."""
    sets = read_record(path)
    return not sets or any(not changed_inputs(each) for each in sets)


def add_to_record(path: Path, reads: Reads) -> None:
    """Adds a set of inputs to a record, unless it is empty: every later hit would count then."""
    earlier = read_record(path)
    if reads and reads not in earlier[:1]:
        write_record(path, [reads, *(each for each in earlier if each != reads)][:_MAX_KEPT])


def write_record(path: Path, sets: list[Reads]) -> None:
    """Writes a record."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(sets, indent=1, sort_keys=True))


def _digest_of_names(folder: Path) -> str:
    names = sorted(each.name for each in os.scandir(folder) if each.name[0] not in "._")
    return hashlib.sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()


def _digest_of_source(path: Path) -> str:
    try:
        return read_source(path, path.stem).digest
    except (SyntaxError, ValueError):
        return hash_file(path)


def recorded_names(record: Path) -> list[str]:
    """Returns the names of artifacts in the record of a stage and key, newest first."""
    try:
        fields = json.loads(record.read_text())
        return [str(fields["artifact"]), *map(str, fields.get("earlier", ()))]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError):
        logger.warning("ignoring the damaged record %s: the stage runs again", record)
        return []
