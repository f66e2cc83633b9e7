"""Removes texts that are only displayed from this project's sources before cache keys are made.

They become empty in the syntax tree; the surrounding code stays. Texts that may reach a model or a
number stay, too: Python's errors count in the packages of `SHOWN_TO_MODELS`, where a tool's
`ValueError` is an answer to the model. User code keeps all its texts.
"""

import ast
from collections.abc import Iterator

from nemo_rl_core import errors

SHOWN_TO_MODELS = ("nemo_rl_core.environments", "nemo_rl_core.games", "nemo_rl_core.rollouts")
"""Packages in which the text of a Python error may become part of a conversation."""

ERRORS = frozenset(
    name
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, errors.NemoRLError)
)
"""The project's errors; no handler passes their texts to a model or computes with them."""

_PYTHON_ERRORS = frozenset(
    ["AssertionError", "NotImplementedError", "RuntimeError", "TypeError", "ValueError"]
)
_DISPLAYED = frozenset(
    [
        *("Note", "waiting", "waiting_for_files", "waiting_for_hashes"),
        *("completions_html", "curve_svg", "curves", "curves_svg"),
    ]
)
"""Functions that display texts or return texts for decks."""
_LOGGERS = frozenset(["_LOG", "_log", "logger"])
_LEVELS = frozenset(["critical", "debug", "error", "exception", "info", "warning"])
_RESULTS = frozenset(["StageResult", "made"])
_OF_RESULTS = frozenset(["deck", "summary"])
"""Arguments of these calls for files that no content hash covers."""
_ONLY_CLASSES = frozenset(["nemo_rl_core.errors"])
"""Modules of which only classes and their bases count, since the rest creates texts."""


def drop_shown_texts(tree: ast.Module, module: str) -> None:
    """Replaces displayed texts by empty strings in the syntax tree of a module of this project."""
    if module in _ONLY_CLASSES:
        classes = [each for each in tree.body if isinstance(each, ast.ClassDef)]
        for each in classes:
            each.body = [ast.Pass()]
        tree.body = [*classes]
        return
    reaches_models = any(
        module == each or module.startswith(f"{each}.") for each in SHOWN_TO_MODELS
    )
    _Shown(tree, python_errors=frozenset() if reaches_models else _PYTHON_ERRORS).visit(tree)


class _Shown(ast.NodeVisitor):
    """Empties the strings in arguments of calls that display a text."""

    def __init__(self, tree: ast.Module, *, python_errors: frozenset[str]) -> None:
        self._shows = ERRORS | {*_local_errors(tree)} | _DISPLAYED
        self._python_errors = python_errors

    def visit_Raise(self, node: ast.Raise) -> None:
        if isinstance(node.exc, ast.Call) and _name(node.exc) in self._python_errors:
            _empty(node.exc)
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        if self._python_errors:
            node.msg = None
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and _logs(node.value):
            _empty(node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _name(node) in self._shows:
            _empty(node)
        elif _name(node) in _RESULTS:
            for keyword in node.keywords:
                if keyword.arg in _OF_RESULTS:
                    _Empty().visit(keyword)
        self.generic_visit(node)


class _Empty(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, _: ast.JoinedStr) -> ast.Constant:
        return ast.Constant("")


def _empty(call: ast.Call) -> None:
    call.args = [_Empty().visit(each) for each in call.args]
    for keyword in call.keywords:
        _Empty().visit(keyword)


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _logs(call: ast.Call) -> bool:
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr in _LEVELS
        and isinstance(function.value, ast.Name)
        and function.value.id in _LOGGERS
    )


def _local_errors(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(
            isinstance(base, ast.Name) and base.id in ERRORS for base in node.bases
        ):
            yield node.name
