"""Rows of the database as records. A damaged row is refused with its table, key and column."""

import functools
import json
import sqlite3
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from nemo_rl_core.errors import DamagedRecordError, StoreError, UnsafePathError
from nemo_rl_core.history.database import FILE
from nemo_rl_core.history.records import ArtifactRow, Execution
from nemo_rl_core.history.stored_paths import from_stored
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store

T = TypeVar("T")

_JSON = {"command", "inputs", "packages", "machine", "cost", "manifest", "point"}
_PATHS = {"log_path", "deck_path", "path"}
_OUTSIDE = {"deck_path", "path"}
_MAX_DEPTH = 64


def read_row(kind: type[T], row: sqlite3.Row, *, table: str, key: str, store: Store) -> T:
    """Returns a row as a record; refuses columns with wrong JSON, wrong types or unsafe paths."""
    fields = dict(row)
    try:
        fields |= {name: _parsed(name, fields[name]) for name in _JSON & fields.keys()}
        for name in _PATHS & fields.keys():
            fields[name] = from_stored(store, fields[name], may_be_outside=name in _OUTSIDE)
        record: T = _adapter(kind).validate_python(fields)  # type: ignore[arg-type]  # a class has a hash
        if isinstance(record, ArtifactRow):
            Manifest.model_validate(record.manifest)
            _refuse_other_folder(store, record)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        column = ".".join(map(str, first["loc"])) or "manifest"
        problem = f"{column}: {first['msg']} (got {first['input']!r:.60})"
    except StoreError as error:
        problem = error.in_one_line
    except (ValueError, TypeError, AttributeError) as error:
        problem = str(error)
    else:
        return record
    raise DamagedRecordError(
        f"the row {str(row[key])[:120]!r} of the table {table} in {FILE} is damaged",
        expected="a row written by a run",
        got=problem,
        fix=f"end all runs, then restore {FILE} from a backup, or move it away: the next run "
        "creates a new one, and no artifact is lost",
    )


def read_execution(row: sqlite3.Row, store: Store) -> Execution:
    """Returns a row of `executions`; see `read_row` for arguments and errors."""
    return read_row(Execution, row, table="executions", key="id", store=store)


def read_artifact(row: sqlite3.Row, store: Store) -> ArtifactRow:
    """Returns a row of `artifacts`; see `read_row` for arguments and errors."""
    return read_row(ArtifactRow, row, table="artifacts", key="id", store=store)


@functools.cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _parsed(column: str, text: Any) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{column}: not JSON: {error}") from error
    if _is_deeper(value, _MAX_DEPTH):
        raise ValueError(f"{column}: JSON of more than {_MAX_DEPTH} levels")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    children = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    )
    return levels < 0 or any(_is_deeper(each, levels - 1) for each in children)


def _refuse_other_folder(store: Store, artifact: ArtifactRow) -> None:
    folder = Path(artifact.path)
    if folder.is_relative_to(store.root) or not folder.exists():
        return
    try:
        if Manifest.read(folder).content_hash == artifact.content_hash:
            return
    except StoreError:
        pass
    raise UnsafePathError(
        "path: a folder outside of the store that is not this artifact", got=artifact.path[:200]
    )
