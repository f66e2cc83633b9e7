"""The wheel, installed in an empty environment, runs a recipe in an empty folder.

It uses the packages of `deployment/requirements/cpu.txt` and the torch of `make setup`.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.commands import REPOSITORY

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(3600)]

PACKAGES = ("nemo_rl_core", "tasks", "workflows")
INSTALL = """
source deployment/torch_source.sh
torch_source "$1"
"$2" pip install --quiet --compile-bytecode --python "$3" "${TORCH_SOURCE[@]}" \
  --constraints deployment/requirements/cpu.txt \
  --overrides deployment/requirements/overrides_common.txt \
  --overrides deployment/requirements/overrides_cpu.txt "$4"
"""
SHORT = (
    "data.num_validation=50",
    "sft.num_steps=4",
    "sft.num_warmup_steps=0",
    "grpo.num_iterations=1",
    "grpo.num_steps_per_iteration=2",
    "grpo.num_prompts_per_step=8",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves files in its source
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, source / package, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", folder]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, source], check=True)
    (built,) = folder.glob("nemo_rl_flow-*.whl")
    return built


def test_the_wheel_has_types_recipes_and_pages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    recipes = {path.name for path in (REPOSITORY / "workflows" / "recipes").glob("*.yaml")}
    assert {f"workflows/recipes/{name}" for name in recipes} <= names
    for folder in ("templates", "static"):
        for path in (REPOSITORY / "nemo_rl_core" / "ui" / folder).rglob("*.*"):
            assert str(path.relative_to(REPOSITORY)) in names
    tops = {name.partition("/")[0] for name in names}
    assert tops == {*PACKAGES, "nemo_rl_flow-0.1.0.dist-info"}


def test_an_installed_wheel_runs_a_recipe_without_a_checkout(wheel: Path, tmp_path: Path) -> None:
    uv = Path(sys.executable).parent / "uv"
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    arguments = [sys.executable, uv, python, f"{wheel}[cpu]"]
    subprocess.run(["bash", "-euc", INSTALL, "bash", *arguments], cwd=REPOSITORY, check=True)
    folder = tmp_path / "empty"
    folder.mkdir()
    environment = {
        "HOME": str(tmp_path),
        "NEMO_RL_HOME": str(tmp_path / "store"),
        "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"],
        "PATH": f"{python.parent}:/usr/bin:/bin",
    }
    command = [python.parent / "nemo-rl", "run", "grpo", "grpo_ci", *SHORT]
    ran = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert list(folder.iterdir()) == []
    (exported,) = (tmp_path / "store" / "artifacts").glob("export-*")
    manifest = json.loads((exported / "manifest.json").read_text())
    assert manifest["git_commit"] is None
