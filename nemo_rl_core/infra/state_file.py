"""What a checkpoint's `trainer/` says of itself, whichever backend wrote it."""

import json
from pathlib import Path

from nemo_rl_core.errors import StoreError

_NAME = "state.json"


def write_state(trainer: Path, *, backend: str, num_updates: int) -> None:
    """Writes which backend the folder is of, and how many optimizer steps it has made."""
    (trainer / _NAME).write_text(json.dumps({"backend": backend, "num_updates": num_updates}))


def read_num_updates(trainer: Path, *, backend: str) -> int:
    """How many optimizer steps the folder's state has made.

    Raises:
        StoreError: If another backend wrote it.
        OSError: If there is no such folder.
        ValueError: If its file is damaged.
    """
    state = json.loads((trainer / _NAME).read_text())
    if state["backend"] != backend:
        raise StoreError(
            f"cannot go on from {trainer} with the backend {backend!r}",
            expected=f"a checkpoint that {backend!r} wrote",
            got=f"one that {state['backend']!r} wrote",
            fix=f"set training.backend to {state['backend']!r}, or start from its `model/` anew",
        )
    return int(state["num_updates"])


def saved_by(checkpoint: Path) -> str | None:
    """The backend that wrote a checkpoint's `trainer/`; None where there is nothing to go on from.

    Args:
        checkpoint: The folder that holds `model/` and, perhaps, `trainer/`.
    """
    path = checkpoint / "trainer" / _NAME
    return str(json.loads(path.read_text())["backend"]) if path.exists() else None
