"""Files that several processes of a node cache on its disk, up to a size."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemo_rl_core.checkpoints.weight_files import refuse_damaged, stored_tensors
from nemo_rl_core.errors import ModelError
from nemo_rl_core.store import locks, node_cache
from nemo_rl_core.store.files import hash_file, hash_files
from nemo_rl_core.store.manifest import DIGESTS, write_digests
from nemo_rl_core.store.node_cache import FOLDER, GIB, NodeCache, on_node_disk


class Source:
    """A source of files that counts fetches."""

    def __init__(self, content: bytes) -> None:
        self.content, self.num_fetched = content, 0
        self.digest = sha256(content).hexdigest()

    def fetch(self, path: Path) -> None:
        self.num_fetched += 1
        path.write_bytes(self.content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def opened(folder: Path, max_bytes: int = 100) -> NodeCache:
    cache = NodeCache.of({FOLDER: str(folder), GIB: str(max_bytes / 2**30)})
    assert cache is not None
    return cache


def brought(cache: NodeCache, source: Source) -> Path | None:
    return cache.bring(source.digest, len(source.content), source.fetch)


def contents(folder: Path) -> set[bytes]:
    return {path.read_bytes() for path in (folder / "files").iterdir()}


def test_a_file_is_fetched_once(folder: Path) -> None:
    source = Source(b"weights")
    first = brought(opened(folder), source)
    assert first is not None
    assert first.read_bytes() == b"weights"
    assert brought(opened(folder), source) == first
    assert source.num_fetched == 1
    assert list((folder / "coming").iterdir()) == []


def test_the_least_recently_used_file_is_evicted_first(folder: Path) -> None:
    cache = opened(folder, 100)
    old, used, new = Source(b"a" * 40), Source(b"b" * 40), Source(b"c" * 40)
    for source in (used, old):
        assert brought(cache, source) is not None
        times = (1_000_000_000, 1_000_000_000 + (source is old))
        os.utime(folder / "used" / source.digest, times)
    assert brought(cache, used) is not None  # now the most recently used
    assert brought(cache, new) is not None
    assert contents(folder) == {used.content, new.content}


def test_a_file_in_use_is_not_evicted(folder: Path) -> None:
    cache = opened(folder, 100)
    old, other, new = Source(b"a" * 60), Source(b"b" * 30), Source(b"c" * 60)
    for source in (old, other):
        assert brought(cache, source) is not None
    cache.mark(old.digest)
    try:
        assert brought(cache, new) is None, "a file in use leaves no room"
        assert old.content in contents(folder)
        assert new.num_fetched == 0
    finally:
        locks.unshare(folder / "marks")
    assert brought(cache, new) is not None
    assert contents(folder) == {new.content}


def test_a_file_larger_than_the_cache_evicts_nothing(folder: Path) -> None:
    cache = opened(folder, 100)
    small, large = Source(b"a" * 50), Source(b"b" * 101)
    assert brought(cache, small) is not None
    assert brought(cache, large) is None
    assert contents(folder) == {small.content}


def test_a_damaged_file_is_fetched_again(folder: Path) -> None:
    cache, source = opened(folder), Source(b"weights")
    path = brought(cache, source)
    assert path is not None
    path.write_bytes(b"weight?")
    again = brought(cache, source)
    assert again is not None
    assert again.read_bytes() == b"weights"
    assert source.num_fetched == 2


def test_the_digest_is_verified_again_when_a_file_was_touched(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return hash_file(path)

    monkeypatch.setattr(node_cache, "hash_file", counted)
    cache, source = opened(folder), Source(b"weights")
    path = brought(cache, source)
    assert path is not None
    hashed.clear()
    for _ in range(8):  # like the ranks of a node
        assert brought(opened(folder), source) == path
    assert hashed == []
    path.touch()
    for _ in range(2):
        assert brought(cache, source) == path
    assert hashed == [source.digest]
    assert source.num_fetched == 1


def weights(folder: Path, num_files: int = 2) -> Path:
    """Creates the model of an artifact on a volume, in several files."""
    model, tensors = folder / "model", {}
    model.mkdir(parents=True)
    for number in range(num_files):
        name = f"model-{number}.safetensors"
        tensors[f"layers.{number}.weight"] = name
        save_file({f"layers.{number}.weight": torch.full((4, 4), float(number))}, model / name)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": tensors}))
    write_digests(folder, hash_files(folder))
    return model


def read(model: Path) -> dict[str, float]:
    return {name: tensor.mean().item() for name, tensor in stored_tensors(model)}


@pytest.fixture
def node_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(FOLDER, str(folder))
    monkeypatch.setenv(GIB, "1")
    yield folder
    locks.unshare(folder / "marks")


def test_weights_on_a_volume_are_read_from_the_nodes_disk(
    node_folder: Path, tmp_path: Path
) -> None:
    model = weights(tmp_path / "volume" / "stage-1")
    expected = {"layers.0.weight": 0.0, "layers.1.weight": 1.0}
    assert read(model) == expected
    assert len(list((node_folder / "files").iterdir())) == 2
    # Another stage has them in another folder of the volume, which is not read.
    again = weights(tmp_path / "volume" / "stage-2")
    for path in again.glob("*.safetensors"):
        path.write_bytes(b"\0" * path.stat().st_size)
    assert read(again) == expected


def test_a_damaged_cached_file_is_copied_again(node_folder: Path, tmp_path: Path) -> None:
    model = weights(tmp_path / "stage")
    first = read(model)
    for path in (node_folder / "files").iterdir():
        path.write_bytes(b"\0" * path.stat().st_size)
    assert read(model) == first


def test_damaged_weights_of_the_volume_are_not_cached(node_folder: Path, tmp_path: Path) -> None:
    model = weights(tmp_path / "stage")
    damaged = model / "model-0.safetensors"
    damaged.write_bytes(b"\0" * damaged.stat().st_size)
    with pytest.raises(ModelError, match=r"model-0\.safetensors"):
        read(model)
    assert len(list((node_folder / "files").iterdir())) <= 1


def test_other_weights_are_read_from_their_original_location(
    node_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = weights(tmp_path / "stage")
    link = tmp_path / "stage" / "model" / "link"
    link.symlink_to(model / "model-0.safetensors")
    assert on_node_disk(link) == link
    refuse_damaged(model / "model-0.safetensors")
    assert list((node_folder / "files").iterdir()) == [], "reading a header does not copy the file"
    (tmp_path / "stage" / DIGESTS).unlink()
    read(model)
    assert list((node_folder / "files").iterdir()) == [], "files without digests are not cached"
    monkeypatch.delenv(FOLDER)
    assert on_node_disk(model / "model-0.safetensors") == model / "model-0.safetensors"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyError("NoSuchKey")])
def test_a_failed_fetch_leaves_nothing(folder: Path, error: Exception) -> None:
    def fetch(path: Path) -> None:
        path.write_bytes(b"wei")
        raise error

    source = Source(b"weights")
    assert opened(folder).bring(source.digest, 7, fetch) is None
    assert contents(folder) == set()
    assert list((folder / "coming").iterdir()) == []
    assert brought(opened(folder), source) is not None


def test_fetched_content_with_another_digest_is_not_cached(folder: Path) -> None:
    digest = sha256(b"weights").hexdigest()
    assert opened(folder).bring(digest, 7, Source(b"weight?").fetch) is None
    assert contents(folder) == set()


@pytest.mark.parametrize(
    ("environment", "logged"),
    [
        ({}, ""),
        ({GIB: "5"}, ""),
        ({FOLDER: "/proc/none", GIB: "5"}, "is not used"),
        ({FOLDER: "FOLDER", GIB: "much"}, "is not used"),
        ({FOLDER: "FOLDER"}, "is not used"),
    ],
)
def test_an_unusable_folder_is_ignored(
    folder: Path, environment: dict[str, str], logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    variables = {name: value.replace("FOLDER", str(folder)) for name, value in environment.items()}
    assert NodeCache.of(variables) is None
    assert logged in caplog.text
    assert bool(caplog.text) == bool(logged)


PROCESS = """
import os, signal, sys, time
from pathlib import Path
from hashlib import sha256
from nemo_rl_core.store.node_cache import NodeCache
how, folder, log = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
content = b"w" * 60
cache = NodeCache.of(os.environ)
def fetch(path):
    with log.open("a") as file:
        file.write("fetched\\n")
    with path.open("wb") as file:
        file.write(content[:30])
        file.flush()
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        file.write(content[30:])
digest = sha256(content).hexdigest()
cache.mark(digest)
assert cache.bring(digest, len(content), fetch).read_bytes() == content
if how == "uses":
    print("uses it", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def started(folder: Path, tmp_path: Path) -> Callable[[str], "subprocess.Popen[str]"]:
    def start(how: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", PROCESS, how, folder, tmp_path / "log"],
            env={**os.environ, FOLDER: str(folder), GIB: str(100 / 2**30)},
            stdout=subprocess.PIPE,
            text=True,
        )

    return start


def test_several_processes_fetch_a_file_once(
    started: Callable[[str], "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    processes = [started("complete") for _ in range(4)]
    assert [each.wait(timeout=120) for each in processes] == [0] * 4
    assert (tmp_path / "log").read_text() == "fetched\n"


def test_leftovers_of_a_killed_process_take_no_room(
    started: Callable[[str], "subprocess.Popen[str]"], folder: Path
) -> None:
    assert started("killed").wait(timeout=120) == -signal.SIGKILL
    assert [path.stat().st_size for path in (folder / "files").iterdir()] == [30]
    other = Source(b"o" * 90)
    assert brought(opened(folder), other) is not None
    assert contents(folder) == {other.content}
    assert list((folder / "coming").iterdir()) == []
    assert started("complete").wait(timeout=120) == 0, "its file is fetched again"
    assert contents(folder) == {b"w" * 60}


def test_a_file_in_use_by_another_process_is_kept_until_that_ends(
    started: Callable[[str], "subprocess.Popen[str]"], folder: Path
) -> None:
    other = Source(b"o" * 90)
    user = started("uses")
    try:
        assert user.stdout is not None
        assert user.stdout.readline() == "uses it\n"
        assert brought(opened(folder), other) is None
    finally:
        user.kill()
        user.wait()
    for _ in range(100):  # the kernel releases locks a moment after the process
        if brought(opened(folder), other) is not None:
            break
        time.sleep(0.1)
    assert contents(folder) == {other.content}
