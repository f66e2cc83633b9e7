"""Fixtures for complete runs, and faults that come from outside."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.distributed import session as sessions
from nemo_rl_core.distributed.session import ClusterSession, connect
from nemo_rl_core.trainers.callbacks import Callback

_LOOK_SECONDS = 0.001
_LIST_SECONDS = 0.5
_GIVE_UP_SECONDS = 300.0


class Killer(Callback):
    """Kills a worker of this process or of its children in the middle of a method (SIGKILL).

    Ray shows in the title of a process which method it runs: `ray::VllmBackend.generate`.

    Args:
        methods: Methods to wait for, such as `VllmBackend.generate`.
        step: Step at whose beginning the watch starts.
        wait_seconds: Delay from seeing the worker in the method to the signal.
        when: Condition that starts the watch, checked after `start`.

    Attributes:
        killed: Titles of the killed processes.
    """

    def __init__(
        self,
        *methods: str,
        step: int = 2,
        wait_seconds: float = 0.0,
        when: Callable[[], bool] = lambda: True,
    ) -> None:
        self._titles = tuple(f"ray::{method}" for method in methods)
        self._step = step
        self._wait_seconds = wait_seconds
        self._when = when
        self._thread = threading.Thread(target=self._kill, daemon=True)
        self.killed: list[str] = []

    def on_step_begin(self, trainer: Any, step: int) -> None:
        if step == self._step and not self.killed:
            self.start()

    def start(self) -> None:
        self._thread.start()

    def join(self) -> list[str]:
        """Returns the titles of killed processes, once killed; empty if none ran a method."""
        self._thread.join(_GIVE_UP_SECONDS)
        return self.killed

    def _kill(self) -> None:
        deadline = time.monotonic() + _GIVE_UP_SECONDS
        while not self._when() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        # Listing the processes takes longer than some methods.
        pids: list[int] = []
        listed_until = 0.0
        while time.monotonic() < deadline:
            if time.monotonic() > listed_until:
                pids = [each.pid for each in psutil.Process().children(recursive=True)]
                listed_until = time.monotonic() + _LIST_SECONDS
            for pid in pids:
                if _title(pid).startswith(self._titles):
                    time.sleep(self._wait_seconds)
                    self.killed.append(_title(pid))
                    os.kill(pid, signal.SIGKILL)
                    return
            time.sleep(_LOOK_SECONDS)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        return ""  # it has ended


@pytest.fixture
def killer() -> Callable[..., Killer]:
    return Killer


@pytest.fixture(scope="session")
def session() -> Iterator[ClusterSession]:
    yield connect(ClusterConfig(num_threads=1))
    sessions.shutdown()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared tiny model with heads of 32: the smallest that vLLM on a CPU supports."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    config = ModelFromConfig(hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2)
    materialize(config, folder, seed=0)
    return folder
