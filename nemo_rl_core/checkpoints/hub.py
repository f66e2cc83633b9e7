"""Access to the Hugging Face hub: one short probe instead of a minute of retries.

Without a network, the hub's libraries retry for up to a minute before they look into their cache.
If nothing answers the probe, they work offline, as with `HF_HUB_OFFLINE=1`.
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
_REACHABLE_SECONDS = 60.0
"""How long the hub counts as reachable after an answer."""

_reached: dict[str, float] = {}

RepositoryKind = Literal["model", "dataset"]


@contextmanager
def hub_access(name: str | Path) -> Iterator[str]:
    """Keeps the hub's libraries from waiting for a missing network.

    Yields the error if nothing answers at the hub's address, else "".
    """
    if Path(name).expanduser().exists():
        yield ""
        return
    from huggingface_hub import constants

    problem = "" if constants.is_offline_mode() else _unreachable(constants.ENDPOINT)
    retries = logging.getLogger("huggingface_hub.utils._http")
    level = retries.level
    retries.setLevel(logging.ERROR)  # else five lines per file that repeat the error
    try:
        with _offline(is_offline=bool(problem)):
            yield problem
    finally:
        retries.setLevel(level)


def commit_of(kind: RepositoryKind, name: str, revision: str | None = None) -> str | None:
    """Returns the current commit of a revision of a model or data set on the hub.

    Stores each answer. Without a network, the commit of a model is the one in the hub's cache,
    which a load uses, else the last answer; the commit of a data set is the last answer.
    """
    if is_commit(revision):
        return revision
    path = Store.default().cache / "hub_commits.json"
    stored = _stored_commits(path)
    key = f"{name}@{revision or 'main'}"
    if kind != "dataset":
        key = f"{kind} {key}"
    commit = _commit_from_hub(kind, name, revision)
    if commit is None:
        cached = _cached_commit(name, revision) if kind == "model" else None
        return cached or stored.get(key)
    if stored.get(key) != commit:
        write_atomic(path, json.dumps({**stored, key: commit}, indent=1, sort_keys=True))
    return commit


def is_commit(text: str | None) -> bool:
    """Whether a text is a commit hash."""
    return text is not None and _COMMIT.fullmatch(text) is not None


def _commit_from_hub(kind: RepositoryKind, name: str, revision: str | None) -> str | None:
    from huggingface_hub import HfApi

    with hub_access(name) as problem:
        if problem:
            return None
        ask = HfApi().model_info if kind == "model" else HfApi().dataset_info
        try:
            sha = ask(name, revision=revision, timeout=_PROBE_SECONDS).sha
        # Broad on purpose: names, tokens and proxies cause many errors; the download explains them.
        except Exception:  # noqa: BLE001
            _LOG.debug("the hub did not return the commit of %s", name, exc_info=True)
            return None
    return None if sha is None else str(sha)


def _cached_commit(name: str, revision: str | None) -> str | None:
    try:
        commit = (hub_folder("model", name) / "refs" / (revision or "main")).read_text().strip()
    except (OSError, ValueError):
        return None
    return commit if is_commit(commit) else None


def _stored_commits(path: Path) -> dict[str, str]:
    try:
        commits = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return commits if isinstance(commits, dict) else {}


def hub_folder(kind: RepositoryKind, name: str) -> Path:
    """Returns the folder of a repository in the hub's cache, whether it exists or not."""
    from huggingface_hub import constants

    # Not `repo_folder_name`, which refuses invalid names: the download raises a better error.
    return Path(constants.HF_HUB_CACHE) / "--".join([f"{kind}s", *name.split("/")])


def _unreachable(endpoint: str) -> str:
    """Returns why the hub, a mirror (`HF_ENDPOINT`) or their proxy is unreachable, else "".

    Any answer counts, even an error, and so does a slow server.
    """
    import httpx2  # the client of huggingface_hub
    from huggingface_hub import get_session

    if time.monotonic() - _reached.get(endpoint, -_REACHABLE_SECONDS) < _REACHABLE_SECONDS:
        return ""
    try:
        # Uses the proxies and certificates of the user.
        get_session().head(endpoint, timeout=_PROBE_SECONDS)
    except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError) as error:
        return redacted(f"no answer from {endpoint}: {str(error) or type(error).__name__}")
    except httpx2.HTTPError:
        pass  # something answers; the request itself raises a better error
    _reached[endpoint] = time.monotonic()
    return ""


@contextmanager
def _offline(*, is_offline: bool) -> Iterator[None]:
    if not is_offline:
        yield
        return
    from huggingface_hub import constants

    # `datasets` copies the setting when it is imported.
    settings = [(constants, "HF_HUB_OFFLINE")]
    if "datasets.config" in sys.modules:
        config = sys.modules["datasets.config"]
        settings += [(config, "HF_HUB_OFFLINE"), (config, "HF_DATASETS_OFFLINE")]
    previous = [getattr(module, name) for module, name in settings]
    for module, name in settings:
        setattr(module, name, True)
    try:
        yield
    finally:
        for (module, name), value in zip(settings, previous, strict=True):
            setattr(module, name, value)
