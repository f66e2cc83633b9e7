"""Prints the test files that a change can reach, for `make test-changed`.

A test file is reached when it, a helper or fixture that it uses, or any module that these import at
any depth has changed. Imports are read, not run: those of functions, of registries
("module:Class") and of lazily importing packages count too. A test that starts a command reaches
everything that workflows and commands reach. A changed file that is not a module reaches the tests
that name it; a file that every test depends on (requirements, pyproject.toml) reaches all.

    python tests/changed.py [BASE]     # tests reached by the changes since BASE (default: HEAD)
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp

from nemo_rl_core.store.source_files import read_source

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("nemo_rl_core", "tasks", "workflows")
OF_ALL_TESTS = ("pyproject.toml", "Makefile", "deployment/requirements/", "deployment/setup.sh")
_NAMED = re.compile(r"(?:nemo_rl_core|tasks|workflows)(?:\.\w+)+")
_COMMAND = re.compile(r"pyflyte|nemo-rl|\bmake\b.*\bgrpo\b|-m\", \"(?:tasks|nemo_rl_core)")


def changed_files(base: str) -> list[str]:
    """Returns the paths of files that differ from a commit, including untracked files."""
    commands = (
        ["git", "diff", "--name-only", "--no-renames", base, "--"],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    files: set[str] = set()
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        files |= set(done.stdout.splitlines())
    return sorted(files)


def reached_tests(changed: list[str]) -> list[str]:
    """Returns the test files that a change of these files can reach."""
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    if any(file.startswith(OF_ALL_TESTS) for file in changed):
        return tests
    modules = _with_dependents({each for file in changed for each in _modules_at(file)})
    others = [file for file in changed if not _is_module(file)]
    return [test for test in tests if _reaches(test, modules, others)]


def _is_module(file: str) -> bool:
    return file.endswith(".py") and file.partition("/")[0] in PACKAGES


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _modules_at(file: str) -> set[str]:
    """Returns the module of a file, or those of the nearest package that contains a data file."""
    if _is_module(file):
        return {_module(file)}
    folders = [folder for folder in Path(file).parents if (ROOT / folder / "__init__.py").is_file()]
    if file.partition("/")[0] not in PACKAGES or not folders:
        return set()
    return {_module(str(folders[0] / path.name)) for path in (ROOT / folders[0]).glob("*.py")}


@cache
def _graph() -> grimp.ImportGraph:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    for module in sorted(graph.modules):
        stem = ROOT.joinpath(*module.split("."))
        file = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
        source = read_source(file, f"{module}.__init__" if stem.is_dir() else module)
        registered = {each.partition(":")[0] for each in source.strings}
        given_out = {each for name in source.imports for each in _given_out(name)}
        for name in (registered | given_out) & graph.modules - {module}:
            graph.add_import(importer=module, imported=name)
    return graph


@cache
def _given_out(name: str) -> frozenset[str]:
    """Returns the module of a name that a package imports lazily: `a.b.Name`."""
    package, _, name = name.rpartition(".")
    file = ROOT.joinpath(*package.split("."), "__init__.py")
    if package and file.is_file():
        module = read_source(file, f"{package}.__init__").lazy.get(name)
        if module is not None:
            return frozenset({f"{package}{module}" if module.startswith(".") else module})
    return frozenset()


def _with_dependents(modules: set[str]) -> set[str]:
    """Returns the modules and all that import them; deleted modules keep their dependents."""
    dependents = set(modules)
    for module in modules & _graph().modules:
        dependents |= _graph().find_downstream_modules(module)
        inner = _graph().find_descendants(module)  # importing a.b runs a/__init__.py
        dependents |= inner
        for each in inner:
            dependents |= _graph().find_downstream_modules(each)
    return dependents


def _reaches(test: str, modules: set[str], others: list[str]) -> bool:
    files, text = _texts(test)
    if any(_is_named(other, files, text) for other in others):
        return True
    if "rglob" in text and modules:  # the test reads the sources themselves
        return True
    if _runs_commands(test) and any(each.startswith(("workflows.", "tasks.")) for each in modules):
        return True
    return not modules.isdisjoint(_mentioned(test))


@cache
def _runs_commands(test: str) -> bool:
    return _COMMAND.search(_texts(test)[1]) is not None


def _is_named(file: str, files: frozenset[str], text: str) -> bool:
    folder = file.partition("/")[0]
    if folder == "tests":
        return file in files
    name = file if file.startswith(".") else Path(file).name
    return name in text or ("/" in file and f'"{folder}"' in text)


@cache
def _mentioned(test: str) -> set[str]:
    """Returns the modules of the project that a test file and its helpers name."""
    _, text = _texts(test)
    mentioned: set[str] = set()
    for name in set(_NAMED.findall(_joined_imports(text))):
        mentioned |= {name, name.rpartition(".")[0], *_given_out(name)}
    return mentioned


def _joined_imports(text: str) -> str:
    """Returns the text with `from a.b import c, d` also written as `a.b.c a.b.d`."""
    joined = [text]
    for package, names in re.findall(r"from ([\w.]+) import (\([^)]*\)|[^\n(]+)", text):
        joined += [f"{package}.{name}" for name in re.findall(r"\w+", names)]
    return "\n".join(joined)


@cache
def _texts(test: str) -> tuple[frozenset[str], str]:
    """Returns the files in `tests/` that a test file uses, and the parts of them that it uses."""
    files, texts = {test}, [(ROOT / test).read_text()]
    for conftest in _conftests(test):
        used = "\n".join(texts)
        files.add(str(conftest.relative_to(ROOT)))
        texts += _used_fixtures(conftest, used)
    waiting = [*_helpers("\n".join(texts))]
    while waiting:
        helper = waiting.pop()
        if helper not in files:
            files.add(helper)
            texts.append((ROOT / helper).read_text())
            waiting += _helpers(texts[-1])
    return frozenset(files), "\n".join(texts)


def _conftests(test: str) -> Iterator[Path]:
    """Yields conftests, nearest first: a fixture may use those of the folders above."""
    for folder in (ROOT / test).parents:
        if (folder / "conftest.py").is_file():
            yield folder / "conftest.py"
        if folder == ROOT / "tests":
            return


def _used_fixtures(conftest: Path, text: str) -> list[str]:
    """Returns the conftest definitions that a text names, and those that they name in turn."""
    source = conftest.read_text()
    tree = ast.parse(source)
    used: dict[str, str] = {}
    imports = {
        alias.asname or alias.name: ast.unparse(node)
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    definitions = {
        node.name: ast.get_source_segment(source, node) or ""
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    always = [part for part in definitions.values() if part.startswith("def pytest_")]
    defined = imports | definitions | _constants(tree, source)
    waiting = [text, *always, *(part for part in definitions.values() if "autouse" in part)]
    while waiting:
        words = set(re.findall(r"\w+", waiting.pop()))
        for name in words & defined.keys() - used.keys():
            used[name] = defined[name]
            waiting.append(defined[name])
    return list(used.values())


def _constants(tree: ast.Module, source: str) -> dict[str, str]:
    return {
        target.id: ast.get_source_segment(source, node) or ""
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _helpers(text: str) -> list[str]:
    """Returns the files of `tests/` that a text imports."""
    files = [f"{name.replace('.', '/')}.py" for name in re.findall(r"\btests(?:\.\w+)+", text)]
    return [file for file in files if (ROOT / file).is_file()]


def main() -> None:
    """Prints one test file per line."""
    base = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    for test in reached_tests(changed_files(base)):
        sys.stdout.write(f"{test}\n")


if __name__ == "__main__":
    main()
