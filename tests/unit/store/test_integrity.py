"""Artifacts are hashed before use: damage is detected, and nothing is read twice."""

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nemo_rl_core.errors import StoreError
from nemo_rl_core.produce import StageInputs, StageResult, produce
from nemo_rl_core.store import store as store_module
from nemo_rl_core.store.files import hash_file
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import HashCache, Store, damage, damage_of_changed_files

INPUTS = StageInputs("train_sft", {"num_steps": 6})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "store"))
    return Store(tmp_path / "store")


def work(folder: Path) -> StageResult:
    (folder / "model").mkdir()
    (folder / "model" / "model.safetensors").write_bytes(bytes(range(256)))
    (folder / "rows").write_text("rows")
    return StageResult("checkpoint", "hf")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def empty(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text("")


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: flip_a_bit(folder / "model" / "model.safetensors"),
        lambda folder: flip_a_bit(folder / "manifest.json"),
        lambda folder: shutil.rmtree(folder / "model"),
        lambda folder: (folder / "more").touch(),
        lose("model/model.safetensors"),
        lose("manifest.json"),
        empty("manifest.json"),
    ],
    ids=["weights", "manifest", "no model", "a file more", "no weights", "no manifest", "empty"],
)
def test_a_damaged_artifact_is_set_aside_and_rebuilt(
    store: Store, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    made = produce(INPUTS, work)
    good = hash_file(made / "rows"), hash_file(made / "model" / "model.safetensors")
    harm(made)
    caplog.set_level(logging.WARNING)
    assert produce(INPUTS, work) == made
    assert good == (hash_file(made / "rows"), hash_file(made / "model" / "model.safetensors"))
    (aside,) = store.damaged.iterdir()
    assert aside.name.startswith(made.name)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"{made.name} is damaged and is rebuilt: ")
    assert message.endswith(f"moved to {aside}") and "\n" not in message
    assert damage(made) == ""


def test_a_damaged_artifact_without_a_record_does_not_replace_the_rebuilt_one(store: Store) -> None:
    made = produce(INPUTS, work)
    flip_a_bit(made / "rows")
    for record in store.work.glob("*.done"):
        record.unlink()
    assert produce(INPUTS, work) == made
    assert (made / "rows").read_text() == "rows"


def test_concurrent_stages_rebuild_an_artifact_once(store: Store) -> None:
    made = produce(INPUTS, work)
    flip_a_bit(made / "rows")
    begun: list[Path] = []

    def counted(folder: Path) -> StageResult:
        begun.append(folder)
        return work(folder)

    with ThreadPoolExecutor(4) as pool:
        artifacts = list(pool.map(lambda _: produce(INPUTS, counted), range(4)))
    assert artifacts == [made] * 4
    assert len(begun) == len(list(store.damaged.iterdir())) == 1
    assert (made / "rows").read_text() == "rows"


def test_no_stage_reads_a_damaged_parent(store: Store) -> None:
    parent = produce(INPUTS, work)
    flip_a_bit(parent / "model" / "model.safetensors")
    with pytest.raises(StoreError, match="is damaged") as caught:
        produce(StageInputs("export", {}, {"checkpoint": parent}), work)
    assert "the hash of its weights was" in str(caught.value)
    assert not list(store.artifacts.glob("export-*"))
    # Downloaded to another disk, like on a cluster.
    copy = shutil.copytree(parent, store.root / "download")
    with pytest.raises(StoreError, match="download is damaged"):
        produce(StageInputs("export", {}, {"checkpoint": copy}), work)


def test_settings_are_compared_with_their_hash(store: Store) -> None:
    made = produce(INPUTS, work)
    # As if forged with knowledge of the checksum.
    Manifest.read(made).model_copy(update={"config": {"num_steps": 999}}).write(made)
    assert damage(made).startswith("the hash of its settings was ")


def test_a_special_file_is_damage_and_does_not_block(store: Store) -> None:
    made = produce(INPUTS, work)
    os.mkfifo(made / "pipe")
    assert "not a regular file" in damage(made)
    (made / "pipe").unlink()
    (made / "pipe").symlink_to(made / "nowhere")
    assert "No such file" in damage(made)


def test_temporarily_unreadable_files_are_not_damage(store: Store) -> None:
    made = produce(INPUTS, work)

    def too_many_open(path: Path) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with pytest.raises(OSError, match="Too many open files"):
        damage(made, too_many_open)


def change(path: Path, step: Callable[[], None]) -> None:
    """Repeats a step until the clock of the file system has advanced."""
    before = path.stat().st_ctime_ns
    step()
    while path.stat().st_ctime_ns == before:
        step()


CHANGES: dict[str, Callable[[Path, os.stat_result], None]] = {
    "size": lambda path, _: path.write_text("longer"),
    "same size": lambda path, _: path.write_text("rowz"),
    "same size and mtime": lambda path, was: (
        path.write_text("rowz"),
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns)),
    ),
}  # fmt: skip


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as old enough immediately; the test waits for the file system's clock."""
    monkeypatch.setattr(store_module, "_SETTLED_NS", -1)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("kind", CHANGES)
def test_a_file_is_read_again_when_it_has_changed(tmp_path: Path, kind: str) -> None:
    path, memory = tmp_path / "rows", tmp_path / "memory.json"
    path.write_text("rows")
    first = HashCache(tmp_path, memory)
    assert first(path) == hash_file(path)
    first.save()
    was = path.stat()
    change(path, lambda: CHANGES[kind](path, was))
    assert HashCache(tmp_path, memory)(path) == hash_file(path)


@pytest.mark.usefixtures("settled")
def test_a_replaced_file_is_read(tmp_path: Path) -> None:
    path, memory = tmp_path / "rows", tmp_path / "memory.json"
    path.write_text("rows")
    first = HashCache(tmp_path, memory)
    first(path)
    first.save()
    seen = json.loads(memory.read_text())
    (tmp_path / "other").write_text("rowz")
    (tmp_path / "other").replace(path)
    now = path.stat()
    # Despite the same size and times.
    seen["rows"][1:3] = [now.st_mtime_ns, now.st_ctime_ns]
    memory.write_text(json.dumps(seen))
    assert HashCache(tmp_path, memory)(path) == hash_file(path)


@pytest.mark.usefixtures("settled")
def test_unchanged_files_are_not_read_again(store: Store) -> None:
    made = produce(INPUTS, work)
    assert damage_of_changed_files(store, made) == ""
    memory = store.verified / f"{made.name}.json"
    seen = json.loads(memory.read_text())
    assert sorted(seen) == ["model/model.safetensors", "rows"]
    assert seen["rows"][4] == hash_file(made / "rows")
    # The hash comes from the cache, not from the file.
    seen["rows"][4] = "0" * 64
    memory.write_text(json.dumps(seen))
    assert HashCache(made, memory)(made / "rows") == "0" * 64
    # But a wrong cache entry does not mean damage.
    assert damage_of_changed_files(store, made) == ""


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"rows": 3}', '{"rows": [4, 0, 0, 0, "x"]}', "\xff"]
)
def test_a_damaged_hash_cache_counts_as_empty(store: Store, text: str) -> None:
    made = produce(INPUTS, work)
    store.verified.mkdir(parents=True, exist_ok=True)
    (store.verified / f"{made.name}.json").write_text(text, encoding="latin-1")
    assert damage_of_changed_files(store, made) == ""
    flip_a_bit(made / "rows")
    assert damage_of_changed_files(store, made).startswith("the hash of its content was")


def test_a_recently_changed_file_is_not_cached(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change again within one step of the file system's clock and look the same."""
    made = produce(INPUTS, work)
    monkeypatch.setattr(store_module, "_SETTLED_NS", 3600 * 10**9)
    assert damage_of_changed_files(store, made) == ""
    assert not list(store.verified.glob("*"))


@pytest.mark.usefixtures("settled")
def test_two_processes_may_write_the_hash_cache_at_once(store: Store) -> None:
    made = produce(INPUTS, work)
    path = store.verified / "x.json"
    one, other = HashCache(made, path), HashCache(made, path)
    for memory, name in ((one, "rows"), (other, "model/model.safetensors")):
        memory(made / name)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(HashCache.save, [one, other] * 10))
    both = json.loads(path.read_text())
    assert list(both) in (["rows"], ["model/model.safetensors"])
    assert [path.name for path in store.verified.iterdir()] == ["x.json"]
    cache = HashCache(made, path)
    for name in ("rows", "model/model.safetensors"):
        assert cache(made / name) == hash_file(made / name)
