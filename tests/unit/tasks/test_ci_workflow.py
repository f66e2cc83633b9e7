"""`deployment/ci/`: the commands of its workflows exist, and production waits for staging."""

from pathlib import Path
from typing import Any

import yaml

from tests.documents import REPOSITORY, shell_problems

FOLDER = Path(REPOSITORY) / "deployment" / "ci"
WORKFLOW: dict[str, Any] = yaml.safe_load((FOLDER / "github.yaml").read_text())


def steps(job: str) -> list[str]:
    return [step["run"] for step in WORKFLOW["jobs"][job]["steps"] if "run" in step]


def test_its_commands_exist() -> None:
    commands = [run for job in WORKFLOW["jobs"] for run in steps(job)]
    ours = [run for run in commands if run.startswith((".venv/", "make ", "deployment/"))]
    assert len(ours) >= 8
    assert {run: list(shell_problems(run)) for run in ours if list(shell_problems(run))} == {}


def test_what_is_registered_to_production_was_checked_in_staging() -> None:
    jobs = WORKFLOW["jobs"]
    assert (jobs["staging"]["needs"], jobs["production"]["needs"]) == ("package", "staging")
    staging = steps("staging")
    checked = next(run for run in staging if "check_regression" in run)
    assert "--wait" in checked, "a step that does not wait cannot fail"
    assert staging.index(checked) > staging.index(
        "deployment/register.sh --config flyte.yaml --domain staging"
    )
    assert not any("--activate" in run for run in staging)
    assert "--activate" in steps("production")[-1]


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
