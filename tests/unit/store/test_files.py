import errno
import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_core.errors import StoreError
from nemo_rl_core.store import files

NAMES = st.text("abc/", min_size=1, max_size=6).filter(
    lambda name: all(name.split("/")) and not name.startswith("/")
)


def _fill(folder: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_write_atomic_replaces_and_leaves_no_other_files(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    files.write_atomic(path, "one")
    files.write_atomic(path, b"t\xc3\xb6")
    assert path.read_text() == "tö"
    assert [entry.name for entry in path.parent.iterdir()] == ["a.json"]


def test_write_atomic_keeps_the_old_content_when_the_disk_is_full(small_disk: Path) -> None:
    path = small_disk / "a"
    files.write_atomic(path, "old")
    with pytest.raises(StoreError, match="no space left") as caught:
        files.write_atomic(path, b"x" * 2**21)
    assert path.read_text() == "old"
    assert os.listdir(small_disk) == ["a"]  # noqa: PTH208 - only the names matter
    assert len(str(caught.value).splitlines()) < 10
    assert "NEMO_RL_HOME" in str(caught.value)


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "way").write_text("")
    with pytest.raises(StoreError, match="a file is in the way"):
        files.write_atomic(tmp_path / "way" / "a", "x")


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="rare") as caught, files.storage_errors(tmp_path):
        raise OSError(errno.EIO, "rare")
    assert not isinstance(caught.value, StoreError)


def test_hash_file_is_the_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    # The published test vector of SHA-256 for "abc".
    assert files.hash_file(tmp_path / "a") == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


def test_hash_folder_by_hand(tmp_path: Path) -> None:
    _fill(tmp_path, {"b/c": b"2", "a": b"1"})
    fed = b"a\0" + hashlib.sha256(b"1").digest() + b"b/c\0" + hashlib.sha256(b"2").digest()
    assert files.hash_folder(tmp_path) == hashlib.sha256(fed).hexdigest()


def test_hash_folder_ignores_location_times_and_leftovers(tmp_path: Path) -> None:
    contents = {"a": b"1", "b/c": b"2"}
    here, there = _fill(tmp_path / "x", contents), _fill(tmp_path / "y" / "z", contents)
    os.utime(there / "a", (1, 1))
    (there / "empty").mkdir()
    _fill(there, {".a.12345678.aside~": b"torn", ".old.12345678.discarded~/f": b"half"})
    assert files.hash_folder(here) == files.hash_folder(there)


def test_hash_folder_excludes_by_full_relative_path(tmp_path: Path) -> None:
    both = _fill(tmp_path / "x", {"m.json": b"1", "in/m.json": b"2", "in/a.log": b"3"})
    rest = _fill(tmp_path / "y", {"in/m.json": b"2"})
    assert files.hash_folder(both, exclude=("m.json", "*.log")) == files.hash_folder(rest)


def test_hash_folder_follows_links_to_contents(tmp_path: Path) -> None:
    real = _fill(tmp_path / "x", {"a": b"1"})
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "a").symlink_to(real / "a")
    assert files.hash_folder(tmp_path / "y") == files.hash_folder(real)


def test_hash_of_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.hash_folder(tmp_path / "none")


@given(
    st.dictionaries(NAMES, st.binary(max_size=4), max_size=4),
    st.dictionaries(NAMES, st.binary(max_size=4), max_size=4),
)
def test_folders_hash_alike_exactly_when_they_are_alike(
    tmp_path_factory: pytest.TempPathFactory, one: dict[str, bytes], two: dict[str, bytes]
) -> None:
    folders = []
    for contents in (one, two):
        folder = tmp_path_factory.mktemp("f")
        try:
            _fill(folder, contents)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            return  # a name is both a file and a folder
        folders.append(files.hash_folder(folder))
    assert (folders[0] == folders[1]) == (one == two)


def test_remove_leftovers_keeps_finished_files(tmp_path: Path) -> None:
    _fill(
        tmp_path,
        {"a": b"", ".b.aside~": b"", "c/.d.1.discarded~/e": b"", ".keep~": b"", "c/f": b""},
    )
    files.remove_leftovers(tmp_path)
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert left == [".keep~", "a", "c", "c/f"]


def test_discard_of_a_missing_folder_does_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    files.discard(tmp_path / "a")
    files.discard(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_sweep_finishes_the_deletions_of_killed_processes(tmp_path: Path) -> None:
    _fill(tmp_path, {".a.1.discarded~/b": b"", ".c.1.aside~": b"", "d": b""})
    files.sweep_discarded(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".c.1.aside~", "d"]
