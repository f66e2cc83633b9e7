"""Origin of each name that a test reads: the row, Python, a known library, or the program.

A name belongs to the program only if the row declares it in `entry_point`, or, in a row that
declares none, if a test calls or catches it and nothing else defines it. Any other name resolves to
the real function or module, so that a program cannot replace the code that checks it.
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
_HELPERS = ("functools", "itertools", "math", "statistics")
"""Modules whose functions a test may mean without an import."""
_INTERACTIVE = {"copyright", "credits", "exit", "help", "license", "quit"}
"""Names that `site` adds to the builtins, and that neither sandbox has."""
_CHECKER_NAMES = {"__name__", "__doc__", "__is_result__", "__values__"}
"""Names that the checker defines."""
_SIDE_EFFECTS = {"__main__", "antigravity", "idlelib", "test", "this", "turtledemo"}
"""Modules of the standard library whose import has side effects."""


def package_folders() -> list[str]:
    """Returns the folders of the packages installed for this interpreter."""
    return list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))


def is_installed(module: str) -> bool:
    """Whether a module can be imported by tests."""
    root = module.partition(".")[0]
    return (
        root in sys.stdlib_module_names or PathFinder.find_spec(root, package_folders()) is not None
    )


def names_read(*sources: str) -> dict[str, set[Attributes]]:
    """Returns the names that sources read but do not define, with the attributes they use.

    Example:
        >>> names_read("import math", "assert math.floor(area(2)) == int(box.side)")
        {'area': set(), 'box': {('side',)}}
    """
    tables = [symtable.symtable(source, "", "exec") for source in sources]
    symbols = [(scope, symbol) for table in tables for scope, symbol in _symbols(table)]
    module_symbols = [each for scope, each in symbols if scope in tables or each.is_global()]
    defined = {
        each.get_name() for each in module_symbols if each.is_assigned() or each.is_imported()
    }
    taken = _attributes(*map(ast.parse, sources))
    names = dict.fromkeys(each.get_name() for each in module_symbols if each.is_referenced())
    return {
        name: taken.get(name, set())
        for name in names
        if name not in defined and (name in _INTERACTIVE or not hasattr(builtins, name))
    }


def called_names(setup: str, pieces: Sequence[str]) -> tuple[str, ...]:
    """Returns the names that tests call or catch and that only the program can define.

    `gcd` or `mean` is not among them, since the test may mean Python's function.

    Example:
        >>> called_names("", ["assert add(sqrt(4), 1) == len(EXPECTED)"])
        ('add',)
    """
    helpers = {name for module in _HELPERS for name in vars(import_module(module))}
    library_names = helpers | _MEMBERS.keys() | _MODULES.keys()
    called: dict[str, None] = {}
    for piece in pieces:
        try:
            loose = _loose(setup, piece)
        except (SyntaxError, ValueError, ImportError, RecursionError, MemoryError):
            return ()  # `wrong_names` reports the reason
        for node in ast.walk(ast.parse(piece)):
            used = {ast.Call: "func", ast.ExceptHandler: "type"}.get(type(node))
            name = getattr(getattr(node, used, None), "id", None) if used else None
            if name in loose and name not in library_names:
                called[name] = None
    return tuple(called)


def resolved(name: str, taken: set[Attributes]) -> tuple[str, str | None] | None:
    """Returns the module, and its member or None, that a name means without an import.

    The name of a standard library module means the module only if the module has the attributes
    that the row uses (`taken`): `bisect(numbers, 3)` does not call the module.
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


def import_origin(module: str, member: str | None) -> Any:
    """Imports a result of `resolved`."""
    imported = import_module(module)
    return getattr(imported, member) if member else imported


class WrongNames(NamedTuple):
    """Reason why a test cannot run, and names that its author may expect of the program."""

    why: str
    loose: list[str]


def wrong_names(setup: str, test: str, declared: Sequence[str]) -> WrongNames | None:
    """Checks that the row, Python, a known library or the program defines each name of a test."""
    read = names_read(setup, test)
    trees = ast.parse(setup), ast.parse(test)
    missing = [each for each in _imported(*trees) if not is_installed(each)]
    if missing:
        return WrongNames(f"it imports {', '.join(missing)}, which is not installed", [])
    loose = [name for name in _loose(setup, test) if name not in declared]
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
            else ("it uses no name of the program, since the row declares none")
        )
        return WrongNames(why, [] if names else list(read))
    return None


def _loose(setup: str, test: str) -> list[str]:
    trees = ast.parse(setup), ast.parse(test)
    starred = {name for tree in trees for name in _starred(tree)} | _CHECKER_NAMES
    read = names_read(setup, test).items()
    return [name for name, taken in read if name not in starred and resolved(name, taken) is None]


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
    """Returns the modules that a row imports unconditionally; an import in `try` may fail."""
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
    first, *rest = attributes
    if hasattr(module, "__path__"):
        with suppress(ImportError):
            submodule = import_module(f"{module.__name__}.{first}")
            return not rest or _has(submodule, tuple(rest))
    return hasattr(module, first)
