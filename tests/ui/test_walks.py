"""Three walks of a user from a fresh clone: a run by pyflyte, a schedule, and its lineage.

The page is the real one in Chromium, the cluster Flyte's protocol on loopback.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from playwright.sync_api import BrowserContext, expect

from tests.commands import RECIPE, REPOSITORY
from tests.workflows.flyte_backend import Backend
from tests.workflows.test_day_by_day import scheduled_run, stages_run

pytestmark = pytest.mark.thorough

SMALL: dict[str, Any] = {
    "recipe": "grpo_arithmetic",
    **RECIPE,
    "grpo": {**RECIPE["grpo"], "num_iterations": 1, "num_steps_per_iteration": 2},
    "generation": {"backend": "hf", "max_new_tokens": 3},
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh clone, with the environment of this checkout."""
    folder = tmp_path_factory.mktemp("walk") / "nemo-rl-flow"
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, folder], check=True)
    (folder / ".venv").symlink_to(Path(sys.executable).parents[1], target_is_directory=True)
    return folder


@pytest.fixture(scope="module")
def environment(clone: Path) -> dict[str, str]:
    store = str(clone.parent / "store")
    return {**os.environ, "NEMO_RL_HOME": store, "PYTHONPATH": str(clone)}


@pytest.fixture(scope="module")
def finished(clone: Path, environment: dict[str, str]) -> str:
    """The output of the first walk's run."""
    return walked(
        clone,
        environment,
        *(".venv/bin/pyflyte", "run", "workflows/grpo.py", "grpo", "--config", json.dumps(SMALL)),
    )


def walked(clone: Path, environment: dict[str, str], *command: object) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


def model_of(output: str) -> str:
    """Returns the folder that a run names at its end."""
    (line,) = re.findall(r"(?m)^model: +(.+)$", output)
    return str(line)


def test_a_run_by_pyflyte_ends_with_a_model_and_its_lineage(
    clone: Path, environment: dict[str, str], finished: str
) -> None:
    model = Path(model_of(finished))
    assert (model / "model.safetensors").is_file()
    tree = walked(clone, environment, ".venv/bin/nemo-rl", "lineage", model)
    stages = ("prepare_data", "prepare_model", "train_sft", "grpo_iteration", "export")
    assert [stage for stage in stages if stage not in tree] == []


def test_a_scheduled_launch_plan_runs_and_finds_nothing_new(
    clone: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(json.dumps(SMALL))
    # The store of the first walk has the same artifacts, which its run has made.
    environment = {**environment, "NEMO_RL_HOME": str(tmp_path / "store")}
    with Backend(tmp_path / "flyte") as backend:
        config = ["--config", backend.config]
        project = ["--project", "flytesnacks", "--domain", "development"]
        where = ["--version", "v1", "--copy", "all", "--destination-dir", "."]
        register = [".venv/bin/pyflyte", *config, "register", *project, *where]
        walked(clone, environment, *register, "workflows/grpo.py")
        schedule = [".venv/bin/nemo-rl", "schedule"]
        shown = walked(
            clone,
            environment,
            *[*schedule, recipe, "0 2 * * *", "--activate"],
            *["--flyte-config", backend.config, *project],
        )
        assert "schedule: mine, workflows.grpo.grpo of version v1" in shown
        listed = walked(
            clone, environment, *schedule, "list", "--flyte-config", backend.config, *project
        )
        assert listed.startswith("mine ") and "next 20" in listed

        first = scheduled_run(backend, "first")
        assert {"train_sft", "grpo_iteration"} <= stages_run(first)
        output = first.outputs.literals["model"].scalar.binary.value
        model = msgpack.loads(output)["directory"]["path"]
        tree = walked(clone, environment, ".venv/bin/nemo-rl", "lineage", model)
        assert "grpo_iteration" in tree and "first" in tree
        second = stages_run(scheduled_run(backend, "second"))
        assert "announce" in second
        assert not {"prepare_data", "train_sft", "grpo_iteration", "export"} & second


@pytest.fixture
def page_address(clone: Path, environment: dict[str, str], finished: str) -> Iterator[str]:
    """The address that `nemo-rl ui` prints."""
    process = subprocess.Popen(
        [clone / ".venv/bin/nemo-rl", "ui", "--port", "0"],
        cwd=clone,
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/", line)
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def test_the_page_leads_from_the_run_to_the_rows_of_its_model(
    context: BrowserContext, page_address: str, finished: str
) -> None:
    exported = Path(model_of(finished)).parent.name
    page = context.new_page()
    page.goto(page_address)
    page.get_by_role("link", name=re.compile(r"^20\d{6}T")).first.click()
    page.get_by_role("link", name="Graph").click()
    page.wait_for_selector("[data-drawn]")
    page.get_by_role("link", name="Nodes").click()
    page.get_by_role("rowheader", name="export").get_by_role("link").first.click()
    page.locator(f'a[href="/artifacts/{exported}"]').first.click()
    page.get_by_role("link", name="Ancestry").click()
    page.wait_for_selector("[data-drawn]")
    for stage in ("prepare_data", "prepare_model", "train_sft", "grpo_iteration"):
        expect(page.locator(f'tr[id^="{stage}-"]').first).to_be_visible()
    page.locator('tr[id^="prepare_data-"]').first.get_by_role("link").first.click()
    expect(page.locator("body")).to_contain_text("rows.parquet")
