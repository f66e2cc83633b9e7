"""Local runs of a mapped stage: its cached list when points fail or folders are removed."""

import re
import shutil
from pathlib import Path

import pytest
from flytekit import map_task, workflow

import workflows
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.produce import StageResult
from tasks.artifacts import Dataset, DatasetArtifact
from tasks.stage.stage import cached_task, dynamic_stage, make

assert workflows  # wraps flytekit's local execution when it is imported
_worked: list[str] = []
"""Names of the points whose work has begun since the last run did."""
_broken: set[str] = set()
"""Names of points that fail, for now."""


class Point(FrozenConfig):
    name: str


@cached_task()
def measured(config: Point) -> Dataset:
    def work(folder: Path) -> StageResult:
        _worked.append(config.name)
        if config.name in _broken:
            raise ConnectionError("the judge does not answer")
        (folder / "name.txt").write_text(config.name)
        return StageResult("report", "text", config.name, num_tokens=5)

    return DatasetArtifact(**make(__name__, "measured", config=config, parents={}, work=work))


@dynamic_stage
def mapped(names: list[str]) -> list[Dataset | None]:
    return map_task(measured, min_success_ratio=0.5)(config=[Point(name=name) for name in names])


@workflow
def sweep(names: list[str]) -> list[Dataset | None]:
    return mapped(names=names)


def num_tokens(output: str) -> str:
    """The duration in the last line of the table."""
    (total,) = [line for line in output.splitlines() if line.startswith("│ total")]
    return total.split("│")[4].strip()


def run(*names: str) -> list[Dataset | None]:
    _worked.clear()
    made: list[Dataset | None] = sweep(names=list(names))
    return made


@pytest.mark.usefixtures("own_store")
def test_a_point_that_failed_is_tried_again_and_the_others_are_not(
    capfd: pytest.CaptureFixture[str],
) -> None:
    _broken.add("b")
    made = run("a", "b", "c")
    assert [report and report.summary for report in made] == ["a", None, "c"]
    output = capfd.readouterr().out
    assert output.startswith("measured  started\nmeasured  started\nmeasured  ran  ")
    assert re.search(r"\nmeasured  FAILED  .* s  ConnectionError: the judge does not", output)
    assert "  2 of 3 points succeeded\n" in output
    assert num_tokens(output) == "10"
    assert run("a", "b", "c")[1] is None
    assert _worked == ["b"]
    # Points from the cache cost this run nothing.
    assert num_tokens(capfd.readouterr().out) == "0"
    _broken.clear()
    repaired = run("a", "b", "c")
    assert [report and report.summary for report in repaired] == ["a", "b", "c"]
    assert _worked == ["b"]
    assert num_tokens(capfd.readouterr().out) == "5"
    run("a", "b", "c")
    assert _worked == []


@pytest.mark.usefixtures("own_store")
def test_a_point_whose_folder_is_gone_is_measured_again() -> None:
    first, _ = run("a", "b")
    assert first is not None
    shutil.rmtree(first.folder)
    again, _ = run("a", "b")
    assert _worked == ["a"]
    assert again is not None
    assert again.folder.is_dir()
