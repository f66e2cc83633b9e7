"""When a look starts a run: rows in a real S3 server, and executions that a fake Flyte knows."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flytekit.models.core.execution import WorkflowExecutionPhase as Phase

from nemo_rl_core.checkpoints import hub
from nemo_rl_core.config.data import FileData, HubData, MixtureData
from nemo_rl_core.config.generated_data import ArithmeticData
from nemo_rl_core.errors import DataError
from tasks.platform.arrivals import RowsSeen, can_arrive, look, rows_seen, run_name
from tasks.recipes.arrivals import WatchedRows
from tests.workflows.flyte_backend.buckets import S3Bucket

ROWS = FileData(train="s3://flyte-data/rows/*.jsonl", validation="s3://flyte-data/held_out.jsonl")
LATER = 3600.0


class FakeRuns:
    """Executions by their names, one at a time, as a launch plan of this project takes them."""

    def __init__(self) -> None:
        self.phases: dict[str, int] = {}
        self.asked_to_start: list[str] = []

    def phase(self, name: str) -> int | None:
        return self.phases.get(name)

    def start(self, name: str) -> bool:
        self.asked_to_start.append(name)
        if name in self.phases or Phase.RUNNING in self.phases.values():
            return False
        self.phases[name] = Phase.RUNNING
        return True

    def end(self, phase: int = Phase.SUCCEEDED) -> None:
        self.phases = {name: phase if p == Phase.RUNNING else p for name, p in self.phases.items()}


@pytest.fixture
def runs() -> FakeRuns:
    return FakeRuns()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Bucket]:
    with S3Bucket("127.0.0.1") as started:
        yield started


@pytest.fixture
def bucket(server: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> S3Bucket:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    for path in server.list(""):
        server.remove(path)
    server.write("rows/monday.jsonl", b'{"prompt": "1+1=", "answer": "2"}\n')
    server.write("held_out.jsonl", b'{"prompt": "2+1=", "answer": "3"}\n')
    return server


def looked(runs: FakeRuns, *, after: float = LATER, **changes: Any) -> str:
    fields = {"schedule": "mine", "version": "v1", "data": (ROWS,), "endpoint": "flyte:80"}
    return look(WatchedRows(**{**fields, **changes}), runs, now=time.time() + after)


def test_each_listing_starts_one_run(bucket: S3Bucket, runs: FakeRuns) -> None:
    first = looked(runs)
    (name,) = runs.phases
    assert first.startswith(f"new rows: {name} was started (1 objects of 34 bytes in s3://")
    assert looked(runs).startswith(f"nothing new: {name} runs on these rows")
    runs.end()
    assert looked(runs).startswith(f"nothing new: {name} has run on these rows")
    assert runs.asked_to_start == [name]

    bucket.write("rows/tuesday.jsonl", b'{"prompt": "3+1=", "answer": "4"}\n')
    assert "2 objects of 68 bytes" in looked(runs)
    assert len(runs.phases) == 2
    runs.end()
    # Another content under a name that was there, and a row that is taken away.
    bucket.write("held_out.jsonl", b'{"prompt": "2+2=", "answer": "4"}\n')
    assert "was started" in looked(runs)
    runs.end()
    bucket.remove("rows/tuesday.jsonl")
    assert "was started" in looked(runs)
    assert len(runs.phases) == 4


def test_rows_that_are_still_written_start_nothing(bucket: S3Bucket, runs: FakeRuns) -> None:
    said = looked(runs, after=60)
    assert said.startswith("new rows, of which the last was written 1.0 minutes ago: a run starts")
    assert "younger than 10" in said
    assert runs.phases == {}
    assert "was started" in looked(runs, after=601)
    runs.end()
    # The youngest object counts, not that of the first address.
    bucket.write("held_out.jsonl", b'{"prompt": "5+2=", "answer": "7"}\n')
    assert "minutes ago" in looked(runs, after=60)
    assert "was started" in looked(runs, after=60, settled_minutes=0.5)


def test_rows_that_come_during_a_run_wait_for_its_end(bucket: S3Bucket, runs: FakeRuns) -> None:
    looked(runs)
    for day in ("tuesday", "wednesday"):
        bucket.write(f"rows/{day}.jsonl", b'{"prompt": "3+1=", "answer": "4"}\n')
        assert "starts when the schedule's present run has ended" in looked(runs)
    assert len(runs.phases) == 1
    runs.end()
    assert "was started (3 objects" in looked(runs)
    assert len(runs.phases) == 2, "both days in one run"


@pytest.mark.parametrize("end", [Phase.FAILED, Phase.TIMED_OUT])
def test_a_failed_run_is_started_again_as_often_as_was_asked(
    bucket: S3Bucket, runs: FakeRuns, end: int
) -> None:
    looked(runs)
    runs.end(end)
    for _ in range(3):
        said = looked(runs)
        assert said.startswith("nothing new: mine-")
        assert "no other run starts before there are other rows" in said
    assert len(runs.phases) == 1
    assert "was started" in looked(runs, num_tries=2)
    runs.end(end)
    assert "no other run starts" in looked(runs, num_tries=2)
    assert len(runs.phases) == 2
    # Other rows have tries of their own.
    bucket.write("rows/tuesday.jsonl", b'{"prompt": "3+1=", "answer": "4"}\n')
    assert "was started" in looked(runs)


def test_an_aborted_run_is_not_started_again(bucket: S3Bucket, runs: FakeRuns) -> None:
    looked(runs)
    runs.end(Phase.ABORTED)
    assert "was aborted on these rows" in looked(runs, num_tries=5)
    assert len(runs.phases) == 1


def test_another_version_of_the_recipe_does_not_train_on_the_same_rows(
    bucket: S3Bucket, runs: FakeRuns
) -> None:
    looked(runs)
    runs.end()
    assert "nothing new" in looked(runs, version="v2")
    assert "was started" in looked(runs, schedule="other")


def test_a_look_that_loses_against_another_one_says_so(
    bucket: S3Bucket, runs: FakeRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = runs.start

    def second(name: str) -> bool:
        runs.phases[name] = Phase.RUNNING  # the other look, between the question and this start
        return start(name)

    monkeypatch.setattr(runs, "start", second)
    assert "was started by another look" in looked(runs)
    assert len(runs.phases) == 1


def test_no_rows_yet_is_no_failure_and_no_access_is_one(
    bucket: S3Bucket, runs: FakeRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.remove("rows/monday.jsonl")
    assert looked(runs) == "no rows yet: there is no data under s3://flyte-data/rows/*.jsonl"
    bucket.remove("held_out.jsonl")
    monkeypatch.setenv("FLYTE_AWS_ACCESS_KEY_ID", S3Bucket.key_without_rights)
    with pytest.raises(DataError, match="access is refused"):
        looked(runs)
    assert runs.phases == {}


def test_a_commit_of_the_hub_is_settled_at_once(
    runs: FakeRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = {"main": "a" * 40}
    monkeypatch.setattr(hub, "_asked", lambda kind, name, revision: commits["main"])
    data = (HubData(name="openai/gsm8k", subset="main"),)
    assert "was started (openai/gsm8k at aaaaaaaaaaaa)" in looked(runs, after=0, data=data)
    runs.end()
    assert "nothing new" in looked(runs, after=0, data=data)
    commits["main"] = "b" * 40
    assert "was started (openai/gsm8k at bbbbbbbbbbbb)" in looked(runs, after=0, data=data)


def test_a_hub_that_says_nothing_is_no_empty_one(
    own_store: Path, runs: FakeRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_asked", lambda kind, name, revision: None)
    with pytest.raises(DataError, match="the hub does not say which commit openai/gsm8k is at"):
        looked(runs, data=(HubData(name="openai/gsm8k"),))


def test_files_of_the_checkout_and_mixtures(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    data = FileData(train=str(file))
    with pytest.raises(DataError, match="there is no file"):
        rows_seen([data])
    file.write_text("one")
    first = rows_seen([data])
    assert first.written == pytest.approx(file.stat().st_mtime)
    mixed = MixtureData(sources=[{"data": data}, {"data": ArithmeticData()}])
    assert rows_seen([mixed]).digest == first.digest
    file.write_text("two")
    assert rows_seen([mixed]).digest != first.digest
    # The checkout travels with the code, and is the same at each look.
    assert not can_arrive(mixed)
    assert not can_arrive(ArithmeticData())
    assert can_arrive(MixtureData(sources=[{"data": data}, {"data": ROWS}]))
    assert can_arrive(HubData(name="openai/gsm8k"))


@pytest.mark.parametrize("schedule", ["mine", "My rows_2", "7b", "ü", "a" * 80, "-"])
def test_names_of_runs_are_such_as_flyte_takes(schedule: str) -> None:
    rows = RowsSeen("ab", None, "")
    names = {run_name(schedule, rows, number) for number in range(3)}
    assert len(names) == 3
    for name in names:
        assert len(name) <= 20
        assert name[0].isalpha()
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert run_name(schedule, RowsSeen("cd", None, ""), 0) not in names


def test_a_bucket_that_does_not_exist_is_no_empty_one(bucket: S3Bucket, runs: FakeRuns) -> None:
    misspelt = FileData(train="s3://flyte-dota/rows/*.jsonl")
    with pytest.raises(DataError, match=r"flyte-dota.* does not exist"):
        looked(runs, data=(misspelt,))
    empty = FileData(train="s3://flyte-data/none/*.jsonl")
    assert looked(runs, data=(empty,)).startswith("no rows yet")
