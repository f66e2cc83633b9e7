"""Rows in an object store, over moto's S3 server: keys, bytes and error messages."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl_core.config.data import FileData, MixtureData, MixtureSource
from nemo_rl_core.data.datasets import load_rows
from nemo_rl_core.data.datasets.sources import read
from nemo_rl_core.environments.contents import data_content, refuse_changed
from nemo_rl_core.errors import DataError
from nemo_rl_core.store import remote
from nemo_rl_core.store.store import Store
from tests.workflows.flyte_backend.buckets import S3Bucket

BUCKET = "s3://flyte-data"


def jsonl(*numbers: int) -> bytes:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in numbers]
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def prompts(config: FileData) -> list[str]:
    train, _ = load_rows(config, seed=0)
    return [str(row["prompt"]) for row in train]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Bucket]:
    with S3Bucket("127.0.0.1") as started:
        yield started


@pytest.fixture
def bucket(server: S3Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Bucket]:
    for name in ("AWS_PROFILE", "FLYTE_AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.environment["FLYTE_AWS_ENDPOINT"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.environment["FLYTE_AWS_ACCESS_KEY_ID"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.environment["FLYTE_AWS_SECRET_ACCESS_KEY"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "store"))
    yield server
    for path in server.list(""):
        server.remove(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "address", ["rows/a.jsonl", "rows/*.jsonl", "rows", "rows/", "ro*/?.jsonl", "**/a.jsonl"]
)
def test_an_object_a_folder_and_a_pattern_are_read(bucket: S3Bucket, address: str) -> None:
    bucket.write("rows/a.jsonl", jsonl(1, 2))
    bucket.write("rows/notes.txt", b"no rows")
    bucket.write("other/b.jsonl", jsonl(9))
    config = FileData(train=f"{BUCKET}/{address}", validation=f"{BUCKET}/other/b.jsonl")
    assert prompts(config) == ["1+1=", "2+1="]


@pytest.mark.slow
def test_objects_are_read_in_the_order_of_their_names(bucket: S3Bucket) -> None:
    for name, number in (("b", 2), ("a", 1), ("c", 3)):
        bucket.write(f"rows/{name}.jsonl", jsonl(number))
    config = FileData(train=f"{BUCKET}/rows", validation=f"{BUCKET}/rows/c.jsonl", max_rows=2)
    assert prompts(config) == ["1+1=", "2+1="]
    parts = read(f"{BUCKET}/rows/*.jsonl", seed=0)
    assert [row["answer"] for row in parts.train] == ["2", "3", "4"]


@pytest.mark.slow
def test_the_key_follows_the_listing(bucket: S3Bucket) -> None:
    """A new, a changed and a removed object change the key; the same listing does not."""
    config = FileData(train=f"{BUCKET}/rows/*.jsonl")
    bucket.write("rows/a.jsonl", jsonl(1))
    seen = [data_content(config)]
    assert seen[0].startswith("1 objects of 34 bytes ")
    bucket.write("rows/a.jsonl", jsonl(1))
    bucket.write("other/a.jsonl", jsonl(5))
    assert data_content(config) == seen[0]
    for change in (
        lambda: bucket.write("rows/b.jsonl", jsonl(2)),
        lambda: bucket.write("rows/b.jsonl", jsonl(3)),
        lambda: bucket.remove("rows/a.jsonl"),
    ):
        change()
        seen.append(data_content(config))
    assert len(set(seen)) == 4
    mixed = MixtureData(sources=[MixtureSource(data=config)])
    assert data_content(mixed) == seen[-1]


@pytest.mark.slow
def test_an_object_is_fetched_once_a_version(bucket: S3Bucket) -> None:
    config = FileData(train=f"{BUCKET}/rows/a.jsonl", validation=f"{BUCKET}/rows/a.jsonl")
    bucket.write("rows/a.jsonl", jsonl(1))
    assert prompts(config) == prompts(config) == ["1+1="]
    kept = [*(Store.default().cache / "remote").rglob("*.jsonl")]
    assert len(kept) == 1
    bucket.write("rows/a.jsonl", jsonl(2))
    assert prompts(config) == ["2+1="]
    assert len([*(Store.default().cache / "remote").rglob("*")]) == 4  # two folders, two files


def test_rows_that_change_during_a_run_are_refused(bucket: S3Bucket, tmp_path: Path) -> None:
    bucket.write("rows/a.jsonl", jsonl(1))
    config = FileData(train=f"{BUCKET}/rows/*.jsonl")
    content = data_content(config)
    refuse_changed(config, content)
    (listed,) = remote.listing(config.train)
    bucket.write("rows/a.jsonl", jsonl(2))
    with pytest.raises(DataError, match="has changed since the run began"):
        refuse_changed(config, content)
    with pytest.raises(DataError, match="has changed while it was read"):
        remote.fetch(listed, tmp_path / "rows.jsonl")
    assert not (tmp_path / "rows.jsonl").exists()


def test_flytes_names_of_a_store_are_enough(
    bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets only the variables that a container on a cluster has."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    bucket.write("rows/a.jsonl", jsonl(1))
    assert len(remote.listing(f"{BUCKET}/rows")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "problem", "fix"),
    [
        (f"{BUCKET}/none.jsonl", "there is nothing under", "correct the address"),
        ("s3://no-such-bucket/a.jsonl", "the bucket of .* does not exist", "correct the address"),
        (f"{BUCKET}/none/*.jsonl", "there is no data under", "correct data.train"),
        (f"{BUCKET}/texts", "there is no data under", "correct data.train"),
        (f"{BUCKET}/both", "cannot be read as one data set", f"{BUCKET}/both/*.csv"),
    ],
)
def test_addresses_that_cannot_be_listed_are_named(
    bucket: S3Bucket, address: str, problem: str, fix: str
) -> None:
    bucket.write("texts/a.txt", b"a")
    bucket.write("both/a.csv", b"prompt,answer\n1,2\n")
    bucket.write("both/a.jsonl", jsonl(1))
    with pytest.raises(DataError, match=problem) as refused:
        remote.listing(address)
    assert fix in str(refused.value.fix)
    assert address.rpartition("/")[0] in str(refused.value)


def test_no_credentials_are_named(
    bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(DataError, match="access is refused") as refused:
        remote.listing(f"{BUCKET}/rows")
    assert "AWS_ACCESS_KEY_ID" in str(refused.value.fix)


def test_a_store_that_does_not_answer_is_named(
    bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(DataError, match=r"rows cannot be read\n") as refused:
        remote.listing(f"{BUCKET}/rows")
    assert "check the network" in str(refused.value.fix)


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(DataError, match="rows cannot be read from ftp://host"):
        remote.is_remote("ftp://host/rows.csv")
    assert not remote.is_remote("rows/a.jsonl")


def test_gcs_object_is_identified_by_its_generation() -> None:
    # An answer as GCS documents it; GCS itself was never asked.
    answer = {
        "name": "b/a.jsonl",
        "size": 5,
        "generation": "7",
        "updated": "2026-11-23T02:00:05.5Z",
    }
    assert remote._object("gs://b/*", answer) == remote.RemoteObject("gs://b/a.jsonl", 5, "7")
