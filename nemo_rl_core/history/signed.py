"""Signatures of run records with a key of this user, which is not in any store.

`nemo-rl reproduce` imports modules and unpickles objects that a record names, so a record written
by someone else could run any code.
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
    """Signs the part of a record that determines which code runs; skipped for a read-only home."""
    try:
        signature = _signature(_key(), execution, workflow, inputs, folder)
        path = store.runs / execution / _FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(signature)
    # A RuntimeError for a user without a home; a TypeError for keys that cannot be sorted.
    except (OSError, RuntimeError, TypeError) as error:
        logger.info("the record of %s is not signed: %s", execution, error)


def is_signed(store: Store, execution: Execution) -> bool:
    """Returns whether a run of this user wrote the record of an execution."""
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
    path = key_file()
    if not path.is_file():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new_path = path.with_name(f"key-{os.getpid()}-{secrets.token_hex(4)}")
        descriptor = os.open(new_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):  # created by another process
            os.link(new_path, path)
        new_path.unlink()
    return path.read_bytes()
