"""Imports one workflow as `pyflyte-migrate` does, and prints the result as JSON.

It is a separate program since flyte-migrate replaces flytekit's decorators in the entire process.

    python flyte2_probe.py workflows.grpo [ray] [shapes]
"""

import importlib
import json
import logging
import re
import sys

_IGNORED = re.compile(r"@(\w+) args not supported by flyte-migrate and ignored: \[(.*)\]")


class _Ignored(logging.Handler):
    """Collects the arguments that flyte-migrate ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if match := _IGNORED.search(record.getMessage()):
            names = re.findall(r"'(\w+)'", match[2])
            self.arguments |= {f"`{name}` of @{match[1]}" for name in names}


def probe(module: str, patched: set[str]) -> dict[str, object]:
    """Imports a workflow and returns its error in one line and the ignored arguments.

    Args:
        module: Name of the module, such as `workflows.grpo`.
        patched: Problems to patch in order to reveal the next one: `ray` makes stages with Ray
            plain tasks; `shapes` gives stages the methods of `RayStageTask`.
    """
    import flyte_migrate  # type: ignore[import-not-found]
    from flyte._logging import logger  # type: ignore[import-not-found]
    from flyte._task import AsyncFunctionTaskTemplate  # type: ignore[import-not-found]

    ignored = _Ignored()
    logger.addHandler(ignored)
    if "ray" in patched:
        flyte_migrate._task._transform_plugin_config_v1_to_v2 = lambda _: None
    if "shapes" in patched:
        AsyncFunctionTaskTemplate.on_shape = AsyncFunctionTaskTemplate.on = lambda self, *_: self
    error = ""
    try:
        importlib.import_module(module)
    except Exception as raised:  # noqa: BLE001  (any error of an import is a result)
        error = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
    return {"error": error, "ignored": sorted(ignored.arguments)}


if __name__ == "__main__":
    name, *done = sys.argv[1:]
    sys.stdout.write(json.dumps(probe(name, set(done))) + "\n")
