"""Access to the Hugging Face hub: one short probe in place of minutes of retries.

Without a network, the hub's libraries try again for up to a minute before each of them looks into
its cache. Here the hub is asked once. If nothing answers, the libraries work offline, as with
`HF_HUB_OFFLINE=1`: what the cache has is used, and for the rest their error comes at once.
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PROBE_SECONDS = 5.0
_SECONDS_OF_TRUST = 60.0
"""How long the hub counts as reached after it has answered."""

_reached: dict[str, float] = {}


@contextmanager
def hub_access(name: str | Path) -> Iterator[str]:
    """Within it, libraries of the hub do not wait for a network that is not there.

    Args:
        name: What is to be loaded. For a folder of this machine nothing is probed.

    Yields:
        Why the hub cannot be reached; empty if it can, or is not needed.
    """
    if Path(name).expanduser().exists():
        yield ""
        return
    from huggingface_hub import constants

    problem = "" if constants.is_offline_mode() else _unreachable(constants.ENDPOINT)
    retries = logging.getLogger("huggingface_hub.utils._http")
    level = retries.level
    retries.setLevel(logging.ERROR)  # five lines a file for what the error says once
    try:
        with _offline(is_offline=bool(problem)):
            yield problem
    finally:
        retries.setLevel(level)


def hub_folder(kind: str, name: str) -> Path:
    """Where the hub's cache has, or will have, the files of a repository.

    Args:
        kind: "model" or "dataset".
        name: As `organization/name`.
    """
    from huggingface_hub import constants

    # Not by `repo_folder_name`, which refuses what is no name: the download's own error is better.
    return Path(constants.HF_HUB_CACHE) / "--".join([f"{kind}s", *name.split("/")])


def _unreachable(endpoint: str) -> str:
    """Why nothing answers at the hub, a mirror (`HF_ENDPOINT`) or their proxy; empty if it does.

    Any answer will do, also one that refuses, and so does a server that takes its time.
    """
    import httpx2  # what huggingface_hub asks with
    from huggingface_hub import get_session

    if time.monotonic() - _reached.get(endpoint, -_SECONDS_OF_TRUST) < _SECONDS_OF_TRUST:
        return ""
    try:
        # With the proxies and certificates of the user.
        get_session().head(endpoint, timeout=_PROBE_SECONDS)
    except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError) as error:
        return f"no answer from {endpoint}: {str(error) or type(error).__name__}"
    except httpx2.HTTPError:
        pass  # it is there, and its own error is better than this one
    _reached[endpoint] = time.monotonic()
    return ""


@contextmanager
def _offline(*, is_offline: bool) -> Iterator[None]:
    if not is_offline:
        yield
        return
    from huggingface_hub import constants

    # `datasets` has a copy of the setting, made when it was imported.
    settings = [(constants, "HF_HUB_OFFLINE")]
    if "datasets.config" in sys.modules:
        config = sys.modules["datasets.config"]
        settings += [(config, "HF_HUB_OFFLINE"), (config, "HF_DATASETS_OFFLINE")]
    before = [getattr(module, name) for module, name in settings]
    for module, name in settings:
        setattr(module, name, True)
    try:
        yield
    finally:
        for (module, name), value in zip(settings, before, strict=True):
            setattr(module, name, value)
