"""Output of `nemo-rl gc`, and flytekit's cache, which points into the store."""

import shutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store, hash_content
from tasks.cli.store.gc import gc
from tasks.cli.store.units import Age, Size, show_bytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 2_592_000), ("12h", 43_200), ("1.5m", 90), ("2w", 1_209_600)]
)
def test_ages(text: str, seconds: float) -> None:
    assert Age().convert(text, None, None) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GiB", 21_474_836_480), ("1.5 KB", 1500), ("2M", 2_097_152), ("7", 7), ("1TB", 10**12)],
)
def test_sizes(text: str, size: int) -> None:
    assert Size().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1y"])
def test_an_invalid_age_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="as in 30d"):
        Age().convert(text, None, None)


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 PiB", "1gb"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="as in 20GiB"):
        Size().convert(text, None, None)


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (15_728_640, "15.0 MiB"),
        (123 * 2**30, "123 GiB"), (5000 * 2**40, "5000 TiB"),
    ],
)  # fmt: skip
def test_sizes_are_shown(size: int, shown: str) -> None:
    assert show_bytes(size) == shown


@pytest.fixture
def run_folder(own_store: Path) -> Path:
    folder = own_store / "runs" / "20200101T000000Z-abcdef"
    folder.mkdir(parents=True)
    (folder / "run.log").write_text("x" * 10_000)
    return folder


def test_a_pin_keeps_a_run(run_folder: Path) -> None:
    runner = CliRunner()
    assert runner.invoke(gc, ["--pin", "2020"]).output == f"pinned {run_folder.name}\n"
    result = runner.invoke(gc, ["--keep-runs", "0", "--yes"])
    assert (result.exit_code, run_folder.exists()) == (0, True)
    assert runner.invoke(gc, ["--unpin", "2020"]).output == f"unpinned {run_folder.name}\n"
    result = runner.invoke(gc, ["--keep-runs", "0", "--yes"])
    assert "freed" in result.output
    assert not run_folder.exists()


def test_a_dry_run_removes_nothing_and_asks_nothing_without_a_terminal(run_folder: Path) -> None:
    runner = CliRunner()
    result = runner.invoke(gc, ["--older-than", "30d", "--dry-run"])
    assert f"run        16.0 KiB  {run_folder.name}\n" in result.output
    result = runner.invoke(gc, ["--older-than", "30d"])
    assert result.exit_code == 2
    assert "--yes" in result.output
    assert run_folder.exists()


def test_a_size_that_cannot_be_reached_is_reported(run_folder: Path) -> None:
    (run_folder / "pinned").touch()
    result = CliRunner().invoke(gc, ["--max-size", "1KiB", "--yes"])
    assert result.exit_code == 1
    assert "still takes" in result.output


def test_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "none"))
    assert "there is no store" in CliRunner().invoke(gc, ["--yes"]).output
    assert not (tmp_path / "none").exists()


def test_cached_results_of_removed_artifacts_are_removed(own_store: Path) -> None:
    from flytekit.core.context_manager import FlyteContextManager
    from flytekit.core.local_cache import LocalTaskCache
    from flytekit.core.type_engine import LiteralMap, TypeEngine
    from flytekit.types.directory import FlyteDirectory

    from tasks.artifacts import DatasetArtifact

    store = Store(own_store)
    context = FlyteContextManager.current_context()
    for name in ("kept", "gone"):
        folder = store.artifacts / name
        folder.mkdir(parents=True)
        content = hash_content(folder)
        Manifest(kind="dataset", format="none", stage=name, content_hash=content).write(folder)
        directory = FlyteDirectory(str(folder), remote_directory=False)
        artifact = DatasetArtifact(directory=directory, stage="prepare_data", content_hash=name)
        literal = TypeEngine.to_literal(
            context, artifact, DatasetArtifact, TypeEngine.to_literal_type(DatasetArtifact)
        )
        LocalTaskCache.set(name, "1", LiteralMap({}), (), LiteralMap({"o0": literal}))
    assert LocalTaskCache.get("gone", "1", LiteralMap({}), ()) is not None
    store.release()
    shutil.rmtree(store.artifacts / "gone")
    assert CliRunner().invoke(gc, ["--yes"]).exit_code == 0
    keys = list(LocalTaskCache._cache)
    assert [key.partition("-")[0] for key in keys] == ["kept"]
    assert LocalTaskCache.get("kept", "1", LiteralMap({}), ()) is not None
    store.release()
