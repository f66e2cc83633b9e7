"""Source digests of a module outside of this project, and of further such modules that it imports.

No module is imported for this. Installed packages count by version.
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
from nemo_rl_core.store.source_files import read_source

_INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))


class UserSource(NamedTuple):
    """Source, imports and files that a user's module reaches; `files` has none of packages."""

    digest: str
    imports: list[str]
    files: list[Path]


def user_source(module: str, folder: Path | None = None) -> str:
    """Returns digests of the user modules that `module` reaches; empty if it does not exist.

    Args:
        folder: Folder of a script, whose modules hide installed ones.
    """
    return read_user_source(module, folder=folder).digest


def read_user_source(
    module: str, *, without: Collection[str] = (), folder: Path | None = None
) -> UserSource:
    """Returns digests, imports and files of `user_source`, excluding some packages."""
    importlib.invalidate_caches()
    sources: dict[str, UserSource] = {}
    queue = [module]
    while queue:
        name = queue.pop()
        for spec in _specs(name, folder):
            top = spec.name.partition(".")[0]
            if spec.name not in sources and top not in {*sys.stdlib_module_names, *without}:
                sources[spec.name] = _content(spec)
                queue += sources[spec.name].imports
    digests = sorted({each.digest for each in sources.values() if each.digest})
    imports = {name for each in sources.values() for name in each.imports}
    files = {file for each in sources.values() for file in each.files}
    return UserSource(" ".join(digests), sorted(imports), sorted(files))


def _specs(name: str, folder: Path | None) -> list[ModuleSpec]:
    """Finds the packages and the module of a dotted name, which may end in a name in it."""
    if name == "__main__":
        return _main_file()
    top, *inner = name.split(".")
    try:
        adjacent = PathFinder.find_spec(top, [str(folder)]) if folder else None
        spec = adjacent or find_spec(top) or PathFinder.find_spec(top, [str(Path.cwd())])
    except (ImportError, ValueError):
        return []  # the stage that calls it raises the error
    specs = []
    while spec is not None:
        specs.append(spec)
        locations = spec.submodule_search_locations
        if not inner or locations is None:
            break
        parent, child = spec.name, inner.pop(0)
        # By its last name: the path of a namespace package looks its parent up in sys.modules.
        spec = PathFinder.find_spec(child, list(locations))
        if spec is not None:
            spec.name = f"{parent}.{child}"
    return specs


def _main_file() -> list[ModuleSpec]:
    file = getattr(sys.modules["__main__"], "__file__", None)
    spec = spec_from_file_location("__main__", file) if file else None
    return [spec] if spec else []


def _content(spec: ModuleSpec) -> UserSource:
    origin = Path(spec.origin) if spec.has_location and spec.origin else None
    if origin is None:
        return UserSource("", [], [])  # built-in, or a folder without an `__init__`
    if any(origin.is_relative_to(folder) for folder in _INSTALLED):
        return UserSource(package_version(spec.name.partition(".")[0]), [], [])
    if origin.suffix != ".py":
        return UserSource(hash_file(origin), [], [origin])
    file_name = f"{spec.name}.__init__" if origin.stem == "__init__" else spec.name
    try:
        source = read_source(origin, file_name)
    except (SyntaxError, ValueError):
        return UserSource(hash_file(origin), [], [origin])  # the stage raises the error
    adjacent = [path for name in source.adjacent if (path := origin.with_name(name)).exists()]
    contents = [hash_folder(each) if each.is_dir() else hash_file(each) for each in adjacent]
    return UserSource("".join([source.digest, *contents]), source.imports, [origin, *adjacent])


def package_version(package: str) -> str:
    """Returns the installed version of a package's distribution; empty if not installed."""
    names = _distributions().get(package, [])
    return ",".join(f"{name}=={metadata.version(name)}" for name in sorted(set(names)))


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(metadata.packages_distributions())
