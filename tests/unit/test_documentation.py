"""README.md and docs/**/*.md: blocks pass their checks, commands exist and links resolve."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from generate import notebooks
from generate.pipelines import pipelines

from tests import documents
from tests.documents import (
    Block,
    all_blocks,
    anchors,
    blocks_of,
    form_problems,
    link_problems,
    python_failures,
    recipe_problem,
    shell_problems,
)

REPOSITORY = documents.REPOSITORY
SECTION = re.compile(r"`((\w+): \{[^`…]*\})`")
INLINE = re.compile(r"`((?:make|nemo-rl|\.venv/bin/[\w-]+) [^`…]+)`")


def test_every_block_has_a_known_language_and_mark() -> None:
    wrong = {str(block): list(form_problems(block)) for block in all_blocks()}
    assert {block: problems for block, problems in wrong.items() if problems} == {}


def test_recipes_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    recipes = [block for block in all_blocks("yaml") if block.mark != "not run"]
    wrong = {str(block): recipe_problem(block.text) for block in recipes}
    assert {block: problem for block, problem in wrong.items() if problem} == {}


def test_sections_within_a_line_are_accepted() -> None:
    sections = {name for each in pipelines() for name in each.recipe.model_fields}
    wrong = {}
    for page in documents.pages():
        for text, name in SECTION.findall(documents.prose(page.read_text())):
            if name in sections and (problem := recipe_problem(text)):
                wrong[f"{page.name}: {text}"] = problem
    assert wrong == {}


def test_commands_exist() -> None:
    wrong = {str(block): list(shell_problems(block.text)) for block in all_blocks("sh")}
    assert {block: problems for block, problems in wrong.items() if problems} == {}


def test_commands_within_a_line_exist() -> None:
    wrong = {}
    for page in documents.pages():
        for command in INLINE.findall(documents.prose(page.read_text())):
            if problems := list(shell_problems(command)):
                wrong[f"{page.name}: {command}"] = problems
    assert wrong == {}


def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process, which has imported torch; blocks that register something are `slow`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "store"))
    blocks = [block for block in all_blocks("python") if block.mark != "slow"]
    assert python_failures(blocks) == {}


@pytest.mark.slow
def test_slow_python_runs(tmp_path: Path) -> None:
    search = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "docs")])
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tests" / "documents.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": search,
            "NEMO_RL_HOME": str(tmp_path / "store"),
            "HF_HUB_OFFLINE": "1",  # downloads are refused at once
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {}


def test_links_resolve() -> None:
    wrong = {page.name: list(link_problems(page)) for page in documents.pages()}
    assert {page: problems for page, problems in wrong.items() if problems} == {}


def test_blocks_and_anchors_of_a_page_are_found() -> None:
    text = "a\n<!-- slow -->\n```python\nx = 1\n```\n\n- b\n\n  ```sh\n  make\n  ```\n"
    assert blocks_of(text) == [
        Block("page.md", 3, "python", "slow", "x = 1\n"),
        Block("page.md", 9, "sh", "", "make\n"),
    ]
    assert documents.prose(text) == "a\n\n\n- b\n\n\n"
    assert anchors("# A `b` c-d\n```sh\n# no heading\n```\n") == {"a-b-c-d"}


@pytest.mark.parametrize(
    ("fence", "problem"),
    [
        ("```\nx\n```", "the language ''"),
        ("```bash\nx\n```", "the language 'bash'"),
        ("<!-- later -->\n```sh\nx\n```", "the mark 'later'"),
        ('```json\n{"a": 1}\n{"a": \n```', "not JSON"),
    ],
)
def test_wrong_fences_are_reported(fence: str, problem: str) -> None:
    (block,) = blocks_of(fence)
    assert next(form_problems(block)).startswith(problem)


@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ("grpo: {lerning_rate: 1}", "lerning_rate"),
        ("gpro: {}", "no pipeline's recipe has the sections gpro"),
        ("grpo: {num_generations_per_prompt: 1}", "num_generations_per_prompt is 1"),
        ("generation: {temperature: 0}\ngrpo: {}", "must be sampled"),
        ("[1]", "a recipe is a map"),
    ],
)
def test_wrong_recipes_are_reported(recipe: str, problem: str) -> None:
    assert problem in (recipe_problem(recipe) or "")


@pytest.mark.parametrize(
    ("commands", "problem"),
    [
        ("make gpro", "make has no target 'gpro'"),
        ("make grpo CONFG=a.yaml", "make has no variable 'CONFG'"),
        (
            "make grpo CONFIG=workflows/recipes/none.yaml",
            "workflows/recipes/none.yaml does not exist",
        ),
        (".venv/bin/nemo-rl rnus", "nemo-rl has no command 'rnus'"),
        (".venv/bin/nemo-rl gc --keep 3", "nemo-rl gc has no option --keep"),
        (".venv/bin/pyflyte run workflows/grpo.py gpro", "workflows/grpo.py has no workflow"),
        (".venv/bin/nothing", ".venv/bin/nothing does not exist"),
        (".venv/bin/python -m nemo_rl_core.none", "program nemo_rl_core.none does not exist"),
        (".venv/bin/nemo-rl eval FOLDER --olny wrong", "nemo-rl eval has no option --olny"),
        (".venv/bin/nemo-rl rollouts shwo FOLDER", "nemo-rl rollouts has no command 'shwo'"),
        ("sleepwalk", "sleepwalk is not a program"),
        ("A=1 bash deployment/none.sh | cat  # x", "deployment/none.sh does not exist"),
        ("if true; then", "bash: line"),
    ],
)
def test_wrong_commands_are_reported(commands: str, problem: str) -> None:
    (reported,) = shell_problems(commands)
    assert reported.startswith(problem)


def test_right_commands_pass() -> None:
    text = """
    make grpo CONFIG=mine.yaml   # a comment
    FOO=1 .venv/bin/nemo-rl gc --keep-runs 20 --dry-run | head
    .venv/bin/pyflyte --config flyte.yaml run --remote workflows/grpo.py grpo --config '{"seed": 1}'
    .venv/bin/nemo-rl eval FOLDER -n 5 && .venv/bin/nemo-rl rollouts show FOLDER --step 3
    .venv/bin/python -m tasks.pods.images && ls deployment/ray/*.yaml docs/NAME.md
    """
    assert list(shell_problems(text)) == []


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (Block("a.md", 1, "python", "", "assert 1 == 2"), "AssertionError"),
        (Block("a.md", 1, "python", "compile only", "x = = 1"), "SyntaxError"),
        (
            Block("a.md", 1, "python", "compile only", "from nemo_rl_core.types import Rolout"),
            "ImportError",
        ),
    ],
)
def test_wrong_python_is_reported(block: Block, problem: str) -> None:
    assert problem in python_failures([block])["a.md:1"]


def test_blocks_of_a_page_share_their_names_and_pages_do_not() -> None:
    blocks = [
        Block("a.md", 1, "python", "", "x = 1"),
        Block("a.md", 2, "python", "", "assert x == 1"),
        Block("a.md", 3, "python", "compile only", "assert x == 2"),
        Block("b.md", 1, "python", "", "x"),
    ]
    assert list(python_failures(blocks)) == ["b.md:1"]


def test_wrong_links_are_reported(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# One heading\n")
    page.write_text("[a](other.md#one-heading) [b](other.md#two) [c](none.md) [d](https://x.y)\n")
    assert list(link_problems(page)) == ["other.md has no heading #two", "none.md does not exist"]


def test_every_page_is_in_the_navigation_once() -> None:
    """Mkdocs warns of pages missing from the navigation, but not of pages that are in it twice."""
    text = (REPOSITORY / "mkdocs.yml").read_text()
    named = Counter(re.findall(r"(?m)^ +- (?:Home: )?([\w/-]+\.md)$", text))
    docs = REPOSITORY / "docs"
    written = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} | {"changelog.md"}
    written |= set(notebooks.pages())
    assert written == set(named)
    assert set(named.values()) == {1}
    assert yaml.safe_load(text)["strict"] is True


def test_the_build_counts_warnings() -> None:
    """With `--quiet`, mkdocs drops warnings before it counts them, and a strict build passes."""
    (line,) = re.findall(r"(?m)^\t.* -m mkdocs build(.*)$", (REPOSITORY / "Makefile").read_text())
    assert line == ""
