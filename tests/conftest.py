"""Fixtures shared by several suites."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.commands import RECIPE, Run, run

REPOSITORY = Path(__file__).resolve().parents[1]
_TOGETHER = {
    "tests/ray/": "ray",
    "tests/faults/": "runs",
    "tests/ui/": "runs",
    "tests/workflows/": "runs",
}
"""Folders whose tests share one process: they use one Ray runtime and engine, or are full runs."""

# Two processes of `pytest -n 2` share the cores; a single one uses them all.
_SHARED = "PYTEST_XDIST_WORKER" in os.environ
os.environ.setdefault("OMP_NUM_THREADS", "1" if _SHARED else "2")
# Before `tasks` is imported, which points flytekit at the store: tests never touch the real store.
_STORE = tempfile.TemporaryDirectory(prefix="nemo-rl-test-store-")
os.environ["NEMO_RL_HOME"] = _STORE.name
os.environ["XDG_CONFIG_HOME"] = f"{_STORE.name}-config"  # for the key that signs runs


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts tests that start Ray first: they take longest, and one process runs them all.

    `experimental` tests are also `thorough`; `thorough` tests and those of `tests/ray/` are also
    `slow`.
    """
    for item in items:
        if item.nodeid.startswith("tests/ray/"):
            item.add_marker("slow")
        if item.get_closest_marker("experimental") is not None:
            item.add_marker("thorough")
        if item.get_closest_marker("thorough") is not None:
            item.add_marker("slow")
    items.sort(key=lambda item: _group(item.nodeid) not in _TOGETHER.values())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Chooses the tests that stay together when two processes share them (`pytest -n 2`).

    Each process of the slow tests has a Ray runtime with an engine: together they take 8 GiB. Only
    one process of the fast tests has them. Other tests stay together by file.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByRuntime(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return ByRuntime(config, log)


def _group(nodeid: str) -> str:
    file = nodeid.split("::", maxsplit=1)[0]
    return next((group for folder, group in _TOGETHER.items() if file.startswith(folder)), file)


@pytest.fixture
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty store for runs in this process."""
    from tasks.flyte import local

    with monkeypatch.context() as patch:
        patch.setenv("NEMO_RL_HOME", str(tmp_path / "store"))
        local.use_store()
        yield tmp_path / "store"
    local.use_store()


@dataclass(frozen=True)
class Finished:
    """Exit code and output of a command."""

    exit_code: int
    output: str

    @property
    def message(self) -> list[str]:
        """Returns the lines of the error without the frame around them."""
        lines = self.output.splitlines()
        framed = [line.strip(" │") for line in lines if line.startswith("│")]
        return framed or [line for line in lines if line.strip()]

    @property
    def text(self) -> str:
        """Returns the error as one line, without the line breaks of the frame."""
        return " ".join(self.message)


@pytest.fixture
def run_grpo(
    own_store: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[dict[str, Any] | str], Finished]:
    """Runs `pyflyte run workflows/grpo.py grpo --config ...` in this process with a new store."""
    from flytekit.clis.sdk_in_container.pyflyte import main

    monkeypatch.chdir(REPOSITORY)

    def run(recipe: dict[str, Any] | str) -> Finished:
        config = recipe if isinstance(recipe, str) else json.dumps(recipe)
        arguments = ["run", "workflows/grpo.py", "grpo", "--config", config]
        with pytest.raises(SystemExit) as ended:
            main.main(arguments, prog_name="pyflyte")
        shown = capfd.readouterr()
        return Finished(int(ended.value.code or 0), shown.out + shown.err)

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers folder: two-layer Qwen2 with random weights, and the arithmetic tokenizer."""
    from nemo_rl_core.config.model import ModelFromConfig
    from nemo_rl_core.converters.materialize import materialize

    folder = tmp_path_factory.mktemp("tiny") / "model"
    config = ModelFromConfig(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2)
    materialize(config, folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A complete run of the GRPO pipeline that started from an empty store."""
    finished = run(RECIPE, tmp_path_factory.mktemp("first") / "store")
    assert finished.exit_code == 0, finished.output[-3000:]
    return finished
