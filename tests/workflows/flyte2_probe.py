"""Imports one workflow as `pyflyte-migrate` does, and prints what came of it as JSON.

A program of its own, since flyte-migrate replaces flytekit's decorators in the whole process.

    python flyte2_probe.py workflows.grpo [ray] [shapes]
"""

import importlib
import json
import logging
import re
import sys

_IGNORED = re.compile(r"@(\w+) args not supported by flyte-migrate and ignored: \[(.*)\]")


class _Ignored(logging.Handler):
    """Collects what flyte-migrate leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if match := _IGNORED.search(record.getMessage()):
            names = re.findall(r"'(\w+)'", match[2])
            self.found |= {f"`{name}` of @{match[1]}" for name in names}


def probe(module: str, mended: set[str]) -> dict[str, object]:
    """What came of an import: its error in one line, and what was left out.

    Args:
        module: Such as `workflows.grpo`.
        mended: What is taken as done, to see what stands behind it: `ray`, stages with Ray are
            plain tasks; `shapes`, stages have the methods of `RayStageTask`.
    """
    import flyte_migrate  # type: ignore[import-not-found]
    from flyte._logging import logger  # type: ignore[import-not-found]
    from flyte._task import AsyncFunctionTaskTemplate  # type: ignore[import-not-found]

    ignored = _Ignored()
    logger.addHandler(ignored)
    if "ray" in mended:
        flyte_migrate._task._transform_plugin_config_v1_to_v2 = lambda _: None
    if "shapes" in mended:
        AsyncFunctionTaskTemplate.on_shape = AsyncFunctionTaskTemplate.on = lambda self, *_: self
    error = ""
    try:
        importlib.import_module(module)
    except Exception as found:  # noqa: BLE001  (any error of an import is what is looked for)
        error = f"{type(found).__name__}: {str(found).splitlines()[0]}"
    return {"error": error, "ignored": sorted(ignored.found)}


if __name__ == "__main__":
    name, *done = sys.argv[1:]
    sys.stdout.write(json.dumps(probe(name, set(done))) + "\n")
