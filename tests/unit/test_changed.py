"""`make test-changed` includes every test that a change reaches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.changed import ROOT, changed_files, reached_tests

LOADED = """
import importlib.util, json, sys
from pathlib import Path
path = Path(sys.argv[1])
spec = importlib.util.spec_from_file_location("a_test", path)
spec.loader.exec_module(importlib.util.module_from_spec(spec))
loaded = {
    name: module.__file__
    for name, module in sys.modules.items()
    if name.partition(".")[0] in ("nemo_rl_core", "tasks", "workflows")
}
print(json.dumps({name: file for name, file in loaded.items() if file}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "test",
    [
        "tests/unit/evals/test_statistics.py",
        "tests/unit/tasks/test_plan.py",
        "tests/unit/algorithms/dpo/test_dpo_loss.py",
    ],
)
def test_imported_files_reach_the_test(test: str) -> None:
    """Compares with the modules that Python loaded, including `__init__` of parent packages."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, test], cwd=ROOT, check=True, capture_output=True, text=True
    )
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert loaded
    for name, file in loaded.items():
        if Path(file).name != "__init__.py":
            assert test in reached_tests([str(Path(file).relative_to(ROOT))]), name


def test_a_leaf_reaches_its_tests_and_few_others() -> None:
    reached = reached_tests(["nemo_rl_core/evals/harness.py"])
    assert "tests/ray/test_harness.py" in reached
    assert "tests/unit/store/test_locks.py" not in reached


def test_a_registered_class_reaches_the_tests_of_its_registry() -> None:
    """Registries name classes by strings, which imports do not show."""
    assert "tests/unit/test_registry.py" in reached_tests(["nemo_rl_core/registry.py"])
    reached = reached_tests(["nemo_rl_core/backends/generation/hugging_face.py"])
    assert "tests/ray/test_generation_engines.py" in reached


def test_a_fixture_reaches_those_that_use_it() -> None:
    reached = reached_tests(["tests/commands.py"])
    assert "tests/workflows/test_grpo_pipeline.py" in reached
    assert "tests/unit/functional/test_kl.py" not in reached


def test_pages_reach_the_tests_that_read_them() -> None:
    assert "tests/unit/test_documentation.py" in reached_tests(["docs/glossary.md"])
    assert "tests/unit/store/test_locks.py" not in reached_tests(["docs/glossary.md"])


def test_requirements_reach_everything() -> None:
    every = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(reached_tests(["deployment/requirements/cpu.txt"])) == every


def test_an_untracked_file_has_changed() -> None:
    new = ROOT / "tests" / "unit" / "of_a_moment.txt"
    new.write_text("")
    try:
        assert "tests/unit/of_a_moment.txt" in changed_files("HEAD")
    finally:
        new.unlink()
