"""Local runs of cached stages: hits, misses, records, and a store that loses a folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import diskcache
import pytest
from click.testing import CliRunner
from flytekit import workflow

import workflows
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.history.queries import History
from nemo_rl_core.produce import StageResult, cost_html
from nemo_rl_core.store.store import Store
from tasks.artifacts import Checkpoint, CheckpointArtifact, Dataset, DatasetArtifact
from tasks.cli.store.gc import gc
from tasks.flyte.local import use_store
from tasks.local_run.run import RunFailed
from tasks.stage.stage import cached_task, make

assert workflows  # wraps flytekit's local execution when it is imported
_worked: list[str] = []
"""Names of the stages that have done their work since the last run began."""


class Text(FrozenConfig):
    text: str


@cached_task()
def first(config: Text) -> Dataset:
    def work(folder: Path) -> StageResult:
        _worked.append("first")
        (folder / "text.txt").write_text(config.text.upper())
        return StageResult("dataset", "text", f"wrote {config.text}", num_tokens=5)

    return DatasetArtifact(**make(__name__, "first", config=config, parents={}, work=work))


@cached_task()
def second(config: Text, data: Dataset) -> Checkpoint:
    def work(folder: Path) -> StageResult:
        _worked.append("second")
        if config.text == "raise":
            raise KeyError("no such thing")
        (folder / "copy.txt").write_text((data.folder / "text.txt").read_text() + config.text)
        return StageResult("checkpoint", "text", "copied", step=3, deck="<p>hello</p>")

    parents = {"data": data}
    return CheckpointArtifact(**make(__name__, "second", config=config, parents=parents, work=work))


@workflow
def both(one: Text, two: Text) -> Checkpoint:
    return second(config=two, data=first(config=one))


class Outcome(NamedTuple):
    """Output and result of a run, and the stages that did their work."""

    artifact: CheckpointArtifact
    output: str
    worked: list[str]


@pytest.fixture
def run_both(own_store: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(one: str, two: str) -> Outcome:
        _worked.clear()
        made = both(one=Text(text=one), two=Text(text=two))
        return Outcome(made, capfd.readouterr().out, list(_worked))

    return run


def rows_of(output: str) -> dict[str, list[str]]:
    """Cells of the table at the end, by stage."""
    rows = [[cell.strip() for cell in line.split("│")] for line in output.splitlines()]
    return {row[1]: row for row in rows if len(row) > 3}


def test_a_second_run_takes_all_from_the_cache(run_both: Callable[..., Outcome]) -> None:
    made = run_both("a", "b")
    assert made.worked == ["first", "second"]
    assert (made.artifact.stage, made.artifact.step) == ("second", 3)
    assert (made.artifact.folder / "copy.txt").read_text() == "Ab"
    again = run_both("a", "b")
    assert again.worked == []
    assert again.artifact.folder == made.artifact.folder
    assert again.artifact.model_dump(exclude={"directory"}) == made.artifact.model_dump(
        exclude={"directory"}
    )
    assert "first  CACHED  wrote a" in again.output
    assert "second  CACHED  copied" in again.output


@pytest.mark.slow
def test_only_what_changed_runs(run_both: Callable[..., Outcome]) -> None:
    run_both("a", "b")
    assert run_both("a", "c").worked == ["second"]
    assert run_both("d", "c").worked == ["first", "second"]


@pytest.mark.slow
def test_equal_content_of_other_origin_is_a_hit(run_both: Callable[..., Outcome]) -> None:
    run_both("a", "b")
    # "A" is written as "A", too: the second stage cannot see the difference.
    assert run_both("A", "b").worked == ["first"]


def test_the_table_and_the_progress_of_a_run(run_both: Callable[..., Outcome]) -> None:
    output = run_both("a", "b").output
    lines = output.splitlines()
    assert lines[0] == "first  started"
    assert lines[1].startswith("first  ran  ")
    assert lines[1].endswith("s  wrote a")
    # Tokens of the stage and, below, of the run.
    assert rows_of(output)["first"][4] == rows_of(output)["total"][4] == "5"
    # Artifacts of an earlier run cost this one nothing.
    cached = rows_of(run_both("a", "b").output)
    assert (cached["first"][2], cached["first"][4], cached["total"][4]) == ("CACHED", "", "0")


def test_pyflyte_ends_with_a_command_and_not_with_a_repr(
    own_store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from flytekit.clis.sdk_in_container.pyflyte import main

    (tmp_path / "doubled.py").write_text(_DOUBLED)
    monkeypatch.chdir(tmp_path)
    arguments = ["run", "doubled.py", "doubled", "--number", "21"]
    main.main(arguments, prog_name="pyflyte", standalone_mode=False)
    (run,) = (own_store / "runs").iterdir()
    lines = capfd.readouterr().out.splitlines()
    assert lines[-3] == "log: " + f"{run}/run.log".removeprefix(f"{tmp_path}/")
    assert lines[-2].startswith("page: ") and lines[-2].endswith("nemo-rl ui")
    assert lines[-1].startswith("run: ") and lines[-1].endswith(f"nemo-rl runs {run.name}")


_DOUBLED = """
from flytekit import task, workflow
import workflows

@task
def double(number: int) -> int:
    return 2 * number

@workflow
def doubled(number: int) -> int:
    return double(number=number)
"""


def test_a_folder_that_is_gone_makes_a_hit_a_miss(run_both: Callable[..., Outcome]) -> None:
    made = run_both("a", "b")
    shutil.rmtree(made.artifact.folder)
    again = run_both("a", "b")
    assert again.worked == ["second"]
    assert again.artifact.folder == made.artifact.folder
    assert again.artifact.content_hash == made.artifact.content_hash


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: flip_a_bit(folder / "text.txt"),
        lambda folder: flip_a_bit(folder / "manifest.json"),
    ],
    ids=["a bit", "a bit of the manifest"],
)
def test_a_damaged_hit_is_made_again_and_reported(
    run_both: Callable[..., Outcome], own_store: Path, harm: Callable[[Path], None]
) -> None:
    run_both("a", "b")
    (first_made,) = (own_store / "artifacts").glob("first-*")
    harm(first_made)
    again = run_both("a", "b")
    assert again.worked == ["first"]
    (message,) = [line for line in again.output.splitlines() if "is damaged" in line]
    assert message.startswith(f"{first_made.name} is damaged and is rebuilt: ")
    assert (first_made / "text.txt").read_text() == "A"
    assert "second  CACHED  copied" in again.output
    assert run_both("a", "b").worked == []


@pytest.mark.slow
def test_damage_does_not_reach_later_stages(
    run_both: Callable[..., Outcome], own_store: Path
) -> None:
    """The child is gone and would be made from a damaged parent."""
    intact = run_both("a", "b")
    (first_made,) = (own_store / "artifacts").glob("first-*")
    flip_a_bit(first_made / "text.txt")
    shutil.rmtree(intact.artifact.folder)
    again = run_both("a", "b")
    assert again.worked == ["first", "second"]
    assert (again.artifact.folder / "copy.txt").read_text() == "Ab"
    assert again.artifact.content_hash == intact.artifact.content_hash


@pytest.mark.slow
def test_a_copied_store_uses_its_own_artifacts(
    run_both: Callable[..., Outcome],
    own_store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = run_both("a", "b").artifact.folder
    copy = shutil.copytree(own_store, tmp_path / "copy")
    own_store.rename(tmp_path / "away")
    monkeypatch.setenv("NEMO_RL_HOME", str(copy))
    use_store()
    copied = run_both("a", "b")
    assert copied.worked == []
    assert copied.artifact.folder == copy / "artifacts" / original.name
    assert "first  CACHED" in copied.output and "second  CACHED" in copied.output
    assert not own_store.exists()
    with History(Store(copy)) as history:
        again, first = history.executions().items
        assert again.num_cached == 2
        makers = [history.node(node.id).maker for node in history.nodes(again.id)]
        assert {maker.execution for maker in makers if maker} == {first.id}
        assert {Path(row.path).parent for row in history.artifacts_of(again.id)} == {
            copy / "artifacts"
        }


@pytest.mark.slow
def test_a_stage_that_finds_its_artifact_in_the_store_is_cached(
    run_both: Callable[..., Outcome], own_store: Path
) -> None:
    """The same as after a kill between the artifact and the cache's entry."""
    run_both("a", "b")
    (own_store / "cache" / "flyte").rename(own_store / "away")
    use_store()
    again = run_both("a", "b")
    assert again.worked == []
    assert "first  CACHED  wrote a" in again.output
    with History(Store(own_store)) as history:
        cached_run, made = history.executions().items
        assert (cached_run.num_cached, made.num_cached) == (2, 0)
        maker = history.node(history.nodes(cached_run.id)[0].id).maker
        assert maker is not None and maker.execution == made.id


@pytest.mark.slow
def test_a_damaged_stage_cache_is_named(run_both: Callable[..., Outcome], own_store: Path) -> None:
    run_both("a", "b")
    use_store()  # as a new process would open it
    path = own_store / "cache" / "flyte" / "cache.db"
    for name in ("cache.db-wal", "cache.db-shm"):
        path.with_name(name).unlink(missing_ok=True)
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(RunFailed) as caught:
        run_both("a", "b")
    assert f"the stage cache {path} is damaged" in caught.value.message
    assert f"fix: end all runs and move {path.parent} away" in caught.value.message
    path.parent.rename(own_store / "away")
    use_store()
    assert run_both("a", "b").worked == []


class RunsCode:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self._marker,)


@pytest.mark.slow
def test_the_cache_of_a_store_is_not_unpickled(
    run_both: Callable[..., Outcome], own_store: Path, tmp_path: Path
) -> None:
    run_both("a", "b")
    marker, folder = tmp_path / "marker", own_store / "cache" / "flyte"
    with diskcache.Cache(str(folder)) as cache:
        for key in list(cache):
            cache[key] = RunsCode(marker)
    use_store()
    with pytest.raises(RunFailed) as caught:
        run_both("a", "b")
    assert f"the stage cache {folder} has a pickled entry" in caught.value.message
    assert "pickled entry" in str(CliRunner().invoke(gc, ["--yes"]).exception)
    assert not marker.exists()
    folder.rename(own_store / "away")
    use_store()
    assert run_both("a", "b").worked == []


@pytest.mark.slow
def test_a_failed_stage_is_named_and_not_cached(
    run_both: Callable[..., Outcome], own_store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunFailed) as caught:
        run_both("a", "raise")
    assert caught.value.exit_code == 1
    assert "no such thing" in caught.value.message
    assert len(caught.value.message.splitlines()) < 10
    (log,) = (own_store / "runs").glob("*/run.log")
    assert str(log) in caught.value.message
    assert "Traceback" in log.read_text()
    assert 'raise KeyError("no such thing")' in log.read_text()
    shown = capfd.readouterr().out
    assert "second  FAILED" in shown
    assert "Traceback" not in shown
    assert run_both("a", "b").worked == ["second"]


def test_everything_is_in_the_store(run_both: Callable[..., Outcome], own_store: Path) -> None:
    made = run_both("a", "b")
    manifests = {
        manifest["stage"]: manifest
        for path in (own_store / "artifacts").glob("*/manifest.json")
        if (manifest := json.loads(path.read_text()))
    }
    assert set(manifests) == {"first", "second"}
    (parent,) = manifests["second"]["parents"]
    assert parent["content_hash"] == manifests["first"]["content_hash"]
    assert manifests["first"]["config"] == {"text": "a"}
    assert made.artifact.folder.parent == own_store / "artifacts"
    deck = (made.artifact.folder / "deck.html").read_text()
    assert deck == "<p>hello</p>" + cost_html(made.artifact.manifest.cost)
    # Neither a copy of the stages' outputs, nor finished work.
    assert not list((own_store / "cache" / "raw").glob("*/*"))
    assert not [path for path in (own_store / "work").iterdir() if path.is_dir()]
