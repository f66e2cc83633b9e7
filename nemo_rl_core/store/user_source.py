"""Source digests of a user's module and of the user's modules that it imports.

No module is imported for this. Installed packages count by version, and files that a module refers
to by `Path(__file__).with_name(...)` by content. Other files are ignored.
"""

import importlib
import sys
import sysconfig
from collections.abc import Collection
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple

from nemo_rl_core.store.files import hash_file, hash_folder
from nemo_rl_core.store.source_files import SourceFile, read_source

_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))


class UserSource(NamedTuple):
    """What a user's module reaches.

    Attributes:
        digest: Digests of modules and versions of packages, separated by spaces; empty if there is
            no such module.
        imports: Dotted names that its modules import.
    """

    digest: str
    imports: list[str]


def user_source(module: str) -> str:
    """Returns digests of the user's modules that `module` reaches, and package versions.

    Args:
        module: Its import name; modules of the current directory are included, as for a reward
            function.

    Returns:
        Digests separated by spaces; empty if there is no such module.
    """
    return read_user_source(module).digest


def read_user_source(module: str, *, without: Collection[str] = ()) -> UserSource:
    """As `user_source`, without what lies in these packages."""
    importlib.invalidate_caches()
    found: dict[str, str] = {}
    imports: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        for spec in _specs(name):
            top = spec.name.partition(".")[0]
            if spec.name not in found and top not in {*sys.stdlib_module_names, *without}:
                found[spec.name], further = _content(spec)
                imports.update(further)
                waiting += further
    digests = sorted({each for each in found.values() if each})
    return UserSource(" ".join(digests), sorted(imports))


def _specs(name: str) -> list[ModuleSpec]:
    """The packages and the module of a dotted name, which may end in a name in the module."""
    if name == "__main__":
        return _main_file()
    top, *inner = name.split(".")
    try:
        spec = find_spec(top) or PathFinder.find_spec(top, [str(Path.cwd())])
    except (ImportError, ValueError):
        return []  # the stage that calls it raises the error
    found = []
    while spec is not None:
        found.append(spec)
        places = spec.submodule_search_locations
        if not inner or places is None:
            break
        spec = PathFinder.find_spec(f"{spec.name}.{inner.pop(0)}", list(places))
    return found


def _main_file() -> list[ModuleSpec]:
    """The file that Python was started with."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    spec = spec_from_file_location("__main__", file) if file else None
    return [spec] if spec else []


def _content(spec: ModuleSpec) -> tuple[str, list[str]]:
    """The digest of a module, and the names that it imports."""
    origin = Path(spec.origin) if spec.has_location and spec.origin else None
    if origin is None:
        return "", []  # built-in, or a folder without an `__init__`
    if any(origin.is_relative_to(folder) for folder in _INSTALLED):
        return _version(spec.name.partition(".")[0]), []
    if origin.suffix != ".py":
        return hash_file(origin), []
    file_name = f"{spec.name}.__init__" if origin.stem == "__init__" else spec.name
    try:
        source = read_source(origin, file_name)
    except (SyntaxError, ValueError):
        return hash_file(origin), []  # as above
    return "".join([source.digest, *_beside(origin, source)]), source.imports


def _beside(origin: Path, source: SourceFile) -> list[str]:
    files = [origin.with_name(name) for name in source.beside]
    return [
        hash_folder(each) if each.is_dir() else hash_file(each) for each in files if each.exists()
    ]


def _version(package: str) -> str:
    names = _distributions().get(package, [])
    return ",".join(f"{name}=={metadata.version(name)}" for name in sorted(set(names)))


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(metadata.packages_distributions())
