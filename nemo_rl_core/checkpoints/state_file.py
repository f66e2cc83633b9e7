"""What a checkpoint's `trainer/` says of itself, whichever backend wrote it."""

import json
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import StoreError

_NAME = "state.json"


def write_state(trainer: Path, *, backend: str, num_updates: int, **more: Any) -> None:
    """Writes which backend the folder is of, how many optimizer steps it has made, and more."""
    state = {"backend": backend, "num_updates": num_updates, **more}
    (trainer / _NAME).write_text(json.dumps(state))


def read_state(trainer: Path, *, backend: str) -> dict[str, Any]:
    """What `write_state` wrote.

    Raises:
        StoreError: If another backend wrote it.
        OSError: If there is no such folder.
        ValueError: If its file is damaged.
    """
    state: dict[str, Any] = json.loads((trainer / _NAME).read_text())
    if state["backend"] != backend:
        raise StoreError(
            f"cannot go on from {trainer} with the backend {backend!r}",
            expected=f"a checkpoint that {backend!r} wrote",
            got=f"one that {state['backend']!r} wrote",
            fix=f"set training.backend to {state['backend']!r}, or start from its `model/` anew",
        )
    return state


def saved_by(checkpoint: Path) -> str | None:
    """The backend that wrote a checkpoint's `trainer/`; None where there is nothing to go on from.

    Args:
        checkpoint: The folder that holds `model/` and, perhaps, `trainer/`.
    """
    path = checkpoint / "trainer" / _NAME
    return str(json.loads(path.read_text())["backend"]) if path.exists() else None
