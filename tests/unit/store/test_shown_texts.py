"""Texts that are only shown are not in a source's digest; all other code is."""

import ast
import logging
import pkgutil
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import nemo_rl_core
import tasks
from nemo_rl_core import errors
from nemo_rl_core.store import shown_texts
from nemo_rl_core.store.shown_texts import ERRORS, SHOWN_TO_MODELS
from nemo_rl_core.store.source_files import read_source

OF_PROJECT, OF_ENVIRONMENTS, OF_USER = "nemo_rl_core.any", "nemo_rl_core.environments.any", "mine"
NAMES = pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ("raise DataError('no rows', got=f'{n} rows')", "raise DataError('none', got='0')", True),
        ("raise errors.DataError('no rows')", "raise errors.DataError('none')", True),
        ("found = [ConfigError('one', fix='two')]", "found = [ConfigError('1', fix='2')]", True),
        ("class A(DataError): pass\nraise A('b')", "class A(DataError): pass\nraise A('c')", True),
        ("raise ValueError('not a number')", "raise ValueError(f'{text} is none')", True),
        ("assert x, 'no x'", "assert x, f'x is {x}'", True),
        ("_LOG.warning('%s is lost', name)", "_LOG.warning('lost: %s', name)", True),
        ("with waiting(f'reading {n}'): pass", "with waiting('reading'): pass", True),
        ("publish(Note('one'))", "publish(Note('two'))", True),
        (
            "StageResult('a', 'b', deck=f(x, 'one'))",
            "StageResult('a', 'b', deck=f(x, 'two'))",
            True,
        ),
        # Code that acts, not only texts:
        ("raise DataError('no rows')", "raise ConfigError('no rows')", False),
        ("raise DataError(next(rows))", "raise DataError(next(others))", False),
        ("raise KeyError('a')", "raise KeyError('b')", False),
        ("if x: raise DataError('a')", "if not x: raise DataError('a')", False),
        ("assert x, 'no x'", "assert y, 'no x'", False),
        ("_LOG.warning('%s', a)", "_LOG.error('%s', a)", False),
        ("x = logger.info('a')", "x = logger.info('b')", False),
        ("table.warning('a')", "table.warning('b')", False),
        ("StageResult('a', 'b', deck='c')", "StageResult('z', 'b', deck='c')", False),
        ("prompt = f'{a} + {b}'", "prompt = f'{a} plus {b}'", False),
        ("answer('a')", "answer('b')", False),
    ],
)


def digest(folder: Path, text: str, module: str) -> str:
    path = folder / "file.py"
    path.write_text(text)
    return read_source(path, module).digest


@NAMES
def test_shown_texts_do_not_count(tmp_path: Path, before: str, after: str, *, kept: bool) -> None:
    one, two = (digest(tmp_path, text, OF_PROJECT) for text in (before, after))
    assert (one == two) == kept


@NAMES
def test_all_texts_of_users_count(tmp_path: Path, before: str, after: str, *, kept: bool) -> None:
    del kept
    assert digest(tmp_path, before, OF_USER) != digest(tmp_path, after, OF_USER)


def test_a_python_error_counts_where_it_may_reach_a_model(tmp_path: Path) -> None:
    texts = ("raise ValueError('not a number')", "raise ValueError('no number')")
    assert len({digest(tmp_path, text, OF_ENVIRONMENTS) for text in texts}) == 2
    texts = ("assert x, 'a'", "assert x, 'b'")
    assert len({digest(tmp_path, text, OF_ENVIRONMENTS) for text in texts}) == 2
    texts = ("raise DataError('no rows')", "raise DataError('none')")
    assert len({digest(tmp_path, text, OF_ENVIRONMENTS) for text in texts}) == 1


def test_only_classes_of_the_errors_module_count(tmp_path: Path) -> None:
    def of(text: str) -> str:
        return digest(tmp_path, text, "nemo_rl_core.errors")

    before = of("class A(Exception):\n    def __str__(self): return 'a'\nclass B(A): pass\n")
    assert (
        of("class A(Exception):\n    def __str__(self): return 'b'\nclass B(A): pass\n") == before
    )
    assert of("class A(Exception): pass\nclass B(A, KeyError): pass\n") != before


def test_a_docstring_counts_if_it_is_used_as_a_value(tmp_path: Path) -> None:
    for use in ("PROMPT = __doc__", "x = tool.__doc__", "x = inspect.getdoc(tool)"):
        one, two = (digest(tmp_path, f'"""{text}."""\n{use}\n', OF_USER) for text in ("A", "B"))
        assert one != two, use
    one, two = (digest(tmp_path, f'"""{text}."""\nx = 1\n', OF_USER) for text in ("A", "B"))
    assert one == two


def test_names_of_modules_in_texts_are_still_references(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text("raise ConfigError('nemo_rl_core.types')\n")
    assert read_source(path, OF_PROJECT).strings == ["nemo_rl_core.types"]


USED_BY = {
    # Their texts end a run, count as a failed score, or are raised again.
    ("nemo_rl_core.environments.actor_pool", "RayActorError"),
    ("nemo_rl_core.environments.actor_pool", "RayTaskError"),
    ("nemo_rl_core.environments.interfaces", "(Exception, SystemExit)"),
    ("nemo_rl_core.environments.multi_turn.games", "(KeyError, TypeError, ValueError)"),
    ("nemo_rl_core.environments.multi_turn.replies", "(Exception, SystemExit)"),
    ("nemo_rl_core.environments.needs", "RewardError"),
    ("nemo_rl_core.environments.remote", "RewardError"),
    ("nemo_rl_core.rollouts.driver", "(Exception, SystemExit, asyncio.CancelledError)"),
    ("nemo_rl_core.rollouts.driver", "Exception"),
    ("nemo_rl_core.environments.rewards.awaiting", "(Exception, SystemExit)"),
    (
        "nemo_rl_core.environments.rewards.llm_judge",
        "(EndpointError, httpx.HTTPError, httpx.InvalidURL)",
    ),
    # Errors of programs that their tests see in the sandbox.
    ("nemo_rl_core.environments.rewards.code_checker.connection", "Exception"),
    ("nemo_rl_core.environments.rewards.code_checker.program", "(Exception, SystemExit)"),
    ("nemo_rl_core.environments.rewards.multiple_choice", "RewardError"),
    ("nemo_rl_core.environments.rewards.retries", "Exception"),
    (
        "nemo_rl_core.environments.rewards.unit_tests",
        "(SyntaxError, ValueError, ImportError, RecursionError, MemoryError)",
    ),
    ("nemo_rl_core.environments.rewards.weighted_sum", "RewardError"),
    ("nemo_rl_core.environments.tools.environment", "Exception"),
    ("nemo_rl_core.rollouts.episode", "DataError"),
    ("nemo_rl_core.rollouts.scorers", "DataError"),
    ("nemo_rl_core.rollouts.batch_stream", "BaseException"),
    ("nemo_rl_core.rollouts.stream", "BaseException"),
    ("nemo_rl_core.rollouts.stream", "Exception"),
    ("nemo_rl_core.rollouts.stream", "WorkerLostError"),
    # Programs in sandboxes, which import nothing of the project and raise none of its errors.
    ("nemo_rl_core.environments.rewards.code_checker.checker", "BaseException"),
    ("nemo_rl_core.environments.rewards.code_checker.checker", "BrokenTestError"),
    ("nemo_rl_core.environments.rewards.code_checker.program", "Exception"),
    ("nemo_rl_core.environments.rewards.code_checker.program", "_MissingNameError"),
    ("nemo_rl_core.environments.rewards.code_checker.row", "BrokenTestError"),
    (
        "nemo_rl_core.environments.rewards.math_worker",
        "(TooLargeError, MemoryError, RecursionError)",
    ),
    ("nemo_rl_core.environments.rewards.math_worker", "Exception"),
    ("nemo_rl_core.environments.sandbox.launcher", "BaseException"),
    ("nemo_rl_core.environments.sandbox.launcher", "Exception"),
    # The errors of the project end the conversation; what else a tool raises is an answer.
    ("nemo_rl_core.environments.tools.calling", "BaseException"),
    ("nemo_rl_core.environments.tools.calling", "TypeError"),
    ("nemo_rl_core.environments.tools.environment", "NemoRLError"),
    # An object that cannot be made fails its episode.
    ("nemo_rl_core.environments.tools.environment", "BaseException"),
    ("nemo_rl_core.environments.tools.mcp_source", "Exception"),
    ("nemo_rl_core.environments.tools.mcp_source", "MCPError"),
}
"""Handlers that use a caught error where a model could read it, other than raising another."""


def test_no_text_of_the_projects_errors_reaches_a_model() -> None:
    # One is raised for names in files of the store, which no tool or environment reads.
    of_values = {name for name in ERRORS if issubclass(getattr(errors, name), ValueError)}
    assert of_values == {"UnsafePathError"}
    uses = set()
    for package in SHOWN_TO_MODELS:
        for info in pkgutil.walk_packages(
            find_spec(package).submodule_search_locations, f"{package}."
        ):
            text = Path(find_spec(info.name).origin).read_text()
            assert "store.paths" not in text, info.name
            tree = ast.parse(text)
            handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
            uses |= {(info.name, ast.unparse(each.type)) for each in handlers if _uses_error(each)}
    assert uses == USED_BY, "look where the text of the error goes, then name the handler"


def _uses_error(handler: ast.ExceptHandler) -> bool:
    """Whether the handler uses its error other than in `raise`."""
    thrown = {
        id(part)
        for node in ast.walk(handler)
        if isinstance(node, ast.Raise)
        for part in ast.walk(node)
    }
    return any(
        isinstance(node, ast.Name) and node.id == handler.name and id(node) not in thrown
        for node in ast.walk(handler)
    )


def test_no_code_depends_on_the_text_of_an_error() -> None:
    allowed = {"virtual_cluster.py"}  # texts of Ray
    for package in (nemo_rl_core, tasks):
        for path in Path(package.__file__).parent.rglob("*.py"):
            if re.search(r'"\s+(?:not )?in str\((?:error|lost)\)', path.read_text()):
                assert path.name in allowed, path


def test_names_of_loggers_are_only_loggers() -> None:
    """`_LOG`, `_log` and `logger` are only names of loggers, whose results are not used."""
    for path in Path(nemo_rl_core.__file__).parent.rglob("*.py"):
        for line in path.read_text().splitlines():
            if re.match(r"(_LOG|_log|logger)\b.* = ", line):
                assert "logging.getLogger(" in line, path
    assert isinstance(logging.getLogger("any"), logging.Logger)


@pytest.mark.slow
def test_functions_that_show_texts_are_only_in_telemetry() -> None:
    """A function of the same name elsewhere could compute with its text."""
    for package in (nemo_rl_core, tasks):
        for path in Path(package.__file__).parent.rglob("*.py"):
            if "telemetry" in path.parts:
                continue
            tree = ast.parse(path.read_text())
            called = {
                shown_texts._name(node) for node in ast.walk(tree) if isinstance(node, ast.Call)
            }
            imported = {
                alias.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom)
                and str(node.module).startswith("nemo_rl_core.telemetry.")
                for alias in node.names
            }
            assert called & shown_texts._DISPLAYED <= imported, path


def test_no_other_class_has_the_name_of_a_project_error() -> None:
    for package in (nemo_rl_core, tasks):
        for path in Path(package.__file__).parent.rglob("*.py"):
            if path.name != "errors.py":
                named = re.findall(r"^\s*(?:class|def) (\w+)", path.read_text(), re.MULTILINE)
                assert not ERRORS & {*named}, path
