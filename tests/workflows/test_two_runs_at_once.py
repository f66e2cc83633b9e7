"""Two real runs on one store at the same time, with the user's command."""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from nemo_rl_core.history.database import open_for_reading
from nemo_rl_core.maintenance.verify import verify
from nemo_rl_core.store.store import Store

Run = Any
REPOSITORY = Path(__file__).resolve().parents[2]
SFT = ("sft", "sft")
STAGES = {"prepare_model", "prepare_data", "train_sft", "evaluate", "promote", "export"}


@pytest.fixture
def sft_recipe(recipe: dict[str, Any]) -> dict[str, Any]:
    shared = ("model", "data", "sft", "generation", "cluster", "evaluation")
    return {key: recipe[key] for key in shared}


def _run_together(run_recipe: Callable[..., Run], recipes: list[Any], store: Path) -> list[Run]:
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(run_recipe, recipe, store, SFT) for recipe in recipes]
        return [each.result() for each in running]


def _trainings(store: Store) -> int:
    """Returns the number of executions that have trained, as a waiting one reports no steps."""
    with closing(open_for_reading(store)) as database:
        rows = database.execute(
            "SELECT DISTINCT nodes.execution FROM metrics JOIN nodes ON nodes.id = metrics.node "
            "WHERE nodes.name LIKE 'train_sft%' AND metrics.name = 'loss'"
        )
        return len(rows.fetchall())


@pytest.mark.thorough
def test_the_same_recipe_twice_does_the_work_once(
    tmp_path: Path, run_recipe: Callable[..., Run], sft_recipe: dict[str, Any]
) -> None:
    runs = _run_together(run_recipe, [sft_recipe, sft_recipe], tmp_path / "store")
    assert [run.exit_code for run in runs] == [0, 0], [run.output[-3000:] for run in runs]
    assert runs[0].value("model:") == runs[1].value("model:")
    store = Store(tmp_path / "store")
    assert _trainings(store) == 1
    # One artifact for every record of work, and no unfinished work.
    records = [json.loads(path.read_text())["artifact"] for path in store.work.glob("*.done")]
    assert sorted(records) == sorted(path.name for path in store.artifacts.iterdir())
    assert {name.rpartition("-")[0] for name in records} > STAGES
    assert [path for path in store.work.iterdir() if path.is_dir()] == []
    assert len(list(store.runs.iterdir())) == 2
    assert len(runs[0].metrics("train_sft")) == 6
    verdict = verify(store)
    assert (verdict.num_artifacts, verdict.findings) == (len(records), ())


@pytest.mark.thorough
def test_different_recipes_with_concurrent_garbage_collection(
    tmp_path: Path, run_recipe: Callable[..., Run], sft_recipe: dict[str, Any]
) -> None:
    """Unused artifacts are removed continuously, but not those that a run needs."""
    store, ended, collected = Store(tmp_path / "store"), Event(), []
    command = [sys.executable, "-c", "from workflows.cli import main; main()", "gc", "--json"]
    environment = {"NEMO_RL_HOME": str(store.root), "PATH": "/usr/bin:/bin"}

    def collect() -> None:
        while not ended.is_set():
            (store.artifacts / f"garbage-{len(collected):016x}").mkdir(parents=True)
            done = subprocess.run(
                [*command, "--keep-runs", "0", "--yes"],
                cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False,
            )  # fmt: skip
            collected.append((done.returncode, done.stdout, done.stderr))
            ended.wait(1)

    def run(recipe: dict[str, Any]) -> Run:
        try:
            return run_recipe(recipe, store.root, SFT)
        finally:
            ended.set()  # from then on nobody uses the artifacts of this run

    other = sft_recipe | {"sft": sft_recipe["sft"] | {"learning_rate": 0.002}}
    with ThreadPoolExecutor() as pool:
        collector = pool.submit(collect)
        runs = list(pool.map(run, [sft_recipe, other]))
        collector.result()
    assert [run.exit_code for run in runs] == [0, 0], [run.output[-3000:] for run in runs]
    assert _trainings(store) == 2
    assert runs[0].value("model:") != runs[1].value("model:")
    assert [error for code, _, error in collected if code] == []
    removed = [name for _, output, _ in collected for name in json.loads(output)["artifacts"]]
    assert len([name for name in removed if name.startswith("garbage-")]) == len(collected) > 3
    assert Path(runs[1].value("model:")).is_dir() or Path(runs[0].value("model:")).is_dir()
