"""Prints the test files that a change can reach, for `make test-changed`.

A test file is reached when it, a helper or a fixture that it uses, or any module that these import
at any depth has changed. Imports are read, not run: those of functions, of registries
("module:Class") and of lazily importing packages count too. A test that starts a command reaches
what all workflows and commands reach. A changed file that is no module reaches the tests that name
it; one that every test depends on (requirements, pyproject.toml) reaches all.

    python tests/changed.py [BASE]     # what differs from BASE; HEAD unless given
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
    """Paths, from the root, of files that differ from a commit, untracked files among them."""
    commands = (
        ["git", "diff", "--name-only", "--no-renames", base, "--"],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    found: set[str] = set()
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        found |= set(done.stdout.splitlines())
    return sorted(found)


def reached_tests(changed: list[str]) -> list[str]:
    """Test files, from the root, that a change of these files can reach."""
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
    """The module that a file is, or the modules of the nearest package that a data file lies in."""
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


def _given_out(name: str) -> Iterator[str]:
    """The module behind a name that a package imports when it is asked for: `a.b.Name`."""
    package, _, name = name.rpartition(".")
    file = ROOT.joinpath(*package.split("."), "__init__.py")
    if package and file.is_file():
        module = read_source(file, f"{package}.__init__").lazy.get(name)
        if module is not None:
            yield f"{package}{module}" if module.startswith(".") else module


def _with_dependents(modules: set[str]) -> set[str]:
    """These modules and all that import them; a module that is gone has the dependents it names."""
    found = set(modules)
    for module in modules & _graph().modules:
        found |= _graph().find_downstream_modules(module)
        inner = _graph().find_descendants(module)  # importing a.b runs a/__init__.py
        found |= inner
        for each in inner:
            found |= _graph().find_downstream_modules(each)
    return found


def _reaches(test: str, modules: set[str], others: list[str]) -> bool:
    files, text = _texts(test)
    if any(_is_named(other, files, text) for other in others):
        return True
    if "rglob" in text and modules:  # it reads the sources themselves
        return True
    if _COMMAND.search(text) and any(each.startswith(("workflows.", "tasks.")) for each in modules):
        return True
    return not modules.isdisjoint(_mentioned(text))


def _is_named(file: str, files: frozenset[str], text: str) -> bool:
    folder = file.partition("/")[0]
    if folder == "tests":
        return file in files
    name = file if file.startswith(".") else Path(file).name
    return name in text or ("/" in file and f'"{folder}"' in text)


def _mentioned(text: str) -> set[str]:
    """The modules behind the dotted names of the project in a text."""
    found: set[str] = set()
    for name in _NAMED.findall(_joined_imports(text)):
        found |= {name, name.rpartition(".")[0], *_given_out(name)}
    return found


def _joined_imports(text: str) -> str:
    """The text, and `from a.b import c, d` as `a.b.c a.b.d` too."""
    joined = [text]
    for package, names in re.findall(r"from ([\w.]+) import (\([^)]*\)|[^\n(]+)", text):
        joined += [f"{package}.{name}" for name in re.findall(r"\w+", names)]
    return "\n".join(joined)


@cache
def _texts(test: str) -> tuple[frozenset[str], str]:
    """The files that a test file uses within `tests/`, and the parts of them that it uses."""
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
    """Nearest first: a fixture may use those of the folders above."""
    for folder in (ROOT / test).parents:
        if (folder / "conftest.py").is_file():
            yield folder / "conftest.py"
        if folder == ROOT / "tests":
            return


def _used_fixtures(conftest: Path, text: str) -> list[str]:
    """The definitions of a conftest that a text names, and those that these name in turn."""
    source = conftest.read_text()
    tree = ast.parse(source)
    found: dict[str, str] = {}
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
    known = imports | definitions | _constants(tree, source)
    waiting = [text, *always, *(part for part in definitions.values() if "autouse" in part)]
    while waiting:
        words = set(re.findall(r"\w+", waiting.pop()))
        for name in words & known.keys() - found.keys():
            found[name] = known[name]
            waiting.append(known[name])
    return list(found.values())


def _constants(tree: ast.Module, source: str) -> dict[str, str]:
    return {
        target.id: ast.get_source_segment(source, node) or ""
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _helpers(text: str) -> list[str]:
    """Files of `tests/` that a text imports."""
    found = [f"{name.replace('.', '/')}.py" for name in re.findall(r"\btests(?:\.\w+)+", text)]
    return [file for file in found if (ROOT / file).is_file()]


def main() -> None:
    """Prints one test file a line."""
    base = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    for test in reached_tests(changed_files(base)):
        sys.stdout.write(f"{test}\n")


if __name__ == "__main__":
    main()
