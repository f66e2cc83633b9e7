"""A pipeline of a few steps with the real command; tests share its runs."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands import NUM_STEPS, RECIPE, SAVE_EVERY, Run, end_group, run, start


@pytest.fixture(scope="session")
def recipe() -> dict[str, Any]:
    return RECIPE


@pytest.fixture(scope="session")
def run_recipe() -> Callable[..., Run]:
    return run


@pytest.fixture
def run_until() -> Callable[[dict[str, Any], Path, str], Run]:
    """Starts a run and kills it once a line begins with some words."""

    def run_and_kill(recipe: dict[str, Any], store: Path, words: str) -> Run:
        began = time.monotonic()
        process = start(recipe, store)
        assert process.stdout is not None
        seen = []
        try:
            for line in process.stdout:
                seen.append(line)
                if line.startswith(words):
                    break
        finally:
            end_group(process)
        return Run(store, -signal.SIGKILL, "".join(seen), time.monotonic() - began)

    return run_and_kill


@pytest.fixture(scope="session")
def kill_after_save() -> Callable[..., None]:
    """Starts a run and kills it as soon as an iteration has saved a step."""

    def run_and_kill(recipe: dict[str, Any], store: Path, *, step: int) -> None:
        process = start(recipe, store)
        try:
            _wait_for_save(process, store, step=step)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        finally:
            end_group(process)

    return run_and_kill


@pytest.fixture(scope="session")
def killed_run(
    tmp_path_factory: pytest.TempPathFactory, kill_after_save: Callable[..., None]
) -> Path:
    """Store of a run that was killed in its second iteration, between its last two saves."""
    store = tmp_path_factory.mktemp("killed") / "store"
    kill_after_save(RECIPE, store, step=NUM_STEPS + 2 * SAVE_EVERY)
    return store


def _wait_for_save(process: "subprocess.Popen[str]", store: Path, *, step: int) -> None:
    """Waits until the checkpoint of a step has its final name and is therefore complete."""
    deadline = time.monotonic() + 500
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        if any(store.glob(f"work/grpo_iteration-*/checkpoints/step-{step:08d}")):
            return
        time.sleep(0.005)
    raise TimeoutError(f"step {step} was not saved")


@pytest.fixture(scope="session")
def resumed_run(killed_run: Path) -> Run:
    """Rerun of the same command after the kill."""
    finished = run(RECIPE, killed_run)
    assert finished.exit_code == 0, finished.output[-3000:]
    return finished
