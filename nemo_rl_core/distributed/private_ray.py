"""A local Ray that only its user can reach: on loopback, with a token and a private folder."""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl_core.errors import ResourceError

_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_MODE = "RAY_AUTH_MODE"


def ray_folder() -> Path:
    """Returns the folder of this user's Ray sessions.

    Ray makes its folders, with logs and sockets, writable by everyone; so their parent is private.
    """
    base = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return Path(base) / f"ray-{os.getuid()}" / "ray"


@contextmanager
def private_start() -> Iterator[Path]:
    """Makes `ray.init` listen on loopback only and use a new token.

    Ray resolves `_node_ip_address="127.0.0.1"` to the network address unless the constant
    `ENABLE_RAY_CLUSTER` is False. The token is only in the environment of Ray's processes, which
    only their user can read. A token that the user has set is kept.

    Yields:
        The folder for Ray's sessions.

    Raises:
        ResourceError: If another user created that folder.
    """
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    previous = {name: os.environ.get(name) for name in (*_TOKENS, _MODE)}
    is_cluster = ray_constants.ENABLE_RAY_CLUSTER
    if not any(previous[name] for name in _TOKENS) and previous[_MODE] != "disabled":
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    AuthenticationTokenLoader.instance().reset_cache()  # else the token of an earlier Ray is used
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield _private_folder()
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = is_cluster
        for name, value in previous.items():  # nothing else in this process needs them
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _private_folder() -> Path:
    folder = ray_folder()
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.parent.is_symlink() or folder.parent.stat().st_uid != os.getuid():
        raise ResourceError(
            f"Ray's sessions cannot be kept in {folder.parent}",
            expected="a folder of this user, or no folder yet",
            got="a folder or link that another user created",
            fix="set RAY_TMPDIR to one of your folders",
        )
    folder.parent.chmod(0o700)
    return folder
