"""Whose the names of a test are: the test's own, the standard library's, or the program's."""

import ast
import builtins
import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType

Attributes = tuple[str, ...]
"""One after another: of `box`, `("items", "append")` is `box.items.append`."""


def names_used(*trees: ast.AST) -> dict[str, set[Attributes]]:
    """The names in some code that are no builtins, each with what is taken of it there.

    Example:
        >>> names_used(ast.parse("assert math.floor(area(2)) == 12"))
        {'math': {('floor',)}, 'area': set()}
    """
    used: dict[str, set[Attributes]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            name, taken = _unwound(node)
            if name is not None:
                used.setdefault(name, set()).update([taken] if taken else [])
    return {name: taken for name, taken in used.items() if not hasattr(builtins, name)}


def standard_module(name: str, taken: set[Attributes]) -> ModuleType | None:
    """The module of the standard library that a name stands for, imported or not.

    A name of such a module is the module's where something is taken of it that the module has:
    `bisect(numbers, 3)` calls a function of the program's, `bisect.insort(numbers, 3)` does not.
    """
    if name not in sys.stdlib_module_names or not taken:
        return None
    try:
        module = import_module(name)
    except ImportError:  # Of another operating system.
        return None
    has = [_has(module, attributes) for attributes in taken]
    return module if any(has) else None


def _unwound(node: ast.AST) -> tuple[str | None, Attributes]:
    taken: list[str] = []
    while isinstance(node, ast.Attribute):
        taken.insert(0, node.attr)
        node = node.value
    return (node.id if isinstance(node, ast.Name) else None), tuple(taken)


def _has(module: ModuleType, attributes: Attributes) -> bool:
    """Whether it has the first of them; the modules within modules are imported on the way."""
    first, *rest = attributes
    if hasattr(module, "__path__"):
        with suppress(ImportError):
            within = import_module(f"{module.__name__}.{first}")
            return not rest or _has(within, tuple(rest))
    return hasattr(module, first)
