"""The command itself: its list, its errors, and its imports."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tasks.cli import COMMANDS, GROUPS, LazyGroup
from workflows import cli

REPOSITORY = Path(__file__).resolve().parents[4]


def test_help_lists_every_command_and_imports_no_heavy_library() -> None:
    script = """
import json, sys
from workflows.cli import main
try:
    main()
finally:
    heavy = {"torch", "vllm", "ray", "flytekit", "pandas", "transformers", "pydantic"}
    print(json.dumps(sorted(heavy & set(sys.modules))), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "--help"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stderr.splitlines()[-1]) == []
    for name, (_, line) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line)} *$", done.stdout, re.MULTILINE), name
    headings = [line.strip(" :") for line in done.stdout.splitlines() if line[:1].isalpha()]
    assert [each for each in headings if each in GROUPS] == [*GROUPS]


def test_help_of_a_command_imports_no_model_library() -> None:
    script = """
import json, sys
from click.testing import CliRunner
from tasks.cli import COMMANDS
from workflows import cli
for name in COMMANDS:
    assert CliRunner().invoke(cli.group, [name, "--help"]).exit_code == 0, name
print(json.dumps(sorted({"torch", "vllm", "ray", "flytekit", "transformers"} & set(sys.modules))))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_entry_of_the_table_is_a_command_of_that_name(name: str) -> None:
    result = CliRunner().invoke(cli.group, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert f"Usage: nemo-rl {name} " in result.output
    command = cli.group.get_command(click.Context(cli.group), name)
    assert command is not None
    assert command.name == name


def test_a_misspelt_command_is_refused() -> None:
    result = CliRunner().invoke(cli.group, ["gcc"])
    assert result.exit_code == 2
    assert "Error: No such command 'gcc'. Did you mean 'gc'?" in result.output
    result = CliRunner().invoke(cli.group, ["nosuch"])
    assert "No such command 'nosuch'. `nemo-rl --help` lists the commands." in result.output


def test_the_version_is_that_of_the_project() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert CliRunner().invoke(cli.group, ["--version"]).output.endswith(f"version {version}\n")


def test_unknown_names_are_refused_before_the_imports_of_a_pipeline() -> None:
    script = """
import sys
from click.testing import CliRunner
from workflows import cli
for arguments in (["foo"], ["grpo", "nosuch"]):
    result = CliRunner().invoke(cli.group, ["run", *arguments])
    assert result.exit_code == 2
    print(result.output.splitlines()[0])
print(sorted({"torch", "vllm", "ray", "flytekit", "transformers", "pandas"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "Error: there is no pipeline 'foo'",
        "Error: there is no recipe 'nosuch'",
        "[]",
    ], done.stderr


def test_a_command_is_imported_when_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_hello.py").write_text(
        "import click\n@click.command()\ndef hello():\n    click.echo('hello')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    group = LazyGroup("x", {"A": {"hello": ("lazy_hello:hello", "Greet.")}}, "Help.")
    runner = CliRunner()
    assert "Greet." in runner.invoke(group, ["--help"]).output
    assert "lazy_hello" not in sys.modules
    assert runner.invoke(group, ["hello"]).output == "hello\n"
    assert isinstance(group.get_command(click.Context(group), "hello"), click.Command)


def test_an_explained_error_has_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from workflows.cli import main; main()", "verify", "grpo"],
        env={**os.environ, "NEMO_RL_HOME": str(tmp_path)},
        cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "Error: there is no artifact that begins with 'grpo'\n"
        "  expected: the name of one folder in the store's artifacts/, or its beginning\n"
        "  got: nothing of that name\n"
        "  fix: see `ls` of that folder, or `nemo-rl runs` for the artifacts of a run\n"
    )
