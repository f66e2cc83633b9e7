"""Files that several processes of a node keep on its disk, within a size."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from nemo_rl_core.store import locks
from nemo_rl_core.store.node_cache import FOLDER, GIB, NodeCache


class Source:
    """What is fetched from, with the number of times."""

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


def held(folder: Path) -> set[bytes]:
    return {path.read_bytes() for path in (folder / "files").iterdir()}


def test_a_file_is_fetched_once(folder: Path) -> None:
    source = Source(b"weights")
    first = brought(opened(folder), source)
    assert first is not None
    assert first.read_bytes() == b"weights"
    assert brought(opened(folder), source) == first
    assert source.num_fetched == 1
    assert list((folder / "coming").iterdir()) == []


def test_the_file_that_was_not_used_for_longest_goes_first(folder: Path) -> None:
    cache = opened(folder, 100)
    old, used, new = Source(b"a" * 40), Source(b"b" * 40), Source(b"c" * 40)
    for source in (used, old):
        path = brought(cache, source)
        assert path is not None
        os.utime(path, (1_000_000_000, 1_000_000_000 + (source is old)))
    assert brought(cache, used) is not None  # now that of last use
    assert brought(cache, new) is not None
    assert held(folder) == {used.content, new.content}


def test_a_file_in_use_stays(folder: Path) -> None:
    cache = opened(folder, 100)
    old, other, new = Source(b"a" * 60), Source(b"b" * 30), Source(b"c" * 60)
    for source in (old, other):
        assert brought(cache, source) is not None
    cache.mark(old.digest)
    try:
        assert brought(cache, new) is None, "there is no room beside a file in use"
        assert old.content in held(folder)
        assert new.num_fetched == 0
    finally:
        locks.unshare(folder / "marks")
    assert brought(cache, new) is not None
    assert held(folder) == {new.content}


def test_what_is_larger_than_the_cache_removes_nothing(folder: Path) -> None:
    cache = opened(folder, 100)
    small, large = Source(b"a" * 50), Source(b"b" * 101)
    assert brought(cache, small) is not None
    assert brought(cache, large) is None
    assert held(folder) == {small.content}


def test_a_damaged_file_is_fetched_again(folder: Path) -> None:
    cache, source = opened(folder), Source(b"weights")
    path = brought(cache, source)
    assert path is not None
    path.write_bytes(b"weight?")
    again = brought(cache, source)
    assert again is not None
    assert again.read_bytes() == b"weights"
    assert source.num_fetched == 2


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyError("NoSuchKey")])
def test_a_failed_fetch_leaves_nothing(folder: Path, error: Exception) -> None:
    def fetch(path: Path) -> None:
        path.write_bytes(b"wei")
        raise error

    source = Source(b"weights")
    assert opened(folder).bring(source.digest, 7, fetch) is None
    assert held(folder) == set()
    assert list((folder / "coming").iterdir()) == []
    assert brought(opened(folder), source) is not None


def test_other_content_than_was_asked_for_is_not_kept(folder: Path) -> None:
    digest = sha256(b"weights").hexdigest()
    assert opened(folder).bring(digest, 7, Source(b"weight?").fetch) is None
    assert held(folder) == set()


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
def test_a_folder_that_cannot_be_used_is_not(
    folder: Path, environment: dict[str, str], logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = {name: value.replace("FOLDER", str(folder)) for name, value in environment.items()}
    assert NodeCache.of(given) is None
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
    processes = [started("whole") for _ in range(4)]
    assert [each.wait(timeout=120) for each in processes] == [0] * 4
    assert (tmp_path / "log").read_text() == "fetched\n"


def test_what_a_killed_process_has_left_takes_no_room(
    started: Callable[[str], "subprocess.Popen[str]"], folder: Path
) -> None:
    assert started("killed").wait(timeout=120) == -signal.SIGKILL
    assert [path.stat().st_size for path in (folder / "files").iterdir()] == [30]
    other = Source(b"o" * 90)
    assert brought(opened(folder), other) is not None
    assert held(folder) == {other.content}
    assert list((folder / "coming").iterdir()) == []
    assert started("whole").wait(timeout=120) == 0, "its file is fetched anew"
    assert held(folder) == {b"w" * 60}


def test_a_file_that_another_process_uses_stays_until_that_ends(
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
    assert held(folder) == {other.content}
