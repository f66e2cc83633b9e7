"""Paths in the database, relative to the store if inside of it, so that it can be moved."""

from pathlib import Path

from nemo_rl_core.history.database import FILE
from nemo_rl_core.store.paths import checked_name, resolve_below
from nemo_rl_core.store.store import Store


def to_stored(store: Store, path: Path | str) -> str:
    """Returns the form of a path in the database; an empty path stays empty.

    Example:
        >>> to_stored(Store(Path("/store")), "/store/runs/one/run.log")
        'runs/one/run.log'
    """
    is_in_store = path != "" and Path(path).is_relative_to(store.root)
    return str(Path(path).relative_to(store.root)) if is_in_store else str(path)


def from_stored(store: Store, stored: str, *, may_be_outside: bool = False) -> str:
    """Returns the current path.

    Args:
        may_be_outside: Whether an absolute path is accepted; the caller must check its content.

    Example:
        >>> from_stored(Store(Path("/moved")), "runs/one/run.log")
        '/moved/runs/one/run.log'
    """
    if not stored:
        return ""
    if may_be_outside and stored.startswith("/"):
        return "/" + checked_name(stored[1:], source=FILE)
    # `artifacts` itself may be a link to another disk.
    area, _, name = checked_name(stored, source=FILE).partition("/")
    root, name = (store.root / area, name) if name else (store.root, area)
    return str(resolve_below(root, name, source=FILE))
