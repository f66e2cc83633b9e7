"""Analysis of a source file for cache keys: a digest of its code, and its references.

Results are cached by the content of each file, since parsing takes longer than importing.
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
_IMPORTING = ("import_module", "__import__")
_MAX_KEPT = 4096
_has_new_results = Event()


@dataclass(frozen=True)
class SourceFile:
    """The analysis of a file.

    Attributes:
        digest: Digest of the syntax tree, without comments, docstrings and displayed texts.
        imports: Dotted names of modules, and names in modules, except those for type checking.
        strings: Strings that may name modules, such as in registries: `package.module:Class`.
        lazy: The table `_PUBLIC` of a package with lazy imports, from name to module.
        adjacent: Files and folders next to it, as in `Path(__file__).with_name(...)`.
    """

    digest: str
    imports: list[str]
    strings: list[str]
    lazy: dict[str, str]
    adjacent: list[str]


def read_source(path: Path, module: str) -> SourceFile:
    """Analyzes a source file; a package's module name ends in `.__init__`, for relative imports."""
    content = path.read_bytes()
    key = hashlib.sha256(module.encode() + b"\0" + content).hexdigest()
    cached = _cached()
    if key not in cached:
        cached[key] = _analyse(ast.parse(content), module)
        _has_new_results.set()
    return cached[key]


def keep_sources() -> None:
    """Writes this process's results for later processes; ignores failures."""
    if not _has_new_results.is_set():
        return
    _has_new_results.clear()
    cached = _cached()
    # Entries of deleted files are dropped.
    newest = list(cached)[-_MAX_KEPT:]
    table = {key: asdict(cached[key]) for key in newest}
    with suppress(OSError, NemoRLError):
        write_atomic(_table_path(), json.dumps(table))


@cache
def _cached() -> dict[str, SourceFile]:
    try:
        table = json.loads(_table_path().read_text())
        return {key: SourceFile(**fields) for key, fields in table.items()}
    except (OSError, ValueError, TypeError):
        return {}


def _table_path() -> Path:
    module_file = Path(__file__)
    texts = module_file.with_name("shown_texts.py").read_bytes()
    versions = " ".join([platform.python_version(), *sorted(ERRORS)])
    version = hashlib.sha256(versions.encode() + module_file.read_bytes() + texts).hexdigest()
    return module_file.parent / "__pycache__" / f"sources.{version[:16]}.json"


def _analyse(tree: ast.Module, module: str) -> SourceFile:
    nodes = list(_executed(tree))
    constants = {node.value for node in nodes if isinstance(node, ast.Constant)}
    imports = {name for node in nodes for name in _imported(node, module)}
    adjacent = {name for node in nodes for name in _adjacent(node)}
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
        adjacent=sorted(adjacent),
    )


def _executed(tree: ast.Module) -> Iterator[ast.AST]:
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
        parent_packages = module.split(".")[: -node.level] if node.level else []
        base = ".".join([*parent_packages, *([node.module] if node.module else [])])
        # An imported name may be a module, or refer to one.
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call):
        yield from _imported_by_call(node, module)


def _imported_by_call(node: ast.Call, module: str) -> Iterator[str]:
    """Yields the module in `import_module("name")`."""
    function = getattr(node.func, "attr", getattr(node.func, "id", ""))
    match node.args:
        case [ast.Constant(str(name)), *_] if function in _IMPORTING:
            level = len(name) - len(name.lstrip("."))
            parent_packages = module.split(".")[:-level] if level else []
            yield ".".join([*parent_packages, name[level:]])


def _is_name(text: str) -> bool:
    module, _, name = text.partition(":")
    return "." in module and all(each.isidentifier() for each in [*module.split("."), name or "_"])


def _lazy_names(tree: ast.Module) -> dict[str, str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_PUBLIC":
            table: dict[str, str] = ast.literal_eval(node.value)
            return table
    return {}


def _adjacent(node: ast.AST) -> Iterator[str]:
    """Yields the name in `Path(__file__).with_name("name")`."""
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
