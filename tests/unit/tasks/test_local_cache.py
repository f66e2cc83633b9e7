"""Local runs of cached stages: hits, misses, records, and a store that loses a folder.

Each test runs a small workflow of its own in a new process, with a store of its own.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

WORKFLOW = """
import json, os, shutil, sys
from pathlib import Path

from flytekit import workflow

import workflows  # wraps flytekit's local execution
from nemo_rl_core.config.base import FrozenConfig
from tasks.artifacts import Checkpoint, CheckpointArtifact, Dataset, DatasetArtifact
from tasks.stage import Made, cached_task, make


class Text(FrozenConfig):
    text: str


@cached_task()
def first(config: Text) -> Dataset:
    def work(folder: Path) -> Made:
        with open("ran.txt", "a") as log:
            log.write("first\\n")
        (folder / "text.txt").write_text(config.text.upper())
        return Made("dataset", "text", f"wrote {config.text}", num_tokens=5)
    return DatasetArtifact(**make("first", config=config, parents={}, work=work))


@cached_task()
def second(config: Text, data: Dataset) -> Checkpoint:
    def work(folder: Path) -> Made:
        with open("ran.txt", "a") as log:
            log.write("second\\n")
        if config.text == "raise":
            raise KeyError("second")
        (folder / "copy.txt").write_text((data.folder / "text.txt").read_text() + config.text)
        return Made("checkpoint", "text", "copied", step=3, deck="<p>hello</p>")
    parents = {"data": data}
    return CheckpointArtifact(**make("second", config=config, parents=parents, work=work))


@workflow
def both(one: Text, two: Text) -> Checkpoint:
    return second(config=two, data=first(config=one))


def main(one: str, two: str) -> None:
    made = both(one=Text(text=one), two=Text(text=two))
    print("RESULT", json.dumps([made.stage, made.step, str(made.folder), made.content_hash]))
"""


@pytest.fixture
def run_both(tmp_path: Path, python: Callable[..., str]) -> Callable[..., tuple[str, list[str]]]:
    """Runs the workflow; returns what it printed and which stages did their work."""
    (tmp_path / "small_workflow.py").write_text(WORKFLOW)
    log = tmp_path / "ran.txt"

    def run(one: str, two: str) -> tuple[str, list[str]]:
        log.unlink(missing_ok=True)
        script = (
            "import os, sys; os.chdir(sys.argv[1]); sys.path.insert(0, sys.argv[1]);"
            "import small_workflow; small_workflow.main(*sys.argv[2:])"
        )
        output = python(script, tmp_path, one, two)
        return output, log.read_text().split() if log.exists() else []

    return run


def result(output: str) -> list:
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def test_a_second_run_takes_all_from_the_cache(run_both: Callable) -> None:
    output, ran = run_both("a", "b")
    assert ran == ["first", "second"]
    stage, step, folder, _ = result(output)
    assert (stage, step) == ("second", 3)
    assert (Path(folder) / "copy.txt").read_text() == "Ab"
    again, ran = run_both("a", "b")
    assert ran == []
    assert result(again) == result(output)
    assert "first  CACHED  wrote a" in again
    assert "second  CACHED  copied" in again


def test_only_what_changed_runs(run_both: Callable) -> None:
    run_both("a", "b")
    assert run_both("a", "c")[1] == ["second"]
    assert run_both("d", "c")[1] == ["first", "second"]


def test_equal_content_of_other_origin_is_a_hit(run_both: Callable) -> None:
    run_both("a", "b")
    # "A" is written as "A", too: the second stage cannot tell the difference.
    assert run_both("A", "b")[1] == ["first"]


def test_the_table_and_the_progress_of_a_run(run_both: Callable) -> None:
    output, _ = run_both("a", "b")
    lines = output.splitlines()
    assert lines[0] == "first  started"
    assert lines[1].startswith("first  ran  ")
    assert lines[1].endswith("s  wrote a")
    rows = [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]
    (first_row,) = [row for row in rows if "first" in row]
    # Tokens of the stage and, below, of the run.
    assert first_row[4] == "5"
    (total,) = [row for row in rows if "total" in row]
    assert total[4] == "5"
    cached, _ = run_both("a", "b")
    rows = [[cell.strip() for cell in line.split("│")] for line in cached.splitlines()]
    (first_row,) = [row for row in rows if "first" in row]
    # What was made by an earlier run has cost this one nothing.
    assert first_row[2:5] == ["CACHED", first_row[3], ""]


def test_a_folder_that_is_gone_makes_a_hit_a_miss(run_both: Callable, tmp_path: Path) -> None:
    import shutil

    output, _ = run_both("a", "b")
    shutil.rmtree(result(output)[2])
    again, ran = run_both("a", "b")
    assert ran == ["second"]
    assert result(again) == result(output)


def test_what_fails_is_named_and_not_cached(run_both: Callable, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        run_both("a", "raise")
    assert "KeyError" in str(caught.value)
    log = next((tmp_path / "store" / "runs").glob("*/run.log")).read_text()
    assert "Traceback" in log
    assert 'raise KeyError("second")' in log
    assert run_both("a", "b")[1] == ["second"]


def test_everything_lies_in_the_store(run_both: Callable, tmp_path: Path) -> None:
    run_both("a", "b")
    names = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert names == {"store", "ran.txt", "small_workflow.py"}
    manifests = {
        json.loads(path.read_text())["stage"]: json.loads(path.read_text())
        for path in (tmp_path / "store" / "artifacts").glob("*/manifest.json")
    }
    assert set(manifests) == {"first", "second"}
    (parent,) = manifests["second"]["parents"]
    assert parent["content_hash"] == manifests["first"]["content_hash"]
    assert manifests["first"]["config"] == {"text": "a"}
    decks = (tmp_path / "store" / "artifacts").glob("second-*/deck.html")
    assert [deck.read_text() for deck in decks] == ["<p>hello</p>"]
