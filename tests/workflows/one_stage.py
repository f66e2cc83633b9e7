"""Runs one stage in a separate process, as a container of a cluster does.

`python one_stage.py MODULE STAGE < INPUTS` prints its outputs as JSON. Inputs and outputs are
`{name: value}`, with artifacts as mappings of their fields and directories as paths.
"""

import importlib
import json
import sys
from typing import Any, get_args

from flytekit.types.directory import FlyteDirectory


def main(module: str, stage: str) -> None:
    """Runs a stage on the inputs from stdin, and prints its artifacts in the last line."""
    task = getattr(importlib.import_module(module), stage)
    kinds = task.python_interface.inputs
    inputs = {name: _value(kinds[name], value) for name, value in json.load(sys.stdin).items()}
    made = task(**inputs)
    outputs = made._asdict() if hasattr(made, "_asdict") else {stage: made}
    sys.stdout.write("\n" + json.dumps({name: _fields(each) for name, each in outputs.items()}))


def _value(kind: Any, value: Any) -> Any:
    if isinstance(value, list):
        return [_value(kind, each) for each in value]
    if not isinstance(value, dict):
        return value
    model = kind
    while inner := get_args(model):  # of an annotated, optional or listed artifact
        model = inner[0]
    if "directory" not in value:
        return model.model_validate(value)
    return model(**{**value, "directory": FlyteDirectory(value["directory"])})


def _fields(artifact: Any) -> dict[str, Any]:
    fields = {name: getattr(artifact, name) for name in type(artifact).model_fields}
    return {**fields, "directory": str(artifact.folder)}


if __name__ == "__main__":
    main(*sys.argv[1:])
