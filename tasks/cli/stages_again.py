"""Runs stages again, one after the other, in the store of `NEMO_RL_HOME`: a program.

`nemo-rl reproduce` starts it with the source that is to run, which may be that of another commit.
So it reads its request from a file, and imports nothing of the project but the stages themselves.
"""

import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints


def main() -> None:
    """Runs the request of the file that is named on the command line; adds the folders to it."""
    sys.path.append(str(Path.cwd()))  # for rewards of the user, behind the source of the run
    asked = Path(sys.argv[1])
    request = json.loads(asked.read_text())
    made: dict[str, Any] = {}
    modules = {call["name"]: call["module"] for call in request["calls"]}
    for call in request["calls"]:
        start = time.monotonic()
        made[call["name"]] = artifact = _run(call, made, modules)
        sys.stdout.write(
            f"{call['stage']}: content {artifact.content_hash[:16]}, "
            f"{time.monotonic() - start:.1f} s\n"
        )
        sys.stdout.flush()
    folders = {name: str(artifact.directory.path) for name, artifact in made.items()}
    asked.write_text(json.dumps({**request, "folders": folders}))


def _run(call: dict[str, Any], made: dict[str, Any], modules: dict[str, str]) -> Any:
    """The artifact of that stage among those that its task returns."""
    task = _task(importlib.import_module(call["module"]), call["function"])
    inputs = get_type_hints(task.task_function)
    arguments: dict[str, Any] = {}
    if "config" in inputs:
        arguments["config"] = inputs["config"].model_validate(call["config"])
    if "iteration" in inputs:
        arguments["iteration"] = int(call["part"])
    for role, parent in call["parents"].items():
        if role in inputs:
            arguments[role] = made[parent]
        elif modules[parent] != call["module"]:  # else another output of the same task
            sys.exit(f"{call['stage']}: its task {task.name} has no input {role!r}")
    for artifact in _artifacts(task(**arguments)):
        if artifact.stage == call["stage"]:
            return artifact
    sys.exit(f"the task {task.name} returned no artifact of {call['stage']!r}")


def _task(module: Any, function: str) -> Any:
    """The task of that name, or the only one of the module: a stage may make several artifacts."""
    from flytekit.core.base_task import PythonTask

    found = getattr(module, function, None)
    if isinstance(found, PythonTask):
        return found
    own = [
        each
        for each in vars(module).values()
        if isinstance(each, PythonTask) and each.name.startswith(f"{module.__name__}.")
    ]
    if len(own) != 1:
        sys.exit(f"{module.__name__} has no task {function!r}")
    return own[0]


def _artifacts(returned: Any) -> Iterator[Any]:
    if hasattr(returned, "content_hash"):
        yield returned
    elif isinstance(returned, tuple | list):
        for each in returned:
            yield from _artifacts(each)


if __name__ == "__main__":
    main()
