"""Source digests of a user's module and of the user's modules that it imports.

No module is imported for this. Installed packages count by version, and files that a module refers
to by `Path(__file__).with_name(...)` by content. What else the code reads is only known when it
runs; see `nemo_rl_core.store.watching`.
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
    """What a user's module reaches.

    Attributes:
        digest: Digests of modules and versions of packages, separated by spaces; empty if there is
            no such module.
        imports: Dotted names that its modules import.
        files: The files and folders that the digest covers; those of packages count by version.
    """

    digest: str
    imports: list[str]
    files: list[Path]


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
    found: dict[str, UserSource] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        for spec in _specs(name):
            top = spec.name.partition(".")[0]
            if spec.name not in found and top not in {*sys.stdlib_module_names, *without}:
                found[spec.name] = _content(spec)
                waiting += found[spec.name].imports
    digests = sorted({each.digest for each in found.values() if each.digest})
    imports = {name for each in found.values() for name in each.imports}
    files = {file for each in found.values() for file in each.files}
    return UserSource(" ".join(digests), sorted(imports), sorted(files))


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


def _content(spec: ModuleSpec) -> UserSource:
    """A module by itself: its digest, the names that it imports, and its files."""
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
    beside = [path for name in source.beside if (path := origin.with_name(name)).exists()]
    contents = [hash_folder(each) if each.is_dir() else hash_file(each) for each in beside]
    return UserSource("".join([source.digest, *contents]), source.imports, [origin, *beside])


def package_version(package: str) -> str:
    """The installed version of what a package is imported from; empty if it is not installed."""
    names = _distributions().get(package, [])
    return ",".join(f"{name}=={metadata.version(name)}" for name in sorted(set(names)))


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(metadata.packages_distributions())
