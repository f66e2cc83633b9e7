"""Signatures of run records with a key of this user, which no store holds.

`nemo-rl reproduce` imports modules and unpickles objects that a record names. A record that someone
else has written could name any code.
"""

import hmac
import json
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import UnsafePathError
from nemo_rl_core.history.records import Execution
from nemo_rl_core.store.paths import resolve_below
from nemo_rl_core.store.store import Store

logger = logging.getLogger(__name__)

_FILE = "signature"
_KEY_BYTES = 32


def key_file() -> Path:
    """Returns the file of this user's key: `nemo_rl/key` in XDG_CONFIG_HOME, else `~/.config`."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "nemo_rl" / "key"


def sign(
    store: Store, execution: str, *, workflow: str, inputs: Mapping[str, Any], folder: str
) -> None:
    """Signs the part of an execution's record that says which code runs.

    If the home folder cannot be written, the record stays unsigned, and the run continues.

    Args:
        store: Store of the record.
        execution: Id of the execution.
        workflow: Name of the workflow or trainer.
        inputs: Inputs of the workflow.
        folder: Working directory, from which modules are imported.
    """
    try:
        signature = _signature(_key(), execution, workflow, inputs, folder)
        path = store.runs / execution / _FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(signature)
    except (OSError, RuntimeError) as error:  # a RuntimeError for a user without a home
        logger.info("the record of %s is not signed: %s", execution, error)


def is_signed(store: Store, execution: Execution) -> bool:
    """Returns True if a run of this user has written the record of an execution."""
    try:
        key = key_file().read_bytes()
        folder = resolve_below(store.runs, execution.id, source="history.db")
        signature = (folder / _FILE).read_bytes()
    except (OSError, RuntimeError, UnsafePathError):
        return False
    expected = _signature(key, execution.id, execution.workflow, execution.inputs, execution.folder)
    return len(key) == _KEY_BYTES and hmac.compare_digest(signature, expected.encode())


def _signature(
    key: bytes, execution: str, workflow: str, inputs: Mapping[str, Any], folder: str
) -> str:
    text = json.dumps([execution, workflow, inputs, folder], sort_keys=True, default=str)
    return hmac.digest(key, text.encode(), "sha256").hex()


def _key() -> bytes:
    """Reads the key; the first process that needs one makes it."""
    path = key_file()
    if not path.is_file():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = path.with_name(f"key-{os.getpid()}-{secrets.token_hex(4)}")
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):  # of a process that was first
            os.link(made, path)
        made.unlink()
    return path.read_bytes()
