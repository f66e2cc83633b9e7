"""The state file in a checkpoint's `trainer/`, in the same format for every backend."""

import json
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import StoreError

STATE_NAME = "state.json"
"""Name of the file in a checkpoint's `trainer/`."""

STATE_FILE = f"trainer/{STATE_NAME}"
"""Path of the file in a checkpoint."""


def write_state(trainer: Path, *, backend: str, num_updates: int, **more: Any) -> None:
    """Writes the backend, the number of optimizer steps, and further fields."""
    state = {"backend": backend, "num_updates": num_updates, **more}
    (trainer / STATE_NAME).write_text(json.dumps(state))


def read_state(trainer: Path, *, backend: str) -> dict[str, Any]:
    """Reads the fields that `write_state` wrote."""
    state: dict[str, Any] = json.loads((trainer / STATE_NAME).read_text())
    if state["backend"] != backend:
        raise StoreError(
            f"cannot resume from {trainer} with the backend {backend!r}",
            expected=f"a checkpoint that {backend!r} wrote",
            got=f"one that {state['backend']!r} wrote",
            fix=f"set training.backend to {state['backend']!r}, or start a run from its `model/`",
        )
    return state


def saved_by(checkpoint: Path) -> str | None:
    """Returns the backend that wrote a checkpoint's `trainer/`; None if there is none."""
    path = checkpoint / STATE_FILE
    return str(json.loads(path.read_text())["backend"]) if path.exists() else None
