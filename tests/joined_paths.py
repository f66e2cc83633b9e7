"""Finds path joins in the sources whose right side is not a constant.

Someone else may have chosen a name on the right. `resolve_below` refuses one that leads out of the
folder; a plain join follows it.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCES = ("nemo_rl_core", "tasks", "workflows")

_RETURN_PATHS = {"Path", "PurePosixPath", "expanduser", "resolve", "absolute", "joinpath"}
_RETURN_PATHS |= {
    "with_name",
    "with_suffix",
    "relative_to",
    "cwd",
    "home",
    "rename",
    "resolve_below",
}
_PATH_ATTRIBUTES = {"parent"}
_LISTED = {"iterdir", "glob", "rglob", "list_files"}
"""Functions that yield files in the folder that they list."""
_FORBIDDEN = {"extractall", "unpack_archive"}


class Join(NamedTuple):
    """A join of paths.

    Attributes:
        file: Relative path of the source file.
        line: Line number.
        text: Source of the expression.
    """

    file: str
    line: int
    text: str


def paths_of_sources() -> list[Path]:
    """Returns the source files to search."""
    return sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))


def joins(paths: Iterable[Path]) -> Iterator[Join]:
    """Yields the joins in some files.

    Args:
        paths: Files to search; names that one annotates as paths are paths in all.
    """
    trees = {path: ast.parse(path.read_text()) for path in paths}
    annotated = _Known(list(trees.values()))
    for path, tree in trees.items():
        file = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
        yield from _Search(file, annotated).of(tree)


def _is_path(annotation: ast.expr | None) -> bool:
    if annotation is None:
        return False
    text = ast.unparse(annotation).strip("\"'")
    return text.removesuffix(" | None") in ("Path", "PurePosixPath", "PurePath", "str | Path")


class _Known:
    """Attributes and functions that the sources annotate as paths."""

    def __init__(self, trees: list[ast.Module]) -> None:
        self.attributes = set(_PATH_ATTRIBUTES)
        self.functions = set(_RETURN_PATHS)
        for node in (node for tree in trees for node in ast.walk(tree)):
            if isinstance(node, ast.FunctionDef) and _is_path(node.returns):
                is_property = any("property" in ast.unparse(d) for d in node.decorator_list)
                (self.attributes if is_property else self.functions).add(node.name)
            elif isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.AnnAssign) and _is_path(part.annotation):
                        assert isinstance(part.target, ast.Name)
                        self.attributes.add(part.target.id)
        for node in (node for tree in trees for node in ast.walk(tree)):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                self._from_init(node)

    def _from_init(self, init: ast.FunctionDef) -> None:
        """Collects attributes that are assigned from parameters or joins."""
        names = {each.arg for each in _arguments(init) if _is_path(each.annotation)}
        for node in ast.walk(init):
            if not isinstance(node, ast.Assign):
                continue
            for target, value in _pairs(node):
                if isinstance(target, ast.Attribute) and self.is_path(value, names):
                    self.attributes.add(target.attr)

    def is_path(self, node: ast.expr, names: set[str]) -> bool:  # noqa: PLR0911 (one line a kind)
        """Whether an expression is a path, given the local names that are paths."""
        match node:
            case ast.Name(id=name):
                return name in names
            case ast.Attribute(attr=name):
                return name in self.attributes
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
                return name in self.functions
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return self.is_path(left, names) or _is_text(right)
            case ast.IfExp(body=body, orelse=other):
                return self.is_path(body, names) or self.is_path(other, names)
            case ast.BoolOp(values=values):
                return any(self.is_path(each, names) for each in values)
            case ast.NamedExpr(value=value):
                return self.is_path(value, names)
        return False


def _arguments(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _pairs(assign: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in assign.targets:
        if isinstance(target, ast.Tuple) and isinstance(assign.value, ast.Tuple):
            yield from zip(target.elts, assign.value.elts, strict=False)
        else:
            yield target, assign.value


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


class _Search:
    """Walks a module with the names that are paths and those that are safe to join."""

    def __init__(self, file: str, annotated: _Known) -> None:
        self._file, self._annotated = file, annotated

    def of(self, tree: ast.Module) -> Iterator[Join]:
        """Yields the joins of a module, innermost functions first."""
        yield from self._in(tree, set(), set())

    def _in(self, scope: ast.AST, paths: set[str], safe: set[str]) -> Iterator[Join]:
        paths, safe = set(paths), set(safe)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            paths |= {each.arg for each in _arguments(scope) if _is_path(each.annotation)}
        inside = list(_scope_of(scope))
        for _ in range(3):  # a name may be assigned from one that is assigned below
            for node in inside:
                self._learn(node, paths, safe)
        for node in inside:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from self._in(node, paths, safe)
            elif self._is_open_join(node, paths, safe):
                yield Join(self._file, node.lineno, ast.unparse(node))

    def _learn(  # noqa: C901, PLR0912 (one case a kind of statement)
        self, node: ast.AST, paths: set[str], safe: set[str]
    ) -> None:
        match node:
            case ast.Assign():
                for target, value in _pairs(node):
                    if isinstance(target, ast.Name):
                        if self._annotated.is_path(value, paths):
                            paths.add(target.id)
                        if self._is_safe(value, paths, safe):
                            safe.add(target.id)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                if _is_path(annotation):
                    paths.add(name)
            case ast.NamedExpr(target=ast.Name(id=name), value=value):
                if self._annotated.is_path(value, paths):
                    paths.add(name)
            case ast.withitem(context_expr=value, optional_vars=ast.Name(id=name)):
                if self._annotated.is_path(value, paths) or "written_aside" in ast.unparse(value):
                    paths.add(name)
            case (
                ast.For(target=target, iter=source) | ast.comprehension(target=target, iter=source)
            ):
                if not isinstance(target, ast.Name):
                    return
                called = {
                    getattr(each.func, "attr", getattr(each.func, "id", ""))
                    for each in ast.walk(source)
                    if isinstance(each, ast.Call)
                }
                if called & {"iterdir", "glob", "rglob"}:
                    paths.add(target.id)
                if "list_files" in called or self._is_constant_tuple(source):
                    safe.add(target.id)
                if (
                    isinstance(source, ast.Tuple | ast.List)
                    and source.elts
                    and all(self._annotated.is_path(each, paths) for each in source.elts)
                ):
                    paths.add(target.id)

    def _is_constant_tuple(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return all(self._is_safe(each, set(), set()) for each in node.elts)
        return self._is_safe(node, set(), set())

    def _is_safe(  # noqa: PLR0911 (one line a kind)
        self, node: ast.expr, paths: set[str], safe: set[str]
    ) -> bool:
        """Whether the sources themselves chose a name."""
        match node:
            case ast.Constant():
                return True
            case ast.Name(id=name):
                return name.isupper() or name in safe
            case ast.Attribute(attr="name", value=ast.Name() | ast.Attribute() as value):
                # The last part of a local path; that of a new `Path(...)` may be `..`.
                return self._annotated.is_path(value, paths)
            case ast.Attribute(attr=name):
                return name.isupper()
            case ast.Subscript(value=value):
                return self._is_safe(value, paths, safe)
            case ast.JoinedStr(values=values):
                return all(
                    self._is_safe(each.value, paths, safe) or _is_number(each)
                    for each in values
                    if isinstance(each, ast.FormattedValue)
                )
            case ast.IfExp(body=body, orelse=other):
                return self._is_safe(body, paths, safe) and self._is_safe(other, paths, safe)
        return False

    def _is_open_join(  # noqa: PLR0911 (one line a kind)
        self, node: ast.AST, paths: set[str], safe: set[str]
    ) -> bool:
        match node:
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                is_join = self._annotated.is_path(left, paths) or isinstance(right, ast.JoinedStr)
                return is_join and not self._is_safe(right, paths, safe)
            case ast.Call(func=ast.Attribute(attr=name)) if name in _FORBIDDEN:
                return True
            case ast.Call(func=ast.Attribute(attr="joinpath" | "with_name"), args=args):
                return not all(
                    self._is_safe(
                        each.value if isinstance(each, ast.Starred) else each, paths, safe
                    )
                    for each in args
                )
            case ast.Call(func=ast.Attribute(attr="join", value=ast.Attribute(attr="path"))):
                return True
            case ast.Call(func=ast.Name(id="Path" | "PurePosixPath"), args=[_, *rest]) if rest:
                return not all(self._is_safe(each, paths, safe) for each in rest)
            case ast.Call(keywords=keywords):
                return any(
                    each.arg in ("is_multipart", "recursive")
                    and not (isinstance(each.value, ast.Constant) and not each.value.value)
                    and "get" in ast.unparse(node.func)
                    for each in keywords
                )
        return False


def _is_number(value: ast.FormattedValue) -> bool:
    return value.format_spec is not None and ast.unparse(value.format_spec)[-2:-1] in ("d", "x")


def _scope_of(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a function or module, without those of inner functions."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _scope_of(node)
