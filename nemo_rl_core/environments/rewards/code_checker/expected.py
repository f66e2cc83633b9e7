"""Detects which exceptions of the program a test catches itself.

Python catches some exceptions silently: IndexError ends a `for` over an object with `__getitem__`,
AttributeError makes `hasattr` false, `Mapping.get` takes KeyError for a missing key. A program that
raises these would end a test early. So a test fails if an exception of the program is not caught by
an `except` or `with` of the test, or by `assertRaises(error, f)` or `raises(error, f)`.
"""

import ast
import builtins
import sys
from collections.abc import Callable
from typing import Any

CAUGHT, WATCHED = "__caught__", "__watched__"
KINDS, KIND = "__kinds__", "__kind__"
UNUSED, SUBCLASS = "__unused__", "__subclass__"
"""Names of the functions that `instrumented` calls."""
TEST = "the test"
"""File name that a test is compiled with."""

_LIBRARY_CALLS = {
    ("unittest.case", "handle"),
    ("_pytest.python_api", "raises"),
    ("_pytest.raises", "raises"),
}
"""Module and name of functions that catch an exception for a test."""


class Handle:
    """Represents an object of the program in a test; see `remote.Remote`."""

    __slots__ = ("_reference",)


def instrumented(source: str, name: str) -> Any:
    """Instruments and compiles the source of a test.

    The compiled code calls `__caught__()` in each of its handlers and enters `__watched__(manager)`
    for each of its context managers. It catches `__kinds__(error)`, which is the local class for an
    exception class of the program. `__kind__(x)` replaces `type(x)` and `x.__class__`,
    `__subclass__` replaces `issubclass`, and `__unused__(f)` replaces `f` if the result of the call
    is ignored.
    """
    return compile(
        ast.fix_missing_locations(_Instrumenter().visit(ast.parse(source))), name, "exec"
    )


class Watched:
    """A context manager that reports the exceptions that it suppresses.

    A context manager of the program may suppress an exception that the test raises in a `raise`
    statement, or in one that names only builtins, such as `1 / 0`. If it suppressed others, such as
    a failed assertion, it would influence the verdict, so the test fails.
    """

    def __init__(
        self,
        manager: Any,
        report: Callable[[BaseException], None],
        fail: Callable[[str], None],
        source: str,
    ) -> None:
        self._manager, self._report, self._fail, self._source = manager, report, fail, source

    def __enter__(self) -> Any:
        return type(self._manager).__enter__(self._manager)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        is_suppressed = type(self._manager).__exit__(self._manager, kind, error, trace)
        if (
            is_suppressed
            and isinstance(self._manager, Handle)
            and not self._is_raised(error, trace)
        ):
            self._fail("the program suppresses an exception that the test does not raise itself")
        if is_suppressed:
            self._report(error)
        return is_suppressed

    def _is_raised(self, error: BaseException, trace: Any) -> bool:
        while trace.tb_next:
            trace = trace.tb_next
        lines = (node for node in ast.walk(ast.parse(self._source)) if isinstance(node, ast.stmt))
        statement = next((node for node in lines if node.lineno == trace.tb_lineno), None)
        if trace.tb_frame.f_code.co_filename != TEST or isinstance(error, AssertionError):
            return False
        names = {
            each.id for each in ast.walk(statement or ast.Pass()) if isinstance(each, ast.Name)
        }
        return isinstance(statement, ast.Raise) or all(hasattr(builtins, name) for name in names)


def is_caught_by_library() -> bool:
    """Whether the caller runs inside a call such as `assertRaises(error, f)`."""
    frame = sys._getframe(1)
    while frame.f_back:
        frame = frame.f_back
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _LIBRARY_CALLS:
            return True
    return False


_RAISES = {"raises", "assertRaises", "assertRaisesRegex", "suppress"}


class _Instrumenter(ast.NodeTransformer):
    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, ast.copy_location(ast.Expr(_call(CAUGHT)), node.body[0]))
        if node.type:
            node.type = _call(KINDS, node.type)
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        self.generic_visit(node)
        for item in node.items:
            manager = item.context_expr
            item.context_expr = ast.copy_location(_call(WATCHED, manager), manager)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Call):
            node.value.func = _call(UNUSED, node.value.func)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name == "type" and len(node.args) == 1 and isinstance(node.func, ast.Name):
            node.func = ast.copy_location(ast.Name(KIND, ast.Load()), node.func)
        elif name == "issubclass" and isinstance(node.func, ast.Name):
            node.func = ast.copy_location(ast.Name(SUBCLASS, ast.Load()), node.func)
        elif name in _RAISES:
            count = len(node.args) if name == "suppress" else 1
            node.args[:count] = [_call(KINDS, each) for each in node.args[:count]]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        is_read = node.attr == "__class__" and isinstance(node.ctx, ast.Load)
        return _call(KIND, node.value) if is_read else node


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    call = ast.Call(ast.Name(name, ast.Load()), [*arguments], [])
    return ast.copy_location(call, arguments[0]) if arguments else call
