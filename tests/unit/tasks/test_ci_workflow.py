"""`deployment/ci/github.yaml`: its commands exist, and production waits for staging."""

from pathlib import Path
from typing import Any

import yaml

from tests.documents import REPOSITORY, shell_problems

WORKFLOW: dict[str, Any] = yaml.safe_load(
    (Path(REPOSITORY) / "deployment" / "ci" / "github.yaml").read_text()
)


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
