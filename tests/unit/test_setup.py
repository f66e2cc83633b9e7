"""`deployment/setup.sh`: requirements and Python version of a `.venv`, without installing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands import REPOSITORY

PYTHON = """#!/bin/bash
case "$*" in
  *version_info*) exit $(( {fits} )) ;;
  --version) echo "Python {version}" ;;
  *) exit 1 ;;
esac
"""
SMI = "#!/bin/bash\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose PATH has no Python that can create an environment."""
    shutil.copytree(REPOSITORY / "deployment", tmp_path / "deployment")
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("bash", "basename", "cat", "cut", "dirname", "flock", "grep", "head", "mkdir"):
        program = shutil.which(name)
        assert program is not None
        (tmp_path / "bin" / name).symlink_to(program)
    for name in ("rm", "sha256sum", "touch"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    return tmp_path


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def set_up(checkout: Path, *arguments: str, trace: bool = False) -> str:
    command = ["bash", *(["-x"] if trace else []), "deployment/setup.sh", *arguments]
    environment = {**os.environ, "PATH": str(checkout / "bin")}
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    return done.stdout + done.stderr


def kind_of(checkout: Path, *arguments: str) -> str:
    trace = set_up(checkout, *arguments, trace=True)
    (line,) = [line for line in trace.splitlines() if line.startswith("+ extra=")]
    return line.removeprefix("+ extra=")


def test_an_environment_keeps_its_kind(checkout: Path) -> None:
    """`make grpo` after `make setup EXTRA=gpu` must not install the CPU packages."""
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / ".kind").write_text("gpu\n")
    assert kind_of(checkout) == "gpu"
    assert kind_of(checkout, "cpu") == "cpu"


def test_a_new_environment_is_for_gpus_where_the_driver_lists_one(checkout: Path) -> None:
    assert kind_of(checkout) == "cpu"
    program(checkout / "bin" / "nvidia-smi", "#!/bin/bash\necho 'No devices were found'\nexit 6\n")
    assert kind_of(checkout) == "cpu"
    program(checkout / "bin" / "nvidia-smi", SMI)
    assert kind_of(checkout) == "gpu"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "version"), [("python3.12", "3.12.3"), ("python3", "3.11.2")])
def test_both_python_versions_are_accepted(checkout: Path, name: str, version: str) -> None:
    program(checkout / "bin" / name, PYTHON.format(version=version, fits=0))
    assert f"set-up: a new .venv with Python {version}" in set_up(checkout)
    assert f"{name}-venv" in set_up(checkout)


def test_other_python_versions_are_refused(checkout: Path) -> None:
    program(checkout / "bin" / "python3", PYTHON.format(version="3.10.12", fits=1))
    refused = set_up(checkout)
    assert "neither Python 3.11 nor 3.12 was found" in refused
    assert "got: Python 3.10.12" in refused
