"""Access to the Hugging Face hub: one short probe in place of minutes of retries.

Without a network, the hub's libraries try again for up to a minute before each of them looks into
its cache. Here the hub is asked once. If nothing answers, the libraries work offline, as with
`HF_HUB_OFFLINE=1`: what the cache has is used, and for the rest their error comes at once.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from nemo_rl_core.config.url_secrets import redacted
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.store.store import Store

_LOG = logging.getLogger(__name__)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PROBE_SECONDS = 5.0
_SECONDS_OF_TRUST = 60.0
"""How long the hub counts as reached after it has answered."""

_reached: dict[str, float] = {}

RepositoryKind = Literal["model", "dataset"]


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


def commit_of(kind: RepositoryKind, name: str, revision: str | None = None) -> str | None:
    """The commit that a revision of a model or data set on the hub is now.

    What the hub answers is kept in the store for times without a network. Then a model is that of
    the hub's cache, which is what a load finds, and a data set that of the last answer.

    Args:
        kind: Of the repository.
        name: As `organization/name`.
        revision: A branch, a tag or a commit; None is the main branch.

    Returns:
        None where the hub cannot say and has not said before: a download explains why.
    """
    if is_commit(revision):
        return revision
    kept = Store.default().cache / "hub_commits.json"
    known = _commits(kept)
    key = f"{name}@{revision or 'main'}"
    if kind != "dataset":
        key = f"{kind} {key}"
    found = _asked(kind, name, revision)
    if found is None:
        cached = _cached_commit(name, revision) if kind == "model" else None
        return cached or known.get(key)
    if known.get(key) != found:
        write_atomic(kept, json.dumps({**known, key: found}, indent=1, sort_keys=True))
    return found


def is_commit(text: str | None) -> bool:
    """Whether a text is the name of a commit."""
    return text is not None and _COMMIT.fullmatch(text) is not None


def _asked(kind: RepositoryKind, name: str, revision: str | None) -> str | None:
    from huggingface_hub import HfApi

    with hub_access(name) as problem:
        if problem:
            return None
        ask = HfApi().model_info if kind == "model" else HfApi().dataset_info
        try:
            sha = ask(name, revision=revision, timeout=_PROBE_SECONDS).sha
        # Named fault boundary: names, tokens and proxies; the download has the better error.
        except Exception:  # noqa: BLE001
            _LOG.debug("the hub does not tell the commit of %s", name, exc_info=True)
            return None
    return None if sha is None else str(sha)


def _cached_commit(name: str, revision: str | None) -> str | None:
    try:
        found = (hub_folder("model", name) / "refs" / (revision or "main")).read_text().strip()
    except (OSError, ValueError):
        return None
    return found if is_commit(found) else None


def _commits(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def hub_folder(kind: RepositoryKind, name: str) -> Path:
    """Where the hub's cache has, or will have, the files of a repository.

    Args:
        kind: Of the repository.
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
        return redacted(f"no answer from {endpoint}: {str(error) or type(error).__name__}")
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
