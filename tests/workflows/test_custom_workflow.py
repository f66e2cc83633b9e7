"""A user's workflow in a separate folder is cached, recorded and shown, with clear errors."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_core.history.queries import History
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store
from tests.documents import REPOSITORY, blocks_of

pytestmark = pytest.mark.slow

PAGE = (REPOSITORY / "docs" / "workflows.md").read_text()
PLAIN = """
import shutil
from flytekit import task, workflow
from flytekit.types.directory import FlyteDirectory
from mine import MODEL, Checkpoint, ScaleConfig, prepare_model, scale_logits


@task
def edited(checkpoint: Checkpoint) -> Checkpoint:
    shutil.copytree(checkpoint.folder, "edited", dirs_exist_ok=True)
    with open("edited/model/config.json", "a") as file:
        file.write(" ")
    return checkpoint.model_copy(update={"directory": FlyteDirectory("edited")})


@workflow
def plain() -> Checkpoint:
    model = prepare_model(config=MODEL)
    return scale_logits(config=ScaleConfig(), checkpoint=edited(checkpoint=model.base))
"""


def block(language: str) -> str:
    return next(each.text for each in blocks_of(PAGE) if each.language == language)


class User:
    """A folder with the example of the page, and a store."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder / "user", Store(folder / "store")
        self.folder.mkdir()
        (self.folder / "mine.py").write_text(block("python"))

    def pyflyte(self, *words: str, code: int = 0) -> str:
        variables = {"NEMO_RL_HOME": str(self.store.root), "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            [Path(sys.executable).with_name("pyflyte"), "run", *words],
            cwd=self.folder,
            env={**os.environ, **variables, "FLYTE_PLATFORM_URL": "localhost:1", "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


@pytest.mark.thorough
def test_the_example_runs_as_the_page_shows_and_is_cached(user: User) -> None:
    first = user.pyflyte("mine.py", "mine")
    printed = {masked(line) for line in first.splitlines()}
    assert {masked(line) for line in block("text").splitlines()} <= printed
    again = user.pyflyte("mine.py", "mine")
    assert re.findall(r"(\w+)  CACHED", again) == ["prepare_model", "scale_logits"]
    other = user.pyflyte("mine.py", "mine", "--config", '{"factor": 2}')
    assert re.findall(r"(\w+)  (CACHED|ran)", other) == [
        ("prepare_model", "CACHED"),
        ("scale_logits", "ran"),
    ]
    with History(user.store) as history:
        runs = history.executions().items
    assert [(each.workflow, each.state) for each in runs] == [("mine.mine", "succeeded")] * 3
    made = [Manifest.read(each) for each in user.store.artifacts.glob("scale_logits-*")]
    assert {each.config["factor"] for each in made} == {0.5, 2.0}
    assert all(each.parents[0].stage == "prepare_model" for each in made)


def masked(line: str) -> str:
    """Returns a printed line without durations and folders."""
    return re.sub(r"[\d.]+ s|\S+/artifacts/(\w+)-\S+", r"\1", line)


@pytest.mark.thorough
def test_a_file_that_a_task_reads_invalidates_both_caches(user: User) -> None:
    module, words = user.folder / "mine.py", user.folder / "factor.txt"
    opened = 'float((Path(__file__).parent / "factor.txt").read_text())'
    module.write_text(module.read_text().replace("*= config.factor", f"*= {opened}"))
    states = []
    for factor in ("0.5", "0.5", "2.0", "0.5"):
        words.write_text(factor)
        printed = user.pyflyte("mine.py", "mine")
        states += re.findall(r"scale_logits  (CACHED|ran)", printed)
    assert states == ["ran", "CACHED", "ran", "CACHED"]
    assert "scale_logits runs again: file ./factor.txt has changed" in all_logs(user)


def all_logs(user: User) -> str:
    return "".join(each.read_text() for each in sorted(user.store.runs.glob("*/run.log")))


@pytest.mark.thorough
def test_an_edited_artifact_of_a_plain_task_is_refused_with_a_fix(user: User) -> None:
    module = user.folder / "mine.py"
    module.write_text(module.read_text() + "\nMODEL = ModelTaskConfig.of(RECIPE)\n")
    (user.folder / "plain.py").write_text(PLAIN)
    output = " ".join(user.pyflyte("plain.py", "plain", code=1).replace("│", " ").split())
    assert "has changed" in output
    assert (
        "fix: edit an artifact in a task with @cached_task that returns the result of make"
        in output
    )
    assert "Traceback" not in output


def test_a_cluster_that_does_not_answer_is_named(user: User) -> None:
    output = user.pyflyte("--remote", "mine.py", "mine", code=1)
    assert "the code cannot be uploaded to the cluster on localhost:1" in output
    assert "docs/clusters.md" in output
    assert "Traceback" not in output
