"""Analysis of a source file for cache keys: a digest of its code, and its references.

Parsing every module of the project takes longer than importing it, so results are cached next to
the compiled modules, by the content of each file.
"""

import ast
import hashlib
import json
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from threading import Event

from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.store.files import write_atomic
from nemo_rl_core.store.shown_texts import ERRORS, drop_shown_texts

OWN_PACKAGES = ("nemo_rl_core", "tasks", "workflows")
"""The packages of this project."""
_IMPORTING = ("import_module", "__import__")
_MAX_KEPT = 4096
_is_news = Event()
"""Whether this process has unwritten results."""


@dataclass(frozen=True)
class SourceFile:
    """The analysis of a file.

    Attributes:
        digest: Digest of the syntax tree, without comments, docstrings and layout; of this
            project's files also without texts that are only shown (`shown_texts`).
        imports: Dotted names of modules, and names in modules, that it imports anywhere, without
            imports for type checking.
        strings: Strings that may be names of modules, as in registries: `package.module:Class`.
        lazy: The table `_PUBLIC` of a package with lazy imports: from name to module, which may be
            relative.
        beside: Files and folders next to it that it refers to by `Path(__file__).with_name(...)`.
    """

    digest: str
    imports: list[str]
    strings: list[str]
    lazy: dict[str, str]
    beside: list[str]


def read_source(path: Path, module: str) -> SourceFile:
    """Analyses a source file.

    Args:
        path: A Python file.
        module: Its name, to resolve relative imports; a package's name ends in `.__init__`.

    Raises:
        SyntaxError: If it is not valid Python.
    """
    content = path.read_bytes()
    key = hashlib.sha256(module.encode() + b"\0" + content).hexdigest()
    known = _known()
    if key not in known:
        known[key] = _analysed(ast.parse(content), module)
        _is_news.set()
    return known[key]


def keep_sources() -> None:
    """Writes this process's results for later ones; failures are ignored."""
    if not _is_news.is_set():
        return
    _is_news.clear()
    known = _known()
    # Entries of deleted files are dropped.
    kept = list(known)[-_MAX_KEPT:]
    table = {key: asdict(known[key]) for key in kept}
    with suppress(OSError, NemoRLError):
        write_atomic(_table_path(), json.dumps(table))


@cache
def _known() -> dict[str, SourceFile]:
    try:
        table = json.loads(_table_path().read_text())
        return {key: SourceFile(**fields) for key, fields in table.items()}
    except (OSError, ValueError, TypeError):
        return {}


def _table_path() -> Path:
    """Depends on the versions of Python and of what analyses, and on the names of errors."""
    here = Path(__file__)
    texts = here.with_name("shown_texts.py").read_bytes()
    known = " ".join([platform.python_version(), *sorted(ERRORS)])
    version = hashlib.sha256(known.encode() + here.read_bytes() + texts).hexdigest()
    return here.parent / "__pycache__" / f"sources.{version[:16]}.json"


def _analysed(tree: ast.Module, module: str) -> SourceFile:
    nodes = list(_executed(tree))
    constants = {node.value for node in nodes if isinstance(node, ast.Constant)}
    imports = {name for node in nodes for name in _imported(node, module)}
    beside = {name for node in nodes for name in _beside(node)}
    strings = sorted(each for each in constants if isinstance(each, str) and _is_name(each))
    lazy = _lazy_names(tree)
    if not any(_reads_docstrings(node) for node in nodes):
        for node in [tree, *nodes]:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                _drop_docstring(node)
    if module.partition(".")[0] in OWN_PACKAGES:
        drop_shown_texts(tree, module)
    return SourceFile(
        digest=hashlib.sha256(ast.dump(tree).encode()).hexdigest(),
        imports=sorted(imports),
        strings=strings,
        lazy=lazy,
        beside=sorted(beside),
    )


def _executed(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes, except code for type checking."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and _is_for_types(node.test):
            waiting += node.orelse
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def _is_for_types(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def _imported(node: ast.AST, module: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        # The last part of `module`, or `.__init__` of a package, counts as one level.
        above = module.split(".")[: -node.level] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        # An imported name may be a module, or refer to one.
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call):
        yield from _imported_by_call(node, module)


def _imported_by_call(node: ast.Call, module: str) -> Iterator[str]:
    """The module in `import_module("name")`."""
    function = getattr(node.func, "attr", getattr(node.func, "id", ""))
    match node.args:
        case [ast.Constant(str(name)), *_] if function in _IMPORTING:
            level = len(name) - len(name.lstrip("."))
            above = module.split(".")[:-level] if level else []
            yield ".".join([*above, name[level:]])


def _is_name(text: str) -> bool:
    module, _, name = text.partition(":")
    return "." in module and all(each.isidentifier() for each in [*module.split("."), name or "_"])


def _lazy_names(tree: ast.Module) -> dict[str, str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_PUBLIC":
            table: dict[str, str] = ast.literal_eval(node.value)
            return table
    return {}


def _beside(node: ast.AST) -> Iterator[str]:
    """The name in `Path(__file__).with_name("name")`."""
    match node:
        case ast.Call(func=ast.Attribute(attr="with_name") as function, args=[ast.Constant(name)]):
            if ast.unparse(function.value) == "Path(__file__)":
                yield str(name)


def _reads_docstrings(node: ast.AST) -> bool:
    """Whether a docstring is a value of the program, such as a prompt or a tool's description."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in ("__doc__", "getdoc")


def _drop_docstring(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> None:
    if ast.get_docstring(node, clean=False) is not None:
        node.body = node.body[1:]
