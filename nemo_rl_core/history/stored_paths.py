"""Where files lie, as the database holds it: a store that is moved takes its record along.

What lies in the store is named from there, what lies elsewhere by its whole path.
"""

from pathlib import Path

from nemo_rl_core.store.store import Store


def to_record(store: Store, path: Path | str) -> str:
    """A path as the database holds it; nothing stays nothing.

    Example:
        >>> to_record(Store(Path("/store")), "/store/runs/one/run.log")
        'runs/one/run.log'
    """
    inside = path != "" and Path(path).is_relative_to(store.root)
    return str(Path(path).relative_to(store.root)) if inside else str(path)


def from_record(store: Store, recorded: str) -> str:
    """Where it lies now.

    Example:
        >>> from_record(Store(Path("/moved")), "runs/one/run.log")
        '/moved/runs/one/run.log'
    """
    return str(store.root / recorded) if recorded else ""
