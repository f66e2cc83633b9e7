"""Checks an installed lock: no file belongs to two packages, and every imported module imports.

Run by the Python of the environment. If two wheels have different versions of one file, the one
that is unpacked last wins, and that changes from one installation to the next.
"""

import csv
import importlib
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import distributions

_LIBRARIES = (
    "torch",
    "transformers",
    "ray",
    "flytekit",
    "flashinfer",
    "megatron.core",
    "megatron.core.models.gpt.gpt_layer_specs",
    "bitsandbytes",
    "torchao.float8",
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.gpu_worker",
    "vllm.distributed.device_communicators.custom_all_reduce",
    "vllm.distributed.device_communicators.flashinfer_all_reduce",
)
"""Further modules to import: those that the project imports within functions, and those that vLLM
imports only on machines with GPUs."""
_OURS = ("nemo_rl_core", "tasks", "workflows")

Files = Mapping[str, Mapping[str, str]]
"""Digest of each file, by the packages that contain it."""


def installed_files(folders: Sequence[str] | None = None) -> Files:
    """The files below packages' folders.

    Args:
        folders: Folders to search for packages; None takes the search path of modules.
    """
    owners: dict[str, dict[str, str]] = defaultdict(dict)
    for package in distributions(path=list(folders)) if folders else distributions():
        record = package.read_text("RECORD") or ""
        for path, digest, _ in csv.reader(record.splitlines()):
            if digest and "/" in path and not path.startswith(".."):
                owners[path][f"{package.name} {package.version}"] = digest
    return owners


def conflicts(files: Files) -> list[str]:
    """The files that several packages bring in different versions."""
    return [
        f"{path}: {', '.join(sorted(found))}"
        for path, found in sorted(files.items())
        if len(set(found.values())) > 1
    ]


def modules(packages: Iterable[str]) -> Iterator[str]:
    """The packages and all modules below them, by name."""
    for package in packages:
        yield package
        root_module = importlib.import_module(package)
        for module in pkgutil.walk_packages(root_module.__path__, f"{package}."):
            if not module.name.endswith(".__main__"):
                yield module.name


def failures(names: Iterable[str]) -> list[str]:
    """Modules that do not import, with the reason."""
    problems = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 (what a library raises at its import is reported)
            problems.append(f"import {name}: {type(error).__name__}: {error}")
    return problems


def main() -> int:
    """Prints what was checked, or the problems; returns the exit code."""
    files = installed_files()
    imported = [*_LIBRARIES, *modules(_OURS)]
    problems = conflicts(files) + failures(imported)
    packages = {package for found in files.values() for package in found}
    summary = (
        f"{len(packages)} packages: each of their {len(files):,} files has one owner or is the "
        f"same in all, and {len(imported)} modules import\n"
    )
    sys.stdout.write("".join(f"{problem}\n" for problem in problems) or summary)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
