"""Small disks, and child processes that are killed at a chosen moment."""

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

from nemo_rl_core.store.store import Store

# Every change of a name in a file system raises an audit event first: dying at the n-th event, for
# every n, covers each state that a kill can leave.
_KILLED_AT = """
import os, signal, sys
_left = int(sys.argv[1])
def _hook(event, arguments):
    global _left
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
    if event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate") or writes:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.path[:0] = sys.argv[2:3]
from pathlib import Path
from nemo_rl_core.store import files
from nemo_rl_core.checkpoints.manager import CheckpointManager, save_atomic
from nemo_rl_core.store.store import Store
root = Path(sys.argv[3])
sys.addaudithook(_hook)
"""

REPOSITORY = Path(__file__).resolve().parents[2]


@functools.lru_cache(maxsize=1)
def _serve_forks(imports: str) -> None:
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  (one with other imports)
    forkserver.set_forkserver_preload([imports])
    forkserver.ensure_running()


@pytest.fixture(autouse=True)
def forked_ranks(request: pytest.FixtureRequest) -> None:
    """Forks the ranks of slow tests from a process that has imported what most of them need.

    `run_ranks` uses the server that runs; its own only imports torch. `RANK_IMPORTS` of a test's
    module names another module to import.
    """
    if request.node.get_closest_marker("slow") and hasattr(request.module, "run_ranks"):
        _serve_forks(getattr(request.module, "RANK_IMPORTS", "tests.rank_imports"))


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python on a script; processes that still run at the end of the test are killed."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script, *(str(argument) for argument in arguments)]
        child = subprocess.Popen(
            command, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


@pytest.fixture
def run_killed_at(spawn: Callable[..., subprocess.Popen[str]]) -> Callable[[str, int, Path], bool]:
    """Runs a script and kills it at its n-th change of the file system; False if it ended first."""

    def run(script: str, moment: int, root: Path) -> bool:
        child = spawn(_KILLED_AT + script, moment, REPOSITORY, root)
        _, problem = child.communicate(timeout=500)
        assert child.returncode in (0, -9), problem
        return child.returncode == -9

    return run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB. Mounting needs root; the test is skipped without it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a tmpfs here: {error}")
    yield folder
    Store(folder).release()
    subprocess.run(["umount", str(folder)], check=True)
