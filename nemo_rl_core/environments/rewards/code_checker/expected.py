"""Finds out which exceptions of the program a test catches itself.

Python catches some exceptions silently: IndexError ends a `for` over an object with `__getitem__`,
AttributeError makes `hasattr` false, `Mapping.get` takes KeyError for a missing key. A program that
raises these would end a test early. So a test counts as failed if it does not catch an exception of
the program in its own `except` or `with`, or by `assertRaises(error, f)` or `raises(error, f)`.
"""

import ast
import sys
from collections.abc import Callable
from typing import Any

CAUGHT, WATCHED = "__caught__", "__watched__"
"""Names of the two functions that `with_notes` calls."""

_LIBRARY_CALLS = {
    ("unittest.case", "handle"),
    ("_pytest.python_api", "raises"),
    ("_pytest.raises", "raises"),
}
"""Module and function of calls that catch an exception for a test."""


def with_notes(source: str, name: str) -> Any:
    """Compiles a source that calls `__caught__()` in each of its handlers, and enters
    `__watched__(manager)` for each of its context managers.

    Raises:
        SyntaxError: If the source is not Python.
    """
    return compile(ast.fix_missing_locations(_Notes().visit(ast.parse(source))), name, "exec")


class Watched:
    """A context manager that reports the exceptions that it suppresses.

    Args:
        manager: A context manager of the test.
        report: Called with each exception that it suppresses.
    """

    def __init__(self, manager: Any, report: Callable[[BaseException], None]) -> None:
        self._manager, self._report = manager, report

    def __enter__(self) -> Any:
        return type(self._manager).__enter__(self._manager)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        is_suppressed = type(self._manager).__exit__(self._manager, kind, error, trace)
        if is_suppressed:
            self._report(error)
        return is_suppressed


def is_caught_by_library() -> bool:
    """Whether the caller runs inside a call such as `assertRaises(error, f)`."""
    frame = sys._getframe(1)
    while frame.f_back:
        frame = frame.f_back
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _LIBRARY_CALLS:
            return True
    return False


class _Notes(ast.NodeTransformer):
    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(node)
        call = ast.Call(ast.Name(CAUGHT, ast.Load()), [], [])
        node.body.insert(0, ast.copy_location(ast.Expr(call), node.body[0]))
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        self.generic_visit(node)
        for item in node.items:
            manager = item.context_expr
            call = ast.Call(ast.Name(WATCHED, ast.Load()), [manager], [])
            item.context_expr = ast.copy_location(call, manager)
        return node
