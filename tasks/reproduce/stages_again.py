"""Runs stages again, one after the other, in the store of `NEMO_RL_HOME`: a program.

`nemo-rl reproduce` starts it with the source to run, which may be that of another commit. So it
reads its request from a file, and imports nothing of the project but the stages themselves.
"""

import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints


def main() -> None:
    """Runs the request in the file on the command line; adds the folders to it."""
    sys.path.append(str(Path.cwd()))  # for the user's rewards, after the source of the run
    path = Path(sys.argv[1])
    request = json.loads(path.read_text())
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
    path.write_text(json.dumps({**request, "folders": folders}))


def _run(call: dict[str, Any], made: dict[str, Any], modules: dict[str, str]) -> Any:
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
        elif modules[parent] != call["module"]:  # otherwise it is another output of the same task
            sys.exit(f"{call['stage']}: its task {task.name} has no input {role!r}")
    for artifact in _artifacts(task(**arguments)):
        if artifact.stage == call["stage"]:
            return artifact
    sys.exit(f"the task {task.name} returned no artifact of {call['stage']!r}")


def _task(module: Any, function: str) -> Any:
    """Returns the task of that name, or the only one: a stage may have several outputs."""
    from flytekit.core.base_task import PythonTask

    task = getattr(module, function, None)
    if isinstance(task, PythonTask):
        return task
    tasks = [
        each
        for each in vars(module).values()
        if isinstance(each, PythonTask) and each.name.startswith(f"{module.__name__}.")
    ]
    if len(tasks) != 1:
        sys.exit(f"{module.__name__} has no task {function!r}")
    return tasks[0]


def _artifacts(returned: Any) -> Iterator[Any]:
    if hasattr(returned, "content_hash"):
        yield returned
    elif isinstance(returned, tuple | list):
        for each in returned:
            yield from _artifacts(each)


if __name__ == "__main__":
    main()
