"""Paths as the database stores them, so that a store can be moved.

Paths in the store are relative to it, others are absolute.
"""

from pathlib import Path

from nemo_rl_core.store.store import Store


def to_stored(store: Store, path: Path | str) -> str:
    """Returns a path as the database stores it; an empty path stays empty.

    Example:
        >>> to_stored(Store(Path("/store")), "/store/runs/one/run.log")
        'runs/one/run.log'
    """
    inside = path != "" and Path(path).is_relative_to(store.root)
    return str(Path(path).relative_to(store.root)) if inside else str(path)


def from_stored(store: Store, stored: str) -> str:
    """Returns the current path.

    Example:
        >>> from_stored(Store(Path("/moved")), "runs/one/run.log")
        '/moved/runs/one/run.log'
    """
    return str(store.root / stored) if stored else ""
