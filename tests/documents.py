"""Checks the blocks and links of README.md and docs/**/*.md.

A block's language decides how it is checked: `yaml` is a recipe, `python` runs, the commands of
`sh` must exist, `json` has one value per line, `text` is not checked. The line above the fence may
have a
mark: `<!-- compile only -->` (python: compiled, and its imports are run), `<!-- slow -->` (python:
    run by the slow tests, in a separate process), `<!-- not run -->` (sh: takes long or needs a
    cluster;
yaml: is not a recipe).
"""

import ast
import itertools
import json
import re
import shlex
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    import click

REPOSITORY = Path(__file__).resolve().parents[1]
LANGUAGES = ("json", "python", "sh", "text", "yaml")
MARKS = ("", "compile only", "not run", "slow")
OUR_PACKAGES = ("nemo_rl_core", "tasks", "workflows")
# Programs that a reader has besides this project.
PROGRAMS = frozenset(
    {"bash", "cat", "cd", "cp", "curl", "docker", "echo", "envsubst", "export", "flytectl", "git"}
    | {"head", "helm", "kubectl", "ls", "mkdir", "mlflow", "python3", "ray", "rm", "tensorboard"}
    | {"aws", "sbatch", "torchrun", "unset"}
)

_FENCE = re.compile(
    r"(?ms)^(?:[ \t]*<!-- (?P<mark>[^\n]*?) -->\n)?(?P<indent> *)```(?P<language>[^\n]*)\n"
    r"(?P<text>.*?)^(?P=indent)```[ \t]*$"
)
_LINK = re.compile(r"(?<!`)!?\[[^\]\n]*\]\(([^)\s]+)\)")
_PLACEHOLDER = re.compile(r"(^|/)[A-Z][A-Z_0-9]*([/.]|$)|…")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: Path of the page in the repository.
        line: Line of the fence.
        language: Language after the fence.
        mark: Text of the comment above the fence, or empty.
        text: Content of the block.
    """

    page: str
    line: int
    language: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Returns README.md and all hand-written pages."""
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def blocks_of(text: str, page: str = "page.md") -> list[Block]:
    """Returns the blocks of a page, in order."""
    return [
        Block(
            page=page,
            line=text[: match.start("indent")].count("\n") + 1,
            language=match["language"].strip(),
            mark=(match["mark"] or "").strip(),
            text=textwrap.dedent(match["text"]),
        )
        for match in _FENCE.finditer(text)
    ]


def all_blocks(*languages: str) -> list[Block]:
    """Returns the blocks of all pages, in these languages or in all."""
    return [
        block
        for page in pages()
        for block in blocks_of(page.read_text(), str(page.relative_to(REPOSITORY)))
        if not languages or block.language in languages
    ]


def prose(text: str) -> str:
    """Returns a page without its blocks."""
    return _FENCE.sub("", text)


def form_problems(block: Block) -> Iterator[str]:
    """Yields unknown languages and marks, and invalid JSON."""
    if block.language not in LANGUAGES:
        yield f"the language {block.language!r} is not one of {', '.join(LANGUAGES)}"
    if block.mark not in MARKS:
        yield f"the mark {block.mark!r} is not one of {', '.join(filter(None, MARKS))}"
    if block.language == "json":
        try:
            [json.loads(line) for line in block.text.splitlines() if line.strip()]
        except ValueError as error:
            yield f"not JSON: {error}"


def recipe_problem(text: str) -> str | None:
    """Returns why no pipeline accepts this recipe; None if one does.

    A recipe need not name its pipeline: it is checked against each pipeline that has all its
    sections.
    """
    import click
    from generate.pipelines import pipelines

    from nemo_rl_core.errors import NemoRLError
    from tasks.recipes.common import PipelineRecipe
    from tasks.recipes.recipe_file import with_base

    recipe = yaml.safe_load(text)
    if not isinstance(recipe, dict):
        return "a recipe is a map of sections"
    named = set(with_base(recipe))
    kinds = dict.fromkeys(each.recipe for each in pipelines())
    fitting = [kind for kind in kinds if named <= {*kind.model_fields}]
    if not fitting:
        return f"no pipeline's recipe has the sections {', '.join(sorted(named))}"
    problems = []
    for kind in fitting:
        try:
            accepted = kind.model_validate(recipe)
            if isinstance(accepted, PipelineRecipe):
                accepted.refuse_contradictions()
            return None
        except (NemoRLError, ValueError, click.ClickException) as error:
            problems.append(f"{kind.__name__}: {error}")
    return problems[0]


def shell_problems(text: str) -> Iterator[str]:
    """Yields syntax errors, and commands, options and files that do not exist."""
    parsed = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    if parsed.returncode:
        yield parsed.stderr.strip()
        return
    for line in text.replace("\\\n", " ").splitlines():
        for words in _commands(line):
            yield from command_problems(words)


def _commands(line: str) -> Iterator[list[str]]:
    """Yields the simple commands of a line, without leading assignments."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word.strip("|&;"):
            if words or not re.match(r"\w+=", word):
                words.append(word)
        elif words:
            yield words
            words = []


def command_problems(words: Sequence[str]) -> Iterator[str]:
    """Yields the problems of one command."""
    program, *arguments = words
    name = program.removeprefix(".venv/bin/")
    if name != program and not (Path(sys.executable).parent / name).exists():
        yield f"{program} does not exist"
    elif name == "make":
        yield from _make_problems(arguments)
    elif name == "nemo-rl":
        yield from _nemo_rl_problems(arguments)
    elif name == "pyflyte":
        yield from _pyflyte_problems(arguments)
    elif name == "python":
        yield from _python_problems(arguments)
    elif name == program and "/" not in program and name not in PROGRAMS:
        yield f"{program} is not a program that readers have"
    elif program.removeprefix("./") in ("deployment/register.sh", "deployment/images/build.sh"):
        yield from _script_problems(program, arguments)
    for word in words:
        yield from _path_problems(word.rpartition("=")[2])


def _make_problems(arguments: Sequence[str]) -> Iterator[str]:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = {
        target
        for line in re.findall(r"(?m)^([a-z][a-z0-9 -]*):(?!=)", makefile)
        for target in line.split()
    }
    variables = set(re.findall(r"(?m)^(\w+) \?=", makefile))
    for argument in arguments:
        variable, equals, _ = argument.partition("=")
        if variable not in (variables if equals else targets):
            yield f"make has no {'variable' if equals else 'target'} {variable!r}"


def _nemo_rl_problems(arguments: Sequence[str]) -> Iterator[str]:
    import click

    from workflows.cli import group

    command: click.Command = group
    name, words = "nemo-rl", list(arguments)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        subcommand = command.get_command(click.Context(command), words[0])
        if subcommand is None:
            yield f"{name} has no command {words[0]!r}"
            return
        command, name = subcommand, f"{name} {words.pop(0)}"
    options = {name for each in command.params for name in [*each.opts, *each.secondary_opts]}
    for word in words:
        option = word.partition("=")[0]
        if option.startswith("-") and option not in {*options, "--help"}:
            yield f"{name} has no option {option}"


def _pyflyte_problems(arguments: Sequence[str]) -> Iterator[str]:
    """Checks the options before and after the sub-command, and the inputs after the workflow."""
    import click
    from flytekit.clis.sdk_in_container.pyflyte import main

    command: click.Command = main
    name, options, words = "pyflyte", _options(main), iter(arguments)
    for word in words:
        option, equals, _ = word.partition("=")
        inside = REPOSITORY / word
        if option.startswith("-"):
            if option not in options:
                yield f"{name} has no option {option}"
            elif not equals and not options[option]:
                next(words, None)
        elif command is main:
            subcommand = main.get_command(click.Context(main), word)
            if subcommand is None:
                yield f"pyflyte has no command {word!r}"
                return
            command, name, options = subcommand, f"pyflyte {word}", _options(subcommand)
        elif word.startswith("workflows/") and inside.is_file():
            workflow = next(words, "")
            inputs = _inputs(inside, workflow)
            if inputs is None:
                yield f"{word} has no workflow {workflow!r}"
                return
            name = workflow
            options = {f"--{each}": False for each in inputs} | {"--help": True}


def _options(command: "click.Command") -> dict[str, bool]:
    """Returns the options of a command, and whether each is a flag."""
    flags = {"--help": True}
    for each in command.params:
        if each.param_type_name == "option":
            is_flag = getattr(each, "is_flag", False) or getattr(each, "count", False)
            flags |= dict.fromkeys([*each.opts, *each.secondary_opts], is_flag)
    return flags


def _inputs(file: Path, workflow: str) -> list[str] | None:
    """Returns the names of a workflow's inputs; None if the file has no such workflow."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == workflow:
            return [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
    return None


def _script_problems(program: str, arguments: Sequence[str]) -> Iterator[str]:
    """Yields unknown options of one of our scripts, whose first comment lists them."""
    comment = re.match(r"(#.*\n)+", (REPOSITORY / program).read_text())
    options = set(re.findall(r"--[a-z][a-z-]*", comment[0])) if comment else set()
    for word in itertools.takewhile("--".__ne__, arguments):
        if word.startswith("-") and word not in options:
            yield f"{program} has no option {word}"


def _python_problems(arguments: Sequence[str]) -> Iterator[str]:
    if arguments[:1] != ["-m"] or not arguments[1].startswith(OUR_PACKAGES):
        return
    path = REPOSITORY / arguments[1].replace(".", "/")
    files = [path.with_suffix(".py"), path / "__main__.py"]
    if not any(file.exists() for file in files):
        yield f"program {arguments[1]} does not exist"


def _path_problems(word: str) -> Iterator[str]:
    """Yields missing files of the repository; patterns and placeholders are allowed."""
    inside = re.match(r"(\./)?(deployment|docs|nemo_rl_core|tasks|tests|workflows|\.ci)/", word)
    if inside and not _PLACEHOLDER.search(word) and not any(REPOSITORY.glob(word)):
        yield f"{word} does not exist"


def link_problems(page: Path) -> Iterator[str]:
    """Yields broken relative links of a page; mkdocs checks those to generated pages."""
    for target in _LINK.findall(prose(page.read_text())):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or "reference/" in path:
            continue
        file = (page.parent / path).resolve() if path else page
        if file.name == "changelog.md":
            file = REPOSITORY / "CHANGELOG.md"
        if not file.exists():
            yield f"{target} does not exist"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
            yield f"{file.name} has no heading #{anchor}"


def anchors(text: str) -> set[str]:
    """Returns the ids that mkdocs and code hosts give to the headings of a page."""
    ids = set()
    for heading in re.findall(r"(?m)^#+ +(.*?)\s*$", prose(text)):
        plain = re.sub(r"[^\w\s-]", "", re.sub(r"[`*]", "", heading)).strip().lower()
        ids |= {re.sub(r"[-\s]+", "-", plain), re.sub(r"\s", "-", plain)}
    return ids


def python_failures(blocks: Sequence[Block]) -> dict[str, str]:
    """Runs blocks in one interpreter, and returns the traceback of each that fails.

    Args:
        blocks: Python blocks; those of one page share their names, in order.
    """
    failures: dict[str, str] = {}
    names: dict[str, dict[str, Any]] = {}
    for block in blocks:
        page_names = names.setdefault(block.page, {"__name__": "__main__"})
        try:
            code = compile(_run_of(block), str(block), "exec")
            exec(code, page_names)
        except Exception:  # noqa: BLE001 - whatever a block raises is its failure
            failures[str(block)] = traceback.format_exc(limit=-1)
    return failures


def _run_of(block: Block) -> ast.Module:
    """Returns the complete block, or only its imports of this project if it is only compiled."""
    tree = ast.parse(block.text)
    compile(tree, str(block), "exec")
    if block.mark == "compile only":
        tree.body = [
            node
            for node in tree.body
            if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OUR_PACKAGES))
            or (isinstance(node, ast.Import) and node.names[0].name.startswith(OUR_PACKAGES))
        ]
    return tree


if __name__ == "__main__":
    slow = [block for block in all_blocks("python") if block.mark == "slow"]
    sys.stdout.write(f"{json.dumps(python_failures(slow))}\n")
