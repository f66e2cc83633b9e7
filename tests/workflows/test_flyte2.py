"""The workflows under flyte-migrate, which runs tasks of flytekit on Flyte 2, and what it refuses.

`make test-flyte2` installs it in a scratch folder and runs this file; without it all tests but the
last are skipped. What must change for Flyte 2 stands in docs/clusters.md, held to what is seen
here.
"""

import functools
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROBE = Path(__file__).with_name("flyte2_probe.py")
PAGE = " ".join((REPOSITORY / "docs/clusters.md").read_text().split())
WORKFLOWS = sorted(
    path.stem
    for path in (REPOSITORY / "workflows").glob("*.py")
    if path.stem not in {"__init__", "common"}
)
IMPORTED = {"arrivals", "collect_garbage", "convert"}
"""Workflows that flyte-migrate imports as they are: those without a stage on Ray."""

needs_flyte2 = pytest.mark.skipif(
    importlib.util.find_spec("flyte_migrate") is None,
    reason="flyte-migrate is not installed: `make test-flyte2` has it",
)


@functools.cache
def probed(workflow: str, *mended: str) -> dict[str, Any]:
    command = [sys.executable, str(PROBE), f"workflows.{workflow}", *mended]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@needs_flyte2
@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_a_workflow_is_imported_or_refused_for_its_stages_on_ray(workflow: str) -> None:
    error = probed(workflow)["error"]
    if workflow in IMPORTED:
        assert error == ""
    else:
        assert re.match(r"NotImplementedError: .* config type 'RayStage' is not supported", error)


@needs_flyte2
def test_behind_that_a_stage_has_no_shapes() -> None:
    error = probed("grpo", "ray")["error"]
    assert error.startswith("AttributeError: ")
    assert error.endswith("has no attribute 'on_shape'")


@needs_flyte2
def test_with_both_mended_every_workflow_and_launch_plan_is_imported() -> None:
    found = probed("launch_plans", "ray", "shapes")  # which imports all others
    assert found == {
        "error": "",
        "ignored": ["`deck_fields` of @task", "`on_failure` of @workflow"],
    }


def test_the_page_says_what_is_seen() -> None:
    packages = (REPOSITORY / "deployment/requirements/flyte2.txt").read_text()
    versions = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", packages, re.MULTILINE))
    assert f"`flyte-migrate` {versions['flyte-migrate']} and `flyte` {versions['flyte']}" in PAGE
    *others, last = (f"`workflows/{name}.py`" for name in sorted(IMPORTED))
    assert f"only {', '.join(others)} and {last} are imported as they are" in PAGE
    assert "`deck_fields` of tasks and `on_failure` of workflows are left out" in PAGE
    assert "`RayStage` is no configuration of a plugin that is known" in PAGE
    assert "a stage has no `on_shape`" in PAGE
