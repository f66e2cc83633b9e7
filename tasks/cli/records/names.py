"""Runs and artifacts that arguments of commands name, and their completion in a shell."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from nemo_rl_core.history.queries import History
    from nemo_rl_core.history.records import Execution

_MAX_COMPLETIONS = 100


def find_run(history: "History", name: str | None) -> "Execution":
    """Returns a run by its name, its id or the beginning of one; the latest without any."""
    from nemo_rl_core.history.results import run_row

    latest = history.executions(limit=1).items
    if name is None and latest:
        return latest[0]
    return history.execution(run_row(history, name or "").run)


def refuse_ignored(other: str, *options: str) -> None:
    """Refuses options of the command line that have no effect with another one."""
    source = click.get_current_context().get_parameter_source
    if ignored := [f"--{each}" for each in options if source(each) != ParameterSource.DEFAULT]:
        raise click.UsageError(f"{', '.join(ignored)} has no effect with {other}")


def resolve_alias(_context: click.Context, _parameter: click.Parameter, name: str) -> str:
    """Replaces `alias:NAME` by the artifact that the name refers to."""
    from nemo_rl_core.store.aliases import located

    return located(name)


def artifact_folder(name: str) -> Path:
    """Returns the folder of an artifact: an existing path, or an id or the beginning of one.

    Also accepts the beginning of a content hash. A name that is none of these is returned as a
    path, so that its reader refuses it.
    """
    path = Path(name).expanduser()
    return path if path.exists() else _recorded_folder(name) or path


def model_folder(name: str) -> Path:
    """Returns the transformers folder of a model.

    Args:
        name: A folder, the folder of an artifact around it, an artifact's id, the beginning of its
            id or content hash, or `alias:` and the name of an alias.

    Returns:
        A folder with config.json; `name` itself if it does not name an artifact with a model.
    """
    from nemo_rl_core.store.aliases import located
    from nemo_rl_core.store.store import Store

    name = located(name)
    folder = Path(name).expanduser()
    for candidate in (folder, folder / "model", Store.default().artifacts / name / "model"):
        if (candidate / "config.json").is_file():
            return candidate
    artifact = None if folder.exists() else _recorded_folder(name)
    return folder if artifact is None else artifact / "model"


def _recorded_folder(name: str) -> Path | None:
    """Returns the folder of the only artifact of that id or beginning; None if there is none."""
    from nemo_rl_core.errors import StoreError
    from nemo_rl_core.history.database import path_of
    from nemo_rl_core.history.queries import History
    from nemo_rl_core.store.store import Store

    store = Store.default()
    if not path_of(store).is_file():
        return None
    with History(store) as history:
        try:
            return Path(history.find_artifact(name).path)
        except StoreError as error:
            if "several" in error.problem:
                raise
            return None


def complete_runs(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Completes the id of a run, the latest first."""
    return _completed("SELECT id, recipe FROM executions", "started_at", incomplete)


def complete_artifacts(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Completes the id of an artifact, the latest first, or a path."""
    items = _completed("SELECT id, stage FROM artifacts", "created_at", incomplete)
    return [*items, CompletionItem(incomplete, type="file")]


def _completed(query: str, order: str, incomplete: str) -> list[CompletionItem]:
    """Returns ids with their description; reads the database without its slower checks."""
    import sqlite3
    from contextlib import closing

    from nemo_rl_core.history.database import path_of
    from nemo_rl_core.store.store import Store

    path = path_of(Store.default())
    if not path.is_file():
        return []
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        rows = database.execute(
            f"{query} WHERE id GLOB ? ORDER BY {order} DESC LIMIT ?",
            (f"{incomplete}*", _MAX_COMPLETIONS),
        )
        return [CompletionItem(str(name), help=str(about)) for name, about in rows]
