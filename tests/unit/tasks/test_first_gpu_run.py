"""`deployment/first_gpu_run.sh` with a driver and an environment that only answer."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.commands import REPOSITORY

SCRIPT = REPOSITORY / "deployment" / "first_gpu_run.sh"
STEPS = [
    "gpu",
    "compiler",
    "install",
    "doctor",
    "imports",
    "attention",
    "backends",
    "transfers",
    "turns",
    "run",
]
SECRET = "hf_" + "a1B2" * 8
SMI = """#!/bin/bash
echo 'name, memory.total [MiB], memory.used [MiB], driver_version, compute_mode'
echo 'NVIDIA H100 80GB HBM3, 81559 MiB, 4 MiB, 580.65.06, Default'
"""
PYTHON = f"""#!/bin/bash
echo "$@" >> "$CALLS"
case "$*" in
  *test_1_attention*)
    echo 'tests/gpu/test_1_attention.py::test_speed[varlen] '
    echo '{{"median_ms": 61.5, "peak_gib": 3.1}}'
    echo "in $HOME/cache on $(hostname) by {SECRET} at 10.1.2.3:8000, $PWD/tests/gpu"
    echo '===== 14 passed in 30.00s =====' ;;
  *test_2_transfers*)
    echo "RuntimeError: no IPC in /home/x of GPU-12345678-1234-1234-1234-123456789abc, $MY_TOKEN"
    exit 1 ;;
  *) echo "answered" ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """Programs on a PATH, without a GPU's driver; and the environment that finds them."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "cat", "cut", "dirname", "git", "hostname", "mktemp", "rm", "tail"):
        program_path = shutil.which(name)
        assert program_path is not None, name
        (programs / name).symlink_to(program_path)
    (programs / "python3").symlink_to(sys.executable)
    return {
        "PATH": str(programs),
        "HOME": str(tmp_path / "home"),
        "CALLS": str(tmp_path / "calls"),
        "MY_TOKEN": "correct horse",
        "USER": "someone",
    }


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def run(
    machine: dict[str, str], *arguments: str, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(
        command, env=machine, cwd=folder, capture_output=True, text=True, check=False
    )


def test_a_machine_without_a_gpu_is_refused_at_once(
    machine: dict[str, str], tmp_path: Path
) -> None:
    done = run(machine, "--report", str(tmp_path / "report"))
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "first_gpu_run: there is no GPU: nvidia-smi was not found",
        "  fix: run it on a machine with an NVIDIA GPU and its driver (nvidia-smi lists it)",
    ]
    program(tmp_path / "bin" / "nvidia-smi", "#!/bin/bash\necho 'No devices were found'\nexit 6\n")
    done = run(machine, "--report", str(tmp_path / "report"))
    assert done.returncode == 3
    assert "first_gpu_run: No devices were found" in done.stderr
    assert not (tmp_path / "report").exists()
    assert not (REPOSITORY / ".venv-gpu").exists()


@pytest.mark.parametrize("arguments", [["--step", "gpu"], ["--steps", "gpus"], ["--report"]])
def test_an_unknown_option_is_refused(machine: dict[str, str], arguments: list[str]) -> None:
    done = run(machine, *arguments)
    assert done.returncode == 2
    assert "  fix: " in done.stderr


def test_steps_run_in_order_and_a_failure_does_not_end_them(
    machine: dict[str, str], tmp_path: Path
) -> None:
    program(tmp_path / "bin" / "nvidia-smi", SMI)
    environment = tmp_path / "environment"
    environment.mkdir()
    python = program(environment / "python", PYTHON)
    done = run(machine, "--python", str(python), "--report", str(tmp_path / "report"))
    assert done.returncode == 1, done.stderr
    text = (tmp_path / "report").read_text()
    rows = re.findall(r"^\| (\w+) \| (ok|exit code \d+) \| \d+ \|", text, re.MULTILINE)
    assert [name for name, _ in rows] == STEPS
    assert [name for name, result in rows if result != "ok"] == ["transfers"]
    calls = Path(machine["CALLS"]).read_text().splitlines()
    assert calls[0] == "nemo_rl_core/maintenance/doctor/compiler.py"
    entry = "-c from workflows.cli import main; main()"  # needs no program next to the Python
    assert calls[2] == f"{entry} doctor"
    assert calls[-2:] == [
        f"{entry} plan grpo_1.5b_1gpu grpo.num_iterations=1 grpo.num_steps_per_iteration=3",
        f"{entry} run grpo grpo_1.5b_1gpu grpo.num_iterations=1 grpo.num_steps_per_iteration=3",
    ]
    assert '{"median_ms": 61.5' in text
    assert "14 passed" in text
    assert "RuntimeError: no IPC in PATH of GPU-ID, SECRET" in text
    for private in (SECRET, "correct horse", "10.1.2.3", machine["HOME"], "12345678-1234"):
        assert private not in text, private


def test_nothing_is_installed_without_a_compiler(machine: dict[str, str], tmp_path: Path) -> None:
    program(tmp_path / "bin" / "nvidia-smi", SMI)  # and no gcc next to it
    done = run(machine, "--report", str(tmp_path / "report"))
    assert done.returncode == 1
    assert "there is no C compiler" in done.stdout
    assert "fix: `apt install gcc" in done.stdout
    assert not (REPOSITORY / ".venv-gpu").exists()
    matches = re.findall(
        r"^\| (\w+) \| (ok|exit code \d+)", (tmp_path / "report").read_text(), re.M
    )
    assert matches == [("gpu", "ok"), ("compiler", "exit code 1")]


def test_only_chosen_steps_run(machine: dict[str, str], tmp_path: Path) -> None:
    program(tmp_path / "bin" / "nvidia-smi", SMI)
    python = program(tmp_path / "python", PYTHON)
    options = ["--python", str(python), "--report", str(tmp_path / "report")]
    assert run(machine, *options, "--steps", "transfers").returncode == 1
    assert run(machine, *options, "--steps", "attention").returncode == 0
    transfers, packages, attention = Path(machine["CALLS"]).read_text().splitlines()
    assert "test_2_transfers" in transfers
    assert packages.endswith("-r deployment/requirements/flash_attention_4.txt")
    assert "test_1_attention" in attention


def test_python_and_report_are_found_from_any_folder(
    machine: dict[str, str], tmp_path: Path
) -> None:
    """`--python` names a program on the PATH, or one relative to the caller's folder."""
    program(tmp_path / "bin" / "nvidia-smi", SMI)
    program(tmp_path / "bin" / "given", PYTHON)
    (tmp_path / "environment").mkdir()
    program(tmp_path / "environment" / "python", PYTHON)
    for python in ("given", "environment/python"):
        options = ["--python", python, "--report", "report", "--steps", "doctor,backends"]
        done = run(machine, *options, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "report").read_text()
        (tmp_path / "report").unlink()
    refused = run(machine, "--python", "nowhere/python", folder=tmp_path)
    assert refused.returncode == 2
    assert "there is no Python nowhere/python" in refused.stderr


def test_commands_of_the_page_name_existing_steps(machine: dict[str, str], tmp_path: Path) -> None:
    program(tmp_path / "bin" / "nvidia-smi", SMI)
    python = program(tmp_path / "python", PYTHON)
    page = (REPOSITORY / "tests" / "gpu" / "README.md").read_text()
    commands = re.findall(r"^deployment/first_gpu_run.sh (--steps [\w,]+)", page, re.MULTILINE)
    assert commands
    for command in commands:
        options = ["--python", str(python), "--report", str(tmp_path / "report")]
        done = run(machine, *options, *command.split())
        assert done.returncode == 0, done.stderr


@pytest.fixture
def reporting() -> ModuleType:
    path = REPOSITORY / "deployment" / "first_gpu_report.py"
    spec = importlib.util.spec_from_file_location("first_gpu_report", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "clean"),
    [
        ("on gpu-box-7.example.com and gpu-box-7", "on HOST and HOST"),
        ("/home/ann/x/y.py:3: ann failed", "PATH:3: USER failed"),
        ("annotated by annex", "annotated by annex"),
        ("/srv/checkout/tests/gpu/a.py", "tests/gpu/a.py"),
        ("/tmp/pytest-of-ann/p.txt", "/tmp/…/p.txt"),
        (f"token {SECRET} and correct horse", "token SECRET and SECRET"),
        ("http://ann:pass@proxy:3128/x", "http://SECRET@proxy:3128/x"),
        ("10.0.0.1:29500 refused, torch 2.13.0", "ADDRESS:29500 refused, torch 2.13.0"),
        ("mail ann@example.com", "mail MAIL"),
        ("GPU-12345678-1234-1234-1234-123456789abc", "GPU-ID"),
        ("\x1b[31mred\x1b[0m 1.5 tokens/s", "red 1.5 tokens/s"),
    ],
)
def test_names_of_machines_and_people_are_replaced(
    reporting: ModuleType, line: str, clean: str
) -> None:
    environment = {"USER": "ann", "WANDB_API_KEY": "correct horse", "PATH": "/usr/bin"}
    cleaned_text = reporting.cleaned(
        line, environment, checkout=Path("/srv/checkout"), host="gpu-box-7.example.com"
    )
    assert cleaned_text == clean


def test_the_page_and_the_report_have_the_same_steps(reporting: ModuleType) -> None:
    page = (REPOSITORY / "tests" / "gpu" / "README.md").read_text()
    table = page.split("## The first hour")[1].split("##")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == STEPS
    assert list(reporting.EXPECTED) == STEPS
    assert f"all=({' '.join(STEPS)})" in SCRIPT.read_text()
    assert {path.name for path in (REPOSITORY / "tests/gpu").glob("test_*.py")} == set(
        re.findall(r"tests/gpu/(test_\w+\.py)", SCRIPT.read_text())
    )
    assert os.access(SCRIPT, os.X_OK)
