"""Compatibility of workflows with flyte-migrate, which runs tasks of flytekit on Flyte 2.

`make test-flyte2` installs it in a scratch folder and runs this file; without it all tests but the
last are skipped. docs/cluster-setup.md lists what must change for Flyte 2, as the tests here check.
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
PAGE = " ".join((REPOSITORY / "docs/cluster-setup.md").read_text().split())
WORKFLOWS = sorted(
    path.stem
    for path in (REPOSITORY / "workflows").glob("*.py")
    if path.stem not in {"__init__", "cli", "common"}
)
IMPORTED = {"collect_garbage", "convert"}
"""Workflows that flyte-migrate imports as they are: those without a stage on Ray."""

needs_flyte2 = pytest.mark.skipif(
    importlib.util.find_spec("flyte_migrate") is None,
    reason="flyte-migrate is not installed: `make test-flyte2` has it",
)


@functools.cache
def probed(workflow: str, *patched: str) -> dict[str, Any]:
    command = [sys.executable, str(PROBE), f"workflows.{workflow}", *patched]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


@needs_flyte2
@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_a_workflow_is_imported_or_refused_for_its_stages_on_ray(workflow: str) -> None:
    error = probed(workflow)["error"]
    if workflow in IMPORTED:
        assert error == ""
    else:
        assert re.match(r"NotImplementedError: .* config type 'RayStage' is not supported", error)


@needs_flyte2
def test_without_that_error_stages_lack_shapes() -> None:
    error = probed("grpo", "ray")["error"]
    assert error.startswith("AttributeError: ")
    assert error.endswith("has no attribute 'on_shape'")


@needs_flyte2
def test_with_both_patches_every_workflow_and_launch_plan_is_imported() -> None:
    result = probed("launch_plans", "ray", "shapes")  # which imports all others
    assert result == {
        "error": "",
        "ignored": ["`deck_fields` of @task", "`on_failure` of @workflow"],
    }


def test_the_page_describes_these_results() -> None:
    packages = (REPOSITORY / "deployment/requirements/flyte2.txt").read_text()
    versions = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", packages, re.MULTILINE))
    assert f"`flyte-migrate` {versions['flyte-migrate']} and `flyte` {versions['flyte']}" in PAGE
    *others, last = (f"`workflows/{name}.py`" for name in sorted(IMPORTED))
    assert f"only {', '.join(others)} and {last} are imported as they are" in PAGE
    assert "`deck_fields` of tasks and `on_failure` of workflows are left out" in PAGE
    assert "`RayStage` is no configuration of a plugin that is known" in PAGE
    assert "a stage has no `on_shape`" in PAGE
