"""`.github/workflows/`: the commands exist, and production waits for staging."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.pods.images import IMAGES, LAPTOP, image_name
from tests.documents import REPOSITORY, shell_problems

FOLDER = Path(REPOSITORY) / ".github" / "workflows"
WORKFLOW: dict[str, Any] = yaml.safe_load((FOLDER / "cluster.yaml").read_text())


def steps(job: str) -> list[str]:
    return [step["run"] for step in WORKFLOW["jobs"][job]["steps"] if "run" in step]


def test_its_commands_exist() -> None:
    commands = [run for job in WORKFLOW["jobs"] for run in steps(job)]
    ours = [run for run in commands if run.startswith((".venv/", "make ", "deployment/"))]
    assert len(ours) >= 10
    assert {run: list(shell_problems(run)) for run in ours if list(shell_problems(run))} == {}


def test_an_option_that_does_not_exist_is_found() -> None:
    commands = [run for job in ("images", "staging", "production") for run in steps(job)]
    ours = [run for run in commands if run.startswith((".venv/", "deployment/"))]
    assert len(ours) == 5
    for run in ours:
        program = run.split(maxsplit=1)[0]
        for wrong in (run.replace(program, f"{program} --nonsense", 1), f"{run} --nonsense"):
            assert [each for each in shell_problems(wrong) if "no option --nonsense" in each], wrong


def test_every_image_that_may_be_registered_is_built_first() -> None:
    job = WORKFLOW["jobs"]["images"]
    built = {f"nemo-rl-{each}" for each in job["strategy"]["matrix"]["image"]}
    assert built == {image.name for image in IMAGES}
    assert "images" in WORKFLOW["jobs"]["staging"]["needs"]
    assert steps("images")[-1] == 'deployment/images/build.sh --missing "$IMAGE"'
    assert "NEMO_RL_REGISTRY" in WORKFLOW["env"], "pushed to, and registered with, one address"


@pytest.mark.slow
def test_existing_images_are_not_built(tmp_path: Path) -> None:
    """A builder that has the first image logs its further requests."""
    builder, notes = tmp_path / "builder", tmp_path / "notes"
    builder.write_text(
        "#!/bin/sh\n"
        'case "$*" in "manifest inspect "*-light:*) exit 0;; "manifest "* | "image "*) exit 1;;\n'
        "--version) exit 0;; esac\n"
        f'echo "$*" >> {notes}\n'
    )
    builder.chmod(0o755)
    environment = {**os.environ, "NEMO_RL_BUILDER": str(builder), "NEMO_RL_REGISTRY": "r.example"}
    command = ["deployment/images/build.sh", "--missing", "light", "laptop"]
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, capture_output=True)
    build, push = notes.read_text().splitlines()
    assert build.startswith("build ") and "-laptop:" in build
    assert push == f"push {image_name(LAPTOP)}".replace("push ", "push r.example/")


@pytest.mark.parametrize(
    ("job", "variable"), [("staging", "GATE_RECIPE"), ("production", "NIGHTLY_RECIPE")]
)
def test_the_job_fails_without_the_users_recipes(job: str, variable: str) -> None:
    (step,) = [each for each in WORKFLOW["jobs"][job]["steps"] if "RECIPE" in each.get("env", {})]
    assert step["env"]["RECIPE"] == f"${{{{ vars.{variable} }}}}"
    assert "_arithmetic" not in step["run"]
    ran = subprocess.run(
        ["bash", "-c", step["run"]], env={"RECIPE": ""}, capture_output=True, text=True, check=False
    )
    assert ran.returncode != 0
    assert f"set the variable {variable}" in ran.stderr


def test_production_gets_what_staging_has_checked() -> None:
    jobs = WORKFLOW["jobs"]
    assert jobs["staging"]["needs"] == ["package", "images"]
    assert jobs["production"]["needs"] == "staging"
    staging = steps("staging")
    checked = next(run for run in staging if "check_regression" in run)
    assert "--wait" in checked, "a step that does not wait cannot fail"
    assert staging.index(checked) > staging.index(
        "deployment/register.sh --config flyte.yaml --project nemo-rl --domain staging"
    )
    assert not any("--activate" in run for run in staging)
    *_, register, schedule = steps("production")
    assert register.endswith("--domain production --activate nightly_collection")
    assert "--activate" in schedule


def test_the_lock_for_gpus_is_installed_and_imported_every_week() -> None:
    workflow = yaml.safe_load((FOLDER / "lock.yaml").read_text())
    triggers = workflow[True]  # YAML reads the key `on` so
    (schedule,) = triggers["schedule"]
    minute, hour, day, month, weekday = schedule["cron"].split()
    assert (day, month) == ("*", "*")
    assert weekday.isdigit()
    assert int(minute) < 60
    assert int(hour) < 24
    assert triggers["push"]["paths"] == ["deployment/requirements/**"]
    runs = [step["run"] for step in workflow["jobs"]["gpu"]["steps"] if "run" in step]
    assert runs[-1] == "make check-gpu"
    assert [problem for run in runs[1:] for problem in shell_problems(run)] == []


def test_a_change_is_checked_by_what_ci_runs() -> None:
    workflow = yaml.safe_load((FOLDER / "ci.yaml").read_text())
    runs = [step["run"] for step in workflow["jobs"]["all"]["steps"] if "run" in step]
    assert runs[-1] == "bash .ci/run"
    assert list(shell_problems(runs[-1])) == []
