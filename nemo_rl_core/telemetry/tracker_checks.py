"""Checks of trackers before a run starts."""

import netrc
import os
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from nemo_rl_core.config.tracking import (
    JsonLinesTracker,
    MlflowTracker,
    OtlpTracker,
    TensorBoardTracker,
    TrackerConfig,
    TrackingConfig,
    WandbTracker,
)
from nemo_rl_core.config.url_secrets import redacted
from nemo_rl_core.errors import ConfigError

_LIBRARIES: Final = {
    "mlflow": "mlflow",
    "otlp": "opentelemetry.exporter",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
_CONNECT_SECONDS: Final = 2.0
_OTLP: Final = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def check_trackers(tracking: TrackingConfig) -> Iterator[str]:
    """Refuses trackers that cannot work, and yields warnings for those that may not."""
    for index, tracker in enumerate(tracking.trackers):
        path = f"tracking.trackers.{index}"
        _require_library(tracker, path)
        _require_writable(tracker, path)
        if isinstance(tracker, MlflowTracker):
            _require_store(tracker, path)
        if isinstance(tracker, WandbTracker) and tracker.mode == "online" and not _has_wandb_key():
            yield f"{path}: no key of W&B in WANDB_API_KEY or ~/.netrc; run `wandb login`"
        if (address := _address(tracker)) and not _answers(address):
            yield (
                f"{path}: nothing answers at {redacted(address)}; start the server, or correct the "
                "address"
            )


def _require_library(tracker: TrackerConfig, path: str) -> None:
    name = _LIBRARIES.get(tracker.kind)
    if name is None:
        return
    try:
        is_installed = find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        is_installed = False
    if not is_installed:
        raise ConfigError(
            f"{path}: the library of the tracker {tracker.kind!r} is not installed",
            expected=f"the Python package {name}",
            got="no such package",
            fix="install the extra `loggers`, or leave the tracker out",
        )


def _require_writable(tracker: TrackerConfig, path: str) -> None:
    match tracker:
        case JsonLinesTracker():
            field, name = "path", tracker.path
        case TensorBoardTracker():
            field, name = "folder", tracker.folder
        case WandbTracker():
            field, name = "folder", tracker.folder or "."
        case _:
            return
    target = Path(name).expanduser()
    is_other = target.is_dir() if field == "path" else target.is_file()
    existing = next(
        (each for each in (target, *target.absolute().parents) if each.exists()), target
    )
    if is_other or not os.access(existing, os.W_OK):
        raise ConfigError(
            f"{path}.{field} cannot be written",
            expected="a file" if field == "path" else "a folder",
            got=f"{name}: {'of another type' if is_other else f'{existing} is read-only'}",
            fix="name another",
        )


def _require_store(tracker: MlflowTracker, path: str) -> None:
    """Opens the client, which checks the address against the installed MLflow."""
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    try:
        MlflowClient(tracking_uri=tracker.tracking_uri)
    except MlflowException as error:
        address = tracker.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        raise ConfigError(
            f"{path}: the installed MLflow cannot use this address",
            expected="the address of a server, in tracking_uri or MLFLOW_TRACKING_URI",
            got=redacted(f"{address or 'no address'}: {error.message[:160]}"),
            fix="start `mlflow server` and set tracking_uri: http://localhost:5000; or install "
            "`mlflow`, whose default is a database in the current folder",
        ) from error


def _address(tracker: TrackerConfig) -> str | None:
    """The server of a tracker; None if it has none or the library chooses it."""
    match tracker:
        case MlflowTracker():
            address = tracker.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
            return address if address.startswith("http") else None
        case OtlpTracker():
            variable = next((os.environ[name] for name in _OTLP if os.environ.get(name)), None)
            return tracker.endpoint or variable or "http://localhost:4318"
    return None


def _answers(address: str) -> bool:
    try:
        parts = urlsplit(address)
        port = parts.port or {"https": 443}.get(parts.scheme, 80)
        socket.create_connection((parts.hostname or "", port), _CONNECT_SECONDS).close()
    except (OSError, ValueError):  # a ValueError for a port that is not a number
        return False
    return True


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
