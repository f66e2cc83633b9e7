"""Trackers that cannot record a run are reported before it starts."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.config.tracking import TrackingConfig
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.telemetry import tracker_checks
from nemo_rl_core.telemetry.tracker_checks import check_trackers
from tasks.local_run.preflight import preflight
from tasks.recipes.grpo import GRPORecipe


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MLFLOW_TRACKING_URI", "WANDB_API_KEY", "WANDB_BASE_URL", *tracker_checks._OTLP):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def server() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def closed() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def warnings(**tracker: Any) -> list[str]:
    return list(check_trackers(TrackingConfig.model_validate({"trackers": [tracker]})))


@pytest.mark.parametrize("uri", [None, "sqlite:///mine.db", "mlruns", "nonsense://x"])
def test_a_store_unsupported_by_the_installed_mlflow_is_refused(uri: str | None) -> None:
    with pytest.raises(ConfigError, match=r"tracking.trackers.0: the installed MLflow") as caught:
        warnings(kind="mlflow", tracking_uri=uri)
    assert "tracking_uri: http://localhost:5000" in str(caught.value.fix)


def test_servers_that_do_not_answer_are_reported(server: str, closed: str) -> None:
    for kind, key in (("mlflow", "tracking_uri"), ("otlp", "endpoint")):
        assert warnings(kind=kind, **{key: server}) == []
        (warning,) = warnings(kind=kind, **{key: closed})
        assert warning.startswith(f"tracking.trackers.0: nothing answers at {closed}")


def test_an_address_of_the_environment_counts(
    server: str, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", closed)
    assert warnings(kind="mlflow") == []
    assert closed in warnings(kind="otlp")[0]


def test_secrets_of_an_address_are_hidden(closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", closed.replace("//", "//me:hunter2@"))
    (warning,) = warnings(kind="mlflow")
    assert "hunter2" not in warning


def test_an_address_with_a_wrong_port_does_not_answer() -> None:
    (warning,) = warnings(kind="otlp", endpoint="http://localhost:port")
    assert "nothing answers at http://localhost:port" in warning


def test_a_missing_key_of_wandb_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "wandb login" in warnings(kind="wandb")[0]
    assert warnings(kind="wandb", mode="offline") == []
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password 0\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert warnings(kind="wandb") == []
    (tmp_path / ".netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "0")
    assert warnings(kind="wandb") == []


def test_paths_of_another_type_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for tracker in (
        {"kind": "jsonl", "path": str(tmp_path)},
        {"kind": "tensorboard", "folder": str(tmp_path / "file")},
        {"kind": "wandb", "mode": "offline", "folder": str(tmp_path / "file")},
    ):
        with pytest.raises(ConfigError, match=r"tracking.trackers.0.(path|folder) cannot"):
            warnings(**tracker)
    assert warnings(kind="jsonl", path="new/metrics.jsonl") == []
    assert warnings(kind="tensorboard", folder="~/board") == []


def test_a_missing_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_checks, "find_spec", lambda _: None)
    for kind in ("mlflow", "wandb", "otlp"):
        with pytest.raises(ConfigError, match="is not installed") as caught:
            warnings(kind=kind)
        assert "extra `loggers`" in str(caught.value.fix)


def test_checks_before_a_run_include_trackers(
    closed: str, caplog: pytest.LogCaptureFixture
) -> None:
    def check(*trackers: dict[str, Any]) -> None:
        preflight({"config": GRPORecipe.model_validate({"tracking": {"trackers": trackers}})})

    check({"kind": "jsonl", "path": "a.jsonl"}, {"kind": "otlp", "endpoint": closed})
    assert "tracking.trackers.1: nothing answers" in caplog.text
    with pytest.raises(ConfigError, match=r"tracking.trackers.0: the installed MLflow"):
        check({"kind": "mlflow"})
