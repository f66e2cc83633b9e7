"""Checks an installed lock: no file comes from two packages, and what the project imports imports.

Run by the environment's own Python. Of two wheels that bring one file in two versions, the one that
is unpacked last decides which is there, and that changes from one installation to the next.
"""

import csv
import importlib
import sys
from collections import defaultdict
from importlib.metadata import distributions

_IMPORTED = (
    "torch",
    "transformers",
    "ray",
    "flytekit",
    "megatron.core",
    "vllm",
    "nemo_rl_core.backends.training.dtensor.backend",
    "nemo_rl_core.backends.training.megatron.backend",
    "nemo_rl_core.backends.generation.vllm",
)


def conflicts() -> list[str]:
    """Files below a package's folder that several packages bring, in different versions."""
    owners: dict[str, dict[str, str]] = defaultdict(dict)
    for package in distributions():
        record = package.read_text("RECORD") or ""
        for path, digest, _ in csv.reader(record.splitlines()):
            if digest and "/" in path and not path.startswith(".."):
                owners[path][f"{package.name} {package.version}"] = digest
    return [
        f"{path}: {', '.join(sorted(found))}"
        for path, found in sorted(owners.items())
        if len(set(found.values())) > 1
    ]


def failures() -> list[str]:
    """Modules that do not import, with the reason."""
    found = []
    for name in _IMPORTED:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 (what a library raises at its import is reported)
            found.append(f"import {name}: {type(error).__name__}: {error}")
    return found


if __name__ == "__main__":
    problems = conflicts() + failures()
    sys.stdout.write("\n".join(problems) or "every file has one owner, and everything imports\n")
    sys.exit(bool(problems))
