"""Origin of each name that a test reads: the row, Python, a known library, or the program.

A name belongs to the program only if the row declares it in `entry_point`. A name that is not
declared resolves to the real function or module, so a program cannot replace what judges it.

`_MEMBERS` lists functions and classes that code often uses without an import. A name is on the list
if one module of the standard library (or numpy, pytest) is meant wherever it is used. Names that an
exercise may ask a program to define (`gcd`, `product`, `mean`, `compress`, `bisect`) are not: the
row declares or imports them.
"""

import ast
import builtins
import symtable
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, NamedTuple

Attributes = tuple[str, ...]
"""A chain of attributes: of `box`, `("items", "append")` is `box.items.append`."""

_MEMBERS = {
    name: module
    for module, names in {
        "bisect": "bisect_left bisect_right insort",
        "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
        "contextlib": "redirect_stderr redirect_stdout suppress",
        "copy": "deepcopy",
        "dataclasses": "dataclass",
        "datetime": "timedelta",
        "decimal": "Decimal",
        "enum": "Enum IntEnum",
        "fractions": "Fraction",
        "functools": "cmp_to_key lru_cache partial reduce",
        "heapq": "heapify heappop heappush nlargest nsmallest",
        "io": "BytesIO StringIO",
        "itertools": "accumulate chain combinations combinations_with_replacement dropwhile "
        "groupby islice permutations starmap takewhile zip_longest",
        "math": "acos asin atan atan2 ceil cos degrees exp floor hypot inf isclose isfinite isinf "
        "isnan log log10 log2 nan pi radians sin sqrt tan",
        "numpy.testing": "assert_allclose assert_array_almost_equal assert_array_equal",
        "operator": "attrgetter itemgetter",
        "pathlib": "Path",
        "pytest": "approx raises",
        "types": "SimpleNamespace",
        "typing": "Any Callable Dict FrozenSet Generator Iterable Iterator List Mapping "
        "NamedTuple Optional Sequence Set Tuple Type TypeVar Union",
        "unittest": "TestCase",
        "unittest.mock": "MagicMock Mock",
    }.items()
    for name in names.split()
}
_MODULES = {"np": "numpy", "numpy": "numpy", "pytest": "pytest"}
"""Modules outside the standard library that tests use without an import."""
_INTERACTIVE = {"copyright", "credits", "exit", "help", "license", "quit"}
"""Names that `site` adds to Python's, and that neither sandbox has."""
_SIDE_EFFECTS = {"__main__", "antigravity", "idlelib", "test", "this", "turtledemo"}
"""Modules of the standard library that do something when they are imported."""


def package_folders() -> list[str]:
    """Returns the folders of the packages installed for this interpreter."""
    return list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))


def is_installed(module: str) -> bool:
    """Whether tests can import a module."""
    root = module.partition(".")[0]
    return (
        root in sys.stdlib_module_names or PathFinder.find_spec(root, package_folders()) is not None
    )


def names_read(*sources: str) -> dict[str, set[Attributes]]:
    """Returns the names that sources read and none of them defines, with their attributes.

    Raises:
        SyntaxError: If a source is not Python.

    Example:
        >>> names_read("import math", "assert math.floor(area(2)) == int(box.side)")
        {'area': set(), 'box': {('side',)}}
    """
    tables = [symtable.symtable(source, "", "exec") for source in sources]
    symbols = [(scope, symbol) for table in tables for scope, symbol in _symbols(table)]
    of_module = [each for scope, each in symbols if scope in tables or each.is_global()]
    defined = {each.get_name() for each in of_module if each.is_assigned() or each.is_imported()}
    taken = _attributes(*map(ast.parse, sources))
    names = dict.fromkeys(each.get_name() for each in of_module if each.is_referenced())
    return {
        name: taken.get(name, set())
        for name in names
        if name not in defined and (name in _INTERACTIVE or not hasattr(builtins, name))
    }


def resolved(name: str, taken: set[Attributes]) -> tuple[str, str | None] | None:
    """Returns the module, and the member of it, that a name means without an import.

    Args:
        name: A name that the row neither defines nor declares.
        taken: Attributes that the row uses of it. A name of the standard library's modules is the
            module only if the module has them: `bisect(numbers, 3)` calls no module.

    Returns:
        None if the name is not known, or if its module is not installed.
    """
    if name in _MEMBERS:
        return (_MEMBERS[name], name) if is_installed(_MEMBERS[name]) else None
    if name in _MODULES:
        return (_MODULES[name], None) if is_installed(_MODULES[name]) else None
    if name not in sys.stdlib_module_names - _SIDE_EFFECTS or not taken:
        return None
    try:
        module = import_module(name)
    except ImportError:  # A module of another operating system.
        return None
    return (name, None) if all(_has(module, attributes) for attributes in taken) else None


def bound(module: str, member: str | None) -> Any:
    """Returns what `resolved` has found."""
    imported = import_module(module)
    return getattr(imported, member) if member else imported


class WrongNames(NamedTuple):
    """Names that keep a test from running.

    Attributes:
        why: Description of the fault.
        loose: Names that the program may be meant to define.
    """

    why: str
    loose: list[str]


def wrong_names(setup: str, test: str, declared: Sequence[str]) -> WrongNames | None:
    """Checks that the row, Python, a known library or the program defines each name of a test.

    Raises:
        SyntaxError: If the setup or the test is not Python.
    """
    read = names_read(setup, test)
    trees = ast.parse(setup), ast.parse(test)
    missing = [each for each in _imported(*trees) if not is_installed(each)]
    if missing:
        return WrongNames(f"it imports {', '.join(missing)}, which is not installed", [])
    starred = {name for tree in trees for name in _starred(tree)} | {"__name__", "__doc__"}
    loose = [
        name
        for name, taken in read.items()
        if name not in starred and name not in declared and resolved(name, taken) is None
    ]
    modules = [_MEMBERS.get(name) or _MODULES.get(name) for name in loose]
    if missing := [each.partition(".")[0] for each in modules if each]:
        return WrongNames(f"it uses {', '.join(missing)}, which is not installed", [])
    if loose:
        why = f"it uses {', '.join(loose)}, which the row neither defines nor declares"
        return WrongNames(why, loose)
    if read.keys().isdisjoint(declared):
        names = ", ".join(declared)
        why = (
            f"it uses none of the names that the row declares: {names}"
            if names
            else ("it takes no name from the program, since the row declares none")
        )
        return WrongNames(why, [] if names else list(read))
    return None


def _symbols(table: symtable.SymbolTable) -> Iterator[tuple[symtable.SymbolTable, symtable.Symbol]]:
    for symbol in table.get_symbols():
        yield table, symbol
    for child in table.get_children():
        yield from _symbols(child)


def _attributes(*trees: ast.AST) -> dict[str, set[Attributes]]:
    used: dict[str, set[Attributes]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            inner = node
            taken: Attributes = ()
            while isinstance(inner, ast.Attribute):
                taken = (inner.attr, *taken)
                inner = inner.value
            if isinstance(inner, ast.Name) and taken:
                used.setdefault(inner.id, set()).add(taken)
    return used


def _imported(*trees: ast.Module) -> list[str]:
    """Modules that a row imports whatever happens; an import within `try` may fail."""
    modules: list[str] = []
    for node in (node for tree in trees for node in tree.body):
        if isinstance(node, ast.Import):
            modules += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.append(node.module)
    return modules


def _starred(tree: ast.Module) -> list[str]:
    modules = [
        node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node.module
    ]
    return [
        name
        for module in modules
        if module.partition(".")[0] not in _SIDE_EFFECTS
        for name in vars(import_module(module))
    ]


def _has(module: ModuleType, attributes: Attributes) -> bool:
    """Whether it has the first of them; imports the modules inside a package on the way."""
    first, *rest = attributes
    if hasattr(module, "__path__"):
        with suppress(ImportError):
            within = import_module(f"{module.__name__}.{first}")
            return not rest or _has(within, tuple(rest))
    return hasattr(module, first)
