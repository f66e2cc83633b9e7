"""Runs the functions `test_...` and the `unittest` classes that a test defines, as pytest does."""

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import CoroutineType
from typing import Any

_FILES = {
    *("open", "tempfile", "write_text", "write_bytes", "mkdir", "makedirs", "shutil", "chdir"),
    *("NamedTemporaryFile", "TemporaryDirectory", "mkdtemp", "environ"),
}
"""Names with which a test writes files or environment variables that the program would read."""
_PATCHED = {"builtins.input", "sys.stdout"}
"""Targets that a test may patch."""


def unsupported(source: str, declared: Sequence[str]) -> str | None:
    """Returns the part of a test that is not supported here, or None.

    Example:
        >>> unsupported("def test_f(capsys):\\n    assert f() == 1", ["f"])
        'test_f takes capsys, a fixture of pytest'
    """
    tree = ast.parse(source)
    if used := sorted(_FILES & {*_words(tree)}):
        return f"it uses {used[0]}, and the program does not see its files"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _words(node.func)[-1:] == ["patch"]:
            target = ast.literal_eval(node.args[0]) if _is_text(node.args) else "an object"
            if target not in _PATCHED:
                return f"it patches {target}, which the program does not see"
        if isinstance(node, ast.ClassDef):
            bases = {each.id for each in node.bases if isinstance(each, ast.Name)}
            if program_bases := sorted(bases.intersection(declared)):
                return f"its class {node.name} is derived from the program's {program_bases[0]}"
        if isinstance(node, ast.FunctionDef) and any(_is_fixture(d) for d in node.decorator_list):
            return f"{node.name} is a fixture of pytest"
    for name in defined_tests(source):
        for decorators, node in _functions(tree, name):
            if missing := [each for each in _required(node) if each not in decorators]:
                return f"{node.name} takes {missing[0]}, a fixture of pytest"
    return None


def _words(tree: ast.AST) -> list[str]:
    nodes = list(ast.walk(tree))
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    return names + [node.attr for node in nodes if isinstance(node, ast.Attribute)]


def _is_text(arguments: Sequence[ast.expr]) -> bool:
    return isinstance(arguments[0] if arguments else None, ast.Constant)


def _functions(
    tree: ast.Module, name: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in _outside(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            tests = [each for each in node.body if isinstance(each, _FUNCTIONS)]
            yield from ((decorators, each) for each in tests if each.name.startswith("test"))
        elif isinstance(node, _FUNCTIONS) and node.name == name:
            yield "", node


def _is_fixture(decorator: ast.expr) -> bool:
    return "fixture" in ast.unparse(decorator)


def run_defined(source: str, names: dict[str, Any]) -> None:
    """Runs the tests that a source defines, unless it runs them itself."""
    used = _used(ast.parse(source))
    for name in defined_tests(source):
        tests = names.get(name)
        if isinstance(tests, type) and hasattr(tests, "assertEqual"):
            # Even if the source runs it too: a unittest runner does not raise if a test fails.
            _run_case(tests)
        elif isinstance(tests, type):
            if name not in used:
                _run_class(tests)
        elif tests is not None:
            _run(tests)


def is_script(source: str) -> bool:
    """Whether a source does more than call a test runner when it is run as a script.

    Example:
        >>> is_script("if __name__ == '__main__': unittest.main()")
        False
        >>> is_script("if __name__ == '__main__': check(f)")
        True
    """
    return _is_script(ast.parse(source))


def defined_tests(source: str) -> list[str]:
    """Returns the names of functions and classes that pytest would run, in order.

    The result contains no functions if the source calls one of them: it runs its tests itself then.

    Example:
        >>> defined_tests("def test_add():\\n    assert add(1, 2) == 3")
        ['test_add']
        >>> defined_tests("def test(): assert f()\\ntest()")
        []
    """
    tree = ast.parse(source)
    used = _used(tree)
    cases: set[str] = set()
    functions, classes = [], []
    for node in _outside(tree):
        if isinstance(node, ast.ClassDef):
            bases = {getattr(each, "attr", getattr(each, "id", "")) for each in node.bases}
            if bases & cases or any(each.endswith("TestCase") for each in bases):
                cases.add(node.name)
            runs_itself = node.name in used and not bases
            if node.name in cases or (node.name.startswith("Test") and not runs_itself):
                classes.append(node.name)
        elif isinstance(node, _FUNCTIONS) and node.name.startswith("test"):
            functions.append(node)
    if used & {each.name for each in functions}:
        functions = []
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    # A function that others use and that has required arguments is a helper.
    tests = [each.name for each in functions if not (each.name in read and _required(each))]
    return list(dict.fromkeys(tests + classes))


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _is_script(tree: ast.Module) -> bool:
    guards = [node for node in tree.body if _is_guard(node)]
    return any(not {"unittest", "pytest"} & {*_words(node)} for node in guards)


def _is_guard(node: ast.AST) -> bool:
    text = ast.unparse(node.test) if isinstance(node, ast.If) else ""
    return "__name__" in text and "__main__" in text


def _outside(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a module outside the bodies of functions and classes."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield from _outside(node)


def _used(tree: ast.Module) -> set[str]:
    runs_guards = _is_script(tree)
    body = [node for node in tree.body if runs_guards or not _is_guard(node)]
    nodes = _outside(ast.Module(body, []))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    return {each.id for each in names if isinstance(each.ctx, ast.Load)}


def _required(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    taken = [each.arg for each in function.args.args if each.arg not in ("self", "cls")]
    decorators = " ".join(map(ast.unparse, function.decorator_list))
    needed = taken[: len(taken) - len(function.args.defaults)]
    return [each for each in needed if each not in decorators and "patch" not in decorators]


def _run_case(case: Any) -> None:
    import unittest

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    if not result.wasSuccessful() or result.skipped:
        raise AssertionError(f"{len(result.failures) + len(result.errors)} tests fail")


def _run_class(tests: type[Any]) -> None:
    """Runs the methods of a class and of its bases, and the classes in it, as pytest does."""
    if tests.__init__ is not object.__init__:
        return
    _call(getattr(tests, "setup_class", None))
    members = {name: None for each in reversed(tests.__mro__) for name in vars(each)}
    for name in members:
        member = getattr(tests, name)
        if isinstance(member, type) and name.startswith("Test"):
            _run_class(member)
        elif name.startswith("test") and callable(member):
            instance = tests()
            method = getattr(instance, name)
            _call(getattr(instance, "setup_method", getattr(instance, "setup", None)), method)
            _run(method, getattr(tests, "pytestmark", []))


def _call(function: Any, *arguments: Any) -> None:
    if function is not None:
        function(*arguments[: len(inspect.signature(function).parameters)])


def _run(function: Callable[..., Any], marks: Sequence[Any] = ()) -> None:
    for arguments in _parameters([*marks, *getattr(function, "pytestmark", [])]):
        result = function(**arguments)
        if isinstance(result, CoroutineType):
            import asyncio

            asyncio.run(result)


def _parameters(marks: list[Any]) -> Iterator[dict[str, Any]]:
    first = next((index for index, mark in enumerate(marks) if mark.name == "parametrize"), None)
    if first is None:
        yield {}
        return
    mark = dict(zip(("argnames", "argvalues"), marks[first].args, strict=False))
    names, values = ({**mark, **marks[first].kwargs}[key] for key in ("argnames", "argvalues"))
    has_one_name = isinstance(names, str) and "," not in names
    names = [each.strip() for each in names.split(",")] if isinstance(names, str) else list(names)
    names = [each for each in names if each]
    for each in values:
        # `pytest.param` has several values, also for one name.
        is_parameter_set = type(each).__name__ == "ParameterSet"
        row = each.values if is_parameter_set else (each,) if has_one_name else each
        chosen = dict(zip(names, row, strict=True))
        for others in _parameters(marks[first + 1 :]):
            yield {**others, **chosen}
