"""All processes of a run listen on loopback only, with a new token for each run."""

import json
import os
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.commands import REPOSITORY

PROGRAM = """
import json, sys
import nemo_rl_core
from nemo_rl_core.config.model import ModelFromConfig

if __name__ == "__main__":
    rows = [{"prompt": f"{n}+{n % 7}=", "answer": str(n + n % 7)} for n in range(10, 34)]
    model = ModelFromConfig(hidden_size=64, intermediate_size=64, num_layers=1, num_heads=2)
    nemo_rl_core.train(model, rows, reward_fn=lambda _, text: len(text), **json.loads(sys.argv[1]))
"""
# Two ranks that train, an engine of two ranks: process groups, the weight link, vLLM's groups.
SETTINGS: dict[str, Any] = {
    "cluster": {"num_workers": 2, "num_threads": 1},
    "generation": {"tensor_parallel_size": 2, "max_new_tokens": 4, "max_num_seqs": 16},
    "max_prompt_tokens": 16,
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 4,
    "num_steps_per_iteration": 2,
}
PROCESSES = {"gcs_server", "raylet", "ray::DTensorBackend", "ray::VllmBackend", "python"}
TOKEN = "RAY_AUTH_TOKEN"


def listeners() -> set[str]:
    """Returns the inodes of all sockets of this machine that listen; reads two files."""
    rows = [
        line.split()
        for file in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]
    ]
    return {row[9] for row in rows if row[3] == "0A"}


class Listeners:
    """Collects the addresses that a program and its children listen on while it runs.

    Attributes:
        addresses: Names of processes and IP addresses.
        tokens: Ray's token of every process.
        modes: Permissions of Ray's folder of this user.
    """

    def __init__(self) -> None:
        self.addresses: set[tuple[str, str]] = set()
        self.tokens: set[str] = set()
        self.modes: set[int] = set()

    def watch(self, program: psutil.Popen, ray_folder: Path) -> None:
        """Looks at all processes at each new listener, and every other second."""
        known: set[str] = set()
        looked = 0.0
        while program.poll() is None:
            current = listeners()
            if current - known or time.monotonic() > looked + 2:
                self.look(program, ray_folder)
                known, looked = known | current, time.monotonic()
            time.sleep(0.2)

    def look(self, program: psutil.Process, ray_folder: Path) -> None:
        if ray_folder.exists():
            self.modes.add(stat.S_IMODE(ray_folder.stat().st_mode))
        for process in [program, *program.children(recursive=True)]:
            try:
                name = process.name().partition(".")[0]
                name = "python" if name.startswith("python") else name
                for each in process.net_connections("tcp"):
                    if each.status == psutil.CONN_LISTEN:
                        self.addresses.add((name, each.laddr.ip.removeprefix("::ffff:")))
                self.tokens |= {process.environ()[TOKEN]} if name == "raylet" else set()
            except (psutil.Error, KeyError):
                continue


@pytest.mark.slow
def test_a_run_listens_on_loopback_only_with_a_new_token(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PROGRAM)
    home, seen = tmp_path / "home", Listeners()
    home.mkdir()
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        changed = {
            "PYTHONPATH": str(REPOSITORY),
            "NEMO_RL_HOME": str(tmp_path / "store"),
            "HOME": str(home),
            "RAY_TMPDIR": folder,
        }
        program = psutil.Popen(
            [sys.executable, "mine.py", json.dumps(SETTINGS)],
            cwd=tmp_path,
            env={**os.environ, **changed},
        )
        seen.watch(program, Path(folder) / f"ray-{os.getuid()}")
    assert program.returncode == 0
    assert {name for name, _ in seen.addresses} >= PROCESSES
    assert {address for _, address in seen.addresses} == {"127.0.0.1"}, seen.addresses
    assert seen.modes == {0o700}
    (token,) = seen.tokens
    assert len(token) == 64
    assert not (home / ".ray").exists()
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
