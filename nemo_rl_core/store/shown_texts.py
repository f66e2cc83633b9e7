"""Texts of this project's sources that are only shown, and so are no part of a cache key.

These are the texts of errors that end a stage, of log lines, of waits on the display, and of decks
and summaries. They become empty in the syntax tree; the code around them stays, with its calls.
A text that may reach a model or a number stays too: errors of Python count in the packages of
`SAID_TO_MODELS`, where a tool's `ValueError` is an answer to the model.

The sources of users keep all their texts, since their code may do with them what it likes.
"""

import ast
from collections.abc import Iterator

from nemo_rl_core import errors

SAID_TO_MODELS = ("nemo_rl_core.environments", "nemo_rl_core.games", "nemo_rl_core.rollouts")
"""Packages in which the text of one of Python's errors may become a part of a conversation."""

ERRORS = frozenset(
    name
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, errors.NemoRLError)
)
"""The project's errors: no handler gives their texts to a model or makes numbers of them."""

_PYTHON_ERRORS = frozenset(
    ["AssertionError", "NotImplementedError", "RuntimeError", "TypeError", "ValueError"]
)
_DISPLAYED = frozenset(
    [
        *("Note", "waiting", "waiting_for_files", "waiting_for_hashes"),
        *("completions_html", "curve_svg", "curves", "curves_svg"),
    ]
)
"""Functions that show texts and return nothing but texts for decks."""
_LOGGERS = frozenset(["_LOG", "_log", "logger"])
_LEVELS = frozenset(["critical", "debug", "error", "exception", "info", "warning"])
_RESULTS = frozenset(["StageResult", "made"])
_OF_RESULTS = frozenset(["deck", "summary"])
"""Arguments of these calls that make files which no content hash covers."""
_NAMES_ALONE = frozenset(["nemo_rl_core.errors"])
"""Modules of which only the classes and their bases count: the rest makes texts."""


def drop_shown_texts(tree: ast.Module, module: str) -> None:
    """Empties the texts of a module of this project that are only shown.

    Args:
        tree: Of the whole file; it is changed.
        module: Its name; a package's ends in `.__init__`.
    """
    if module in _NAMES_ALONE:
        classes = [each for each in tree.body if isinstance(each, ast.ClassDef)]
        for each in classes:
            each.body = [ast.Pass()]
        tree.body = [*classes]
        return
    said = any(module == each or module.startswith(f"{each}.") for each in SAID_TO_MODELS)
    _Shown(tree, python_errors=frozenset() if said else _PYTHON_ERRORS).visit(tree)


class _Shown(ast.NodeVisitor):
    """Finds the calls that show a text, and empties the strings among their arguments.

    Args:
        tree: Of the whole file, whose own subclasses of errors count as errors.
        python_errors: Errors of Python whose texts are only shown.
    """

    def __init__(self, tree: ast.Module, *, python_errors: frozenset[str]) -> None:
        self._shows = ERRORS | {*_own_errors(tree)} | _DISPLAYED
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
    """`C` of `C(...)` and of `module.C(...)`."""
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


def _own_errors(tree: ast.Module) -> Iterator[str]:
    """Classes of the file that are made of one of the project's errors."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(
            isinstance(base, ast.Name) and base.id in ERRORS for base in node.bases
        ):
            yield node.name
