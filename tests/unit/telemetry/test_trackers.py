"""Each tracker with its real library, read back with that library's reader."""

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from nemo_rl_core.config.tracking import TrackerConfig, TrackingConfig
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.telemetry.events import report
from nemo_rl_core.telemetry.logger_facade import LoggerFacade, Outcome, Tracker
from nemo_rl_core.telemetry.trackers import open_tracker
from nemo_rl_core.telemetry.tracking import tracked
from nemo_rl_core.types import StepReport
from tests.otlp_receiver import OtlpReceiver


def _open(run: str = "run-1", **fields: object) -> Tracker:
    return open_tracker(TypeAdapter(TrackerConfig).validate_python(fields), run)


def _log_two_stages(tracker: Tracker, outcome: Outcome = "succeeded") -> None:
    tracker.log_metrics("train_sft", 1, {"loss": 0.5})
    tracker.log_metrics("train_sft", 2, {"loss": 0.25})
    tracker.log_metrics("grpo_iteration", 1, {"reward": 0.75, "kl": 0.0})
    tracker.close(outcome)


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _log_two_stages(_open(kind="tensorboard", folder=str(tmp_path)))
    events = EventAccumulator(str(tmp_path / "run-1"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {
        "train_sft/loss",
        "grpo_iteration/reward",
        "grpo_iteration/kl",
    }
    assert [(e.step, e.value) for e in events.Scalars("train_sft/loss")] == [(1, 0.5), (2, 0.25)]


@pytest.mark.slow
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    address = f"file://{tmp_path}/mlruns"
    _log_two_stages(_open(kind="mlflow", tracking_uri=address, experiment="e"))
    second = _open(run="run-2", kind="mlflow", tracking_uri=address, experiment="e")
    _log_two_stages(second, "failed")
    third = _open(run="run-3", kind="mlflow", tracking_uri=address, experiment="e")
    _log_two_stages(third, "stopped")
    client = MlflowClient(tracking_uri=address)
    runs = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert {run.info.run_name: run.info.status for run in runs} == {
        "run-1": "FINISHED",
        "run-2": "FAILED",
        "run-3": "KILLED",
    }
    history = client.get_metric_history(runs[0].info.run_id, "train_sft/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.25)]


@pytest.mark.slow
def test_points_of_a_sweep_have_names_that_mlflow_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    address = f"file://{tmp_path}/mlruns"
    tracker = _open(kind="mlflow", tracking_uri=address, experiment="e")
    for model, reward in (("s3://a/b", 0.25), ("s3://a/c", 0.5)):
        tracker.log_metrics(f"grpo_iteration 1 (seed 0, name {model})", 1, {"reward": reward})
    tracker.close("succeeded")
    client = MlflowClient(tracking_uri=address)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert run.data.metrics == {
        "grpo_iteration 1 - seed 0 - name s3: - a - b/reward": 0.25,
        "grpo_iteration 1 - seed 0 - name s3: - a - c/reward": 0.5,
    }


def _leveldb_records(log: bytes) -> Iterator[bytes]:
    """Yields the records of a LevelDB log, the format of W&B's files after their first 7 bytes.

    A header is a checksum, a length and a type (1 full record, 2 first, 3 middle, 4 last part);
    blocks have 32 KiB, including the first 7 bytes, and may end with too few bytes for a header.
    """
    offset, parts = 0, b""
    while offset + 7 <= len(log):
        left = 2**15 - (offset + 7) % 2**15
        if left < 7:
            offset += left
            continue
        _, length, kind = struct.unpack_from("<IHB", log, offset)
        parts += log[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def _wandb_records(path: Path) -> list[Any]:
    """Returns all records of a run; W&B's process may still be writing them after `finish`."""
    from wandb.proto import wandb_internal_pb2

    for _ in range(600):
        records = [
            wandb_internal_pb2.Record.FromString(data)
            for data in _leveldb_records(path.read_bytes()[7:])
        ]
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        time.sleep(0.1)
    raise TimeoutError(f"{path} has no last record after a minute")


@pytest.mark.slow
@pytest.mark.parametrize(("outcome", "code"), [("succeeded", 0), ("failed", 1)])
def test_wandb_offline(tmp_path: Path, outcome: Outcome, code: int) -> None:
    _log_two_stages(_open(kind="wandb", mode="offline", folder=str(tmp_path)), outcome)
    (path,) = tmp_path.rglob("*.wandb")
    rows = []
    records = _wandb_records(path)
    assert records[-1].exit.exit_code == code
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
            rows.append({key: value for key, value in row.items() if not key.startswith("_")})
    assert rows == [
        {"train_sft/loss": 0.5, "train_sft/step": 1},
        {"train_sft/loss": 0.25, "train_sft/step": 2},
        {"grpo_iteration/reward": 0.75, "grpo_iteration/kl": 0.0, "grpo_iteration/step": 1},
    ]


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    made = OtlpReceiver()
    yield made
    made.close()


def test_otlp_pushes_gauges_with_labels(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret")
    config = TypeAdapter(TrackerConfig).validate_python(
        {"kind": "otlp", "endpoint": receiver.address, "every_seconds": 3600}
    )
    began = time.time()
    labels = {"recipe": "mine", "workflow": ""}
    _log_two_stages(open_tracker(config, "run-1", labels), "failed")
    ((path, headers, _),) = receiver.requests
    assert path == "/v1/metrics"
    assert headers["authorization"] == "Bearer secret"
    points = receiver.points()
    run = {("run", "run-1"), ("recipe", "mine")}
    sft, grpo = (frozenset({*run, ("stage", name)}) for name in ("train_sft", "grpo_iteration"))
    times = [points.pop(("nemo_rl_last_step_time_seconds", stage)) for stage in (sft, grpo)]
    failed = ("outcome", "failed")
    times += [
        points.pop(("nemo_rl_stage_end_time_seconds", each | {failed})) for each in (sft, grpo)
    ]
    times.append(points.pop(("nemo_rl_run_end_time_seconds", frozenset({*run, failed}))))
    assert all(began <= each <= time.time() for each in times)
    assert points == {
        ("nemo_rl_loss", sft): 0.25,  # the latest
        ("nemo_rl_step", sft): 2,
        ("nemo_rl_reward", grpo): 0.75,
        ("nemo_rl_kl", grpo): 0.0,
        ("nemo_rl_step", grpo): 1,
    }


def test_otlp_pushes_during_the_run(receiver: OtlpReceiver) -> None:
    tracker = _open(kind="otlp", endpoint=receiver.address, every_seconds=0.05)
    tracker.log_metrics("train_sft", 1, {"loss": 0.5})
    for _ in range(600):
        if len(receiver.requests) > 1:
            break
        time.sleep(0.05)
    names = {name for name, _ in receiver.points()}
    assert names == {"nemo_rl_loss", "nemo_rl_step", "nemo_rl_last_step_time_seconds"}
    tracker.close("succeeded")
    assert "nemo_rl_run_end_time_seconds" in {name for name, _ in receiver.points()}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(None, "succeeded"), (ValueError, "failed"), (KeyboardInterrupt, "stopped")],
)
def test_the_outcome_of_a_run_is_pushed(
    receiver: OtlpReceiver, error: type[BaseException] | None, outcome: str
) -> None:
    config = TrackingConfig.model_validate(
        {"trackers": [{"kind": "otlp", "endpoint": receiver.address}],
         "sample_machine_every_seconds": None}
    )  # fmt: skip
    with suppress(ValueError, KeyboardInterrupt), tracked(config, "run-1", {"recipe": "mine"}):
        report(StepReport("sft", 1, 2, {"loss": 0.5}))
        if error is not None:
            raise error
    ended = [labels for name, labels in receiver.points() if name == "nemo_rl_run_end_time_seconds"]
    assert ended == [frozenset({("run", "run-1"), ("recipe", "mine"), ("outcome", outcome)})]


@pytest.mark.slow
def test_otlp_without_a_receiver_ends_within_the_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{server.getsockname()[1]}/v1/metrics"
        tracker = _open(kind="otlp", endpoint=address, every_seconds=3600)
        tracker.log_metrics("sft", 1, {"loss": 1.0})
        began = time.monotonic()
        tracker.close("succeeded")
        assert time.monotonic() - began < 60
    assert "xport" in caplog.text  # OpenTelemetry logs that it failed


@pytest.mark.parametrize("answers", [False, True], ids=["refuses", "never answers"])
def test_an_unreachable_server_does_not_delay_training(
    answers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers:
            server.listen()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        config = TypeAdapter(TrackerConfig).validate_python(
            {"kind": "mlflow", "tracking_uri": address}
        )
        slowest = 0.0
        log = LoggerFacade({"mlflow": lambda: open_tracker(config, "r")}, close_seconds=0.5)
        for step in range(20):
            started = time.monotonic()
            log.log_metrics("sft", step, {"loss": 1.0})
            slowest = max(slowest, time.monotonic() - started)
        log.close()
    # Neither waits for an answer nor raises; one request would take minutes of retries.
    assert slowest < 60
    assert "steps or more are lost" in caplog.text


def test_reports_of_trainers_go_to_all_trackers(tmp_path: Path) -> None:
    config = TrackingConfig.model_validate(
        {
            "trackers": [
                {"kind": "jsonl", "path": str(tmp_path / "a.jsonl")},
                {"kind": "jsonl", "path": str(tmp_path / "b.jsonl")},
                {"kind": "tensorboard", "folder": str(tmp_path / "board")},
            ],
            "sample_machine_every_seconds": 0.05,
        }
    )
    with tracked(config, "run-1"):
        report(StepReport("sft", 1, 2, {"loss": 0.5, "global_step": 31.0}, {"step_seconds": 0.1}))
        time.sleep(0.3)
    report(StepReport("sft", 2, 2, {"loss": 9.0}))  # after the end: not logged
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert sorted(lines) == sorted((tmp_path / "b.jsonl").read_text().splitlines())
    first = '{"stage": "sft", "step": 31, "loss": 0.5, "global_step": 31.0, "step_seconds": 0.1}'
    assert [line for line in lines if '"sft"' in line] == [first]
    machine = [line for line in lines if '"machine"' in line]
    assert len(machine) >= 2
    assert all('"cpu_percent"' in line and '"memory_used_gib"' in line for line in machine)
    assert list((tmp_path / "board" / "run-1").iterdir())
    assert "machine" not in {thread.name for thread in threading.enumerate()}


def test_machine_values_have_plausible_units(tmp_path: Path) -> None:
    from nemo_rl_core.telemetry.tracking import read_machine

    figures = read_machine(tmp_path)
    assert 0 < figures["memory_used_gib"] < figures["memory_total_gib"] < 2**14
    assert 0 <= figures["cpu_percent"] <= 100
    assert figures["disk_free_gib"] > 0


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises((ConfigError, ValueError), match="comet"):
        TrackingConfig.model_validate({"trackers": [{"kind": "comet"}]})
    with pytest.raises(ConfigError, match="api_key"):
        TrackingConfig.model_validate({"trackers": [{"kind": "wandb", "api_key": "secret"}]})
