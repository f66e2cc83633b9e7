"""A failed run leaves its error, and a recipe to resume with."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from flytekit.core.workflow import PythonFunctionWorkflow
from flytekit.types.error.error import FlyteError

from tasks.plan_tasks.grpo import record_failure
from tasks.recipes.grpo import GRPORecipe


def test_the_record_names_the_command_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path))
    config = GRPORecipe.model_validate({"recipe": "grpo_arithmetic", "seed": 7})
    record_failure(config=config, err=FlyteError(message="out of paper", failed_node_id="n3"))
    (path,) = (tmp_path / "failures").glob("*-grpo.json")
    record = json.loads(path.read_text())
    assert (record["error"], record["failed_node"]) == ("out of paper", "n3")
    command, _, recipe = record["resume"].partition(" --config ")
    assert command == "pyflyte run workflows/grpo.py grpo"
    assert GRPORecipe.model_validate(json.loads(Path(recipe).read_text())) == config
    assert str(path) in capsys.readouterr().err


def test_a_store_that_cannot_be_written_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The handler returns, so Flyte shows the error of the run instead of the handler's."""
    store = tmp_path / "file"
    store.write_text("")
    monkeypatch.setenv("NEMO_RL_HOME", str(store))
    record_failure(config=GRPORecipe(), err=FlyteError(message="lost", failed_node_id="n1"))
    assert store.read_text() == ""
    assert list(tmp_path.iterdir()) == [store]
    assert "the record of the failure cannot be written" in caplog.text


def test_every_workflow_has_its_handler() -> None:
    import importlib
    import pkgutil

    import workflows

    handlers = {}
    for module in pkgutil.iter_modules(workflows.__path__, "workflows."):
        for value in vars(importlib.import_module(module.name)).values():
            if (
                isinstance(value, PythonFunctionWorkflow)
                and "config" in value.python_interface.inputs
            ):
                handlers[value.name.rpartition(".")[2]] = value
    assert len(handlers) >= 10
    for name, value in handlers.items():
        value.compile()
        handler = value.failure_node.flyte_entity
        assert handler.name.startswith("tasks.plan_tasks.")
        assert set(handler.python_interface.inputs) == {"config", "err"}
        module = value.name.split(".")[1]
        written = inspect.getsource(handler.task_function)
        assert f'leave_record("{module}", "{name}", config, err)' in written


_FAILS = """
import json, sys
from pathlib import Path
from tasks.recipes.sft import SFTRecipe
from workflows.sft import sft
train, validation = (Path(sys.argv[1]) / f"{name}.jsonl" for name in ("train", "validation"))
train.write_text('{"prompt": "1+1=", "answer": "2"}\\n{"prompt": "", "answer": "3"}\\n')
validation.write_text('{"prompt": "1+2=", "answer": "3"}\\n')
data = {
    "kind": "file", "train": str(train), "validation": str(validation), "max_prompt_tokens": 16
}
try:
    sft(config=SFTRecipe.model_validate({"data": data, "sft": {"global_batch_size": 1}}))
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.thorough
def test_a_run_that_fails_midway_leaves_a_record(
    python: Callable[..., str], tmp_path: Path
) -> None:
    assert "RunFailed" in python(_FAILS, tmp_path)
    (path,) = (tmp_path / "store" / "failures").glob("*-sft.json")
    assert "prompt is empty" in json.loads(path.read_text())["error"]
