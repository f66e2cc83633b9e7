"""The doctor on this machine, and with various problems."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from nemo_rl_core.maintenance.doctor import compiler, machine, software
from nemo_rl_core.maintenance.doctor.check import Check, Result
from nemo_rl_core.maintenance.doctor.diagnose import diagnose
from nemo_rl_core.store.store import Store
from tasks.cli.machine.doctor import doctor

REPOSITORY = Path(__file__).resolve().parents[3]


def _diagnose(
    tmp_path: Path,
    *,
    quick: bool = True,
    before: Callable[[], None] | None = None,
    **environment: str,
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Runs the command in a separate process; returns its exit code and checks by name."""
    command = [sys.executable, "-c", "from workflows.cli import main; main()", "doctor", "--json"]
    settings = {"NEMO_RL_HOME": str(tmp_path / "store"), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*command, *(["--quick"] if quick else [])],
        cwd=REPOSITORY,
        env={**os.environ, **settings, **environment},
        preexec_fn=before,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert sum(report["counts"].values()) == len(report["checks"])
    return done.returncode, {check["name"]: check for check in report["checks"]}


def _problems(checks: dict[str, dict[str, Any]]) -> set[str]:
    """Returns problems that other programs of this machine cannot cause."""
    result = {name for name, check in checks.items() if check["state"] != "ok"}
    return result - {"ports", "ray processes", "ray sessions", "memory", "disk"}


def test_a_healthy_machine(tmp_path: Path) -> None:
    code, checks = _diagnose(tmp_path)
    assert (code, _problems(checks)) == (0, set())
    assert "import torch" not in checks
    assert not (tmp_path / "store").exists(), "to look is not to make"


@pytest.mark.thorough
def test_a_healthy_machine_imports_its_libraries(tmp_path: Path) -> None:
    code, checks = _diagnose(tmp_path, quick=False)
    assert (code, _problems(checks)) == (0, set())
    assert {"import torch", "import vllm", "import ray", "sandbox"} <= set(checks)


def test_all_problems_at_once_are_reported_with_fixes(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    info = tmp_path / "site" / "pandera-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pandera\nVersion: 0.1\n")
    code, checks = _diagnose(
        tmp_path,
        before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        NEMO_RL_HOME=str(in_the_way / "store"),
        PATH="/nowhere",
        PYTHONPATH=f"{REPOSITORY}:{tmp_path / 'site'}",
        FLYTECTL_CONFIG=str(tmp_path / "none.yaml"),
        HF_TOKEN="hf_secret",
    )
    assert code == 1
    failed = {name for name, check in checks.items() if check["state"] == "fail"}
    assert failed == {"packages", "store", "open files", "flyte"}
    assert checks["git"]["state"] == "warn"
    assert "pandera 0.1, not >=0.35" in checks["packages"]["found"]
    assert "NEMO_RL_HOME" in checks["store"]["fix"]
    assert "256" in checks["open files"]["found"]
    assert checks["open files"]["fix"] == "`ulimit -n 65536`"
    assert all(checks[name]["fix"] for name in {*failed, "git"})
    assert "hf_secret" not in json.dumps(checks)
    assert checks["hub token"]["found"] == "HF_TOKEN is set"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening


def test_a_port_in_use_is_reported(tmp_path: Path, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    ports = {port: "`nemo-rl ui`"}
    result = machine.check_ports(Store(tmp_path), ports=ports)
    assert (result.state, result.found) == ("warn", f"{port} (`nemo-rl ui`) taken")
    listener.close()
    result = machine.check_ports(Store(tmp_path), ports=ports)
    assert (result.state, result.found) == ("ok", f"{port} are free")


def test_the_port_of_a_running_ui_is_not_a_warning(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = listener.getsockname()[1]
    monkeypatch.setattr(machine, "UI_PORT", port)
    page = tmp_path / "nemo-rl"  # a process with the command line of the UI
    page.write_text("import sys\nprint(flush=True)\nsys.stdin.read()\n")
    command = [sys.executable, str(page), "ui"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        result = machine.check_ports(Store(tmp_path), ports={port: "`nemo-rl ui`"})
    assert result.state == "ok"
    assert result.found == f"{port} (`nemo-rl ui`) taken by `nemo-rl ui` on this machine"


def test_a_library_that_fails_to_import_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('libcuda.so.1: cannot open')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = software.check_vllm_import(Store(tmp_path))
    assert (result.state, result.found) == (
        "fail", "`import vllm`: ImportError: libcuda.so.1: cannot open",
    )  # fmt: skip
    (tmp_path / "vllm.py").write_text("import time\ntime.sleep(60)\n")
    result = software.check_vllm_import(Store(tmp_path), max_seconds=0.5)
    assert (result.state, result.found) == ("fail", "`import vllm` takes more than 0.5 s")


def _wheel(folder: Path, number: int, version: str) -> None:
    info = folder / f"flash_attn_{number}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: flash-attn-{number}\nVersion: {version}\n"
    )


@pytest.mark.slow
def test_flash_attention_packages_with_and_without_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    result = software.check_flash_attention(Store(tmp_path))
    assert (result.state, result.found) == ("ok", "2 (torch)")
    interface = tmp_path / "flash_attn" / "cute" / "interface.py"
    interface.parent.mkdir(parents=True)
    interface.write_text("_flash_attn_bwd = None\n")
    _wheel(tmp_path, 4, "4.0.0b36")
    result = software.check_flash_attention(Store(tmp_path))
    assert (result.state, result.found) == ("ok", "2 (torch), 4 (flash-attn-4 4.0.0b36)")
    # The module in the package index has no operators.
    (tmp_path / "flash_attn_interface.py").touch()
    _wheel(tmp_path, 3, "0.0.0")
    result = software.check_flash_attention(Store(tmp_path))
    assert result.state == "warn"
    assert "flash-attn-3 0.0.0 is not used" in result.found
    assert "has no attribute 'bwd'" in result.found


def _program(folder: Path, text: str, *, name: str = "nvidia-smi") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_busy_gpus_and_a_failing_driver_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    rows = ["NVIDIA H200, 143771, 0, 570.1", "NVIDIA H200, 143771, 100000, 570.1"]
    _program(tmp_path, f"echo '{rows[0]}'")
    result = machine.check_gpus(Store(tmp_path))
    assert (result.state, result.found) == ("ok", "1 x NVIDIA H200, 143771 MiB each, driver 570.1")
    _program(tmp_path, f"echo '{rows[0]}'; echo '{rows[1]}'")
    result = machine.check_gpus(Store(tmp_path))
    assert result.state == "warn"
    assert "the memory of 1 is used" in result.found
    _program(tmp_path, "echo 'driver/library version mismatch'; exit 18")
    result = machine.check_gpus(Store(tmp_path))
    assert result.state == "fail"
    assert "version mismatch" in result.found


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
def test_gpus_need_a_compiler_and_python_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    result = software.check_compiler(Store(tmp_path))  # for real, with this machine's gcc
    assert (result.state, result.found) == (
        "ok",
        f"{shutil.which('gcc')}, with the Python headers",
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    result = software.check_compiler(Store(tmp_path))
    assert result.state == "ok"
    assert result.found.endswith("needed only on GPUs")
    _program(tmp_path, "echo 'GPU 0: NVIDIA H100'")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    result = software.check_compiler(Store(tmp_path))
    assert (result.state, result.fix) == ("fail", compiler.fix())
    assert "neither gcc nor clang is on the PATH" in result.found
    _program(
        tmp_path, "echo 'x.c:1:10: fatal error: stdio.h: No such file' >&2; exit 1", name="clang"
    )
    result = software.check_compiler(Store(tmp_path))
    assert f"{tmp_path}/clang cannot compile a Python extension: x.c:1:10: fatal" in result.found
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: "/nowhere")
    assert "/nowhere/Python.h is missing" in software.check_compiler(Store(tmp_path)).found


def test_reachable_and_unreachable_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> None:
    config = tmp_path / "config.yaml"
    monkeypatch.setenv("FLYTECTL_CONFIG", str(config))
    port = listener.getsockname()[1]
    config.write_text(f"admin:\n  endpoint: dns:///127.0.0.1:{port}\n")
    assert software.check_flyte(Store(tmp_path)).state == "ok"
    listener.close()
    result = software.check_flyte(Store(tmp_path))
    assert result.state == "warn"
    assert "does not answer" in result.found
    config.write_text("admin: {}\n")
    assert software.check_flyte(Store(tmp_path)).state == "fail"


def test_a_clock_earlier_than_file_times_is_reported(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert machine.check_clock(store).state == "ok"
    run = store.runs / "run"
    run.mkdir(parents=True)
    os.utime(run, (time.time() + 3600,) * 2)
    result = machine.check_clock(store)
    assert result.state == "warn"
    assert "s ahead" in result.found


def test_a_store_open_to_everyone_is_reported(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.root.mkdir(mode=0o755)
    result = machine.check_store(store)
    assert (result.state, result.fix) == ("warn", f"chmod o-rwx {store.root}")
    assert f"every user of this machine can open {store.root} (755)" in result.found
    store.root.chmod(0o770)
    assert machine.check_store(store).state == "ok"


def test_a_full_or_read_only_store_is_reported(small_disk: Path) -> None:
    store = Store(small_disk / "store")
    assert machine.check_disk(store).state == "warn"
    store.root.mkdir()
    result = machine.check_store(store)
    assert (result.state, "nearly full" in result.found) == ("fail", True)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    result = machine.check_store(store)
    assert (result.state, "read-only" in result.found) == ("fail", True)
    assert machine.check_store(Store(small_disk / "other")).state == "fail"


def test_old_files_of_ray_runtimes_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    folder = tmp_path / f"ray-{os.getuid()}" / "ray"
    session = folder / "session_2026-01-01_00-00-00_000000_1"
    session.mkdir(parents=True)
    (session / "log").write_bytes(b"x" * 2**20)
    result = machine.check_ray_sessions(Store(tmp_path))
    assert (result.state, result.found) == ("ok", f"1 old sessions, 1 MiB, in {folder}")
    result = machine.check_ray_sessions(Store(tmp_path), max_old_bytes=2**19)
    assert (result.state, result.found) == ("warn", f"1 old sessions, 1 MiB, in {folder}")
    assert result.fix == f"remove them while no Ray runs: rm -r {folder}/session_2*"
    # A running runtime is detected by its process, which names its session.
    raylet = _program(tmp_path, "read _", name="raylet")
    with subprocess.Popen([raylet, session], stdin=subprocess.PIPE) as running:
        result = machine.check_ray_sessions(Store(tmp_path), max_old_bytes=2**19)
        running.communicate()
    assert (result.state, result.found) == ("ok", "nothing")


def test_an_orphaned_ray_process_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raylet = shutil.copy(str(shutil.which("sleep")), tmp_path / "raylet")
    start = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=2).pid)"
    done = subprocess.run(
        [sys.executable, "-c", start, raylet, "60"], stdout=subprocess.PIPE, check=True
    )
    orphan = int(done.stdout)
    adopted_by = psutil.Process(orphan).parent()
    if adopted_by.pid != 1:  # like the tests' program that counts their CPU time
        monkeypatch.setattr(machine, "_REAPERS", (adopted_by.name(),))
    try:
        result = machine.check_ray_processes(Store(tmp_path))
    finally:
        os.kill(orphan, signal.SIGKILL)
    assert result.state == "warn"
    assert str(orphan) in result.found.partition("[")[2].rstrip("]").split(", ")


def test_a_failing_check_is_a_finding(tmp_path: Path) -> None:
    def broken(_: Store) -> Result:
        raise RuntimeError("no such thing")

    (first,) = diagnose(Store(tmp_path), checks=[Check("broken", broken)])
    assert (first.name, first.result.state) == ("broken", "warn")
    assert "no such thing" in first.result.found


def test_the_printed_output(own_store: Path) -> None:
    result = CliRunner().invoke(doctor, ["--quick"])
    assert result.exit_code == 0
    assert "ok    python         3.1" in result.output
    assert " 0 fail" in result.output.splitlines()[-1]
