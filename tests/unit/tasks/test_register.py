"""`deployment/register.sh`, with a pyflyte that logs its arguments."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flytekit import LaunchPlan

from tests.commands import REPOSITORY

WHO = ["-c", "user.name=t", "-c", "user.email=t@example.com"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with the script, and with programs that replace those of the environment."""
    for name in ("deployment/register.sh", "workflows/launch_plans.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    write_config(tmp_path, "localhost:30080")
    write_program(tmp_path, "pyflyte", 'echo "pyflyte $*"')
    write_program(tmp_path, "python", "exit 0")  # which looks at the registry
    (tmp_path / ".gitignore").write_text(".venv/\n")
    for command in (["init", "-q"], ["add", "."], [*WHO, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def write_program(checkout: Path, name: str, line: str) -> None:
    program = checkout / ".venv" / "bin" / name
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/bin/sh\n{line}\n")
    program.chmod(0o755)


def write_config(checkout: Path, endpoint: str) -> None:
    (checkout / "flyte.yaml").write_text(f"admin:\n  endpoint: dns:///{endpoint}\n")


def ran(checkout: Path, *arguments: str, registry: str = "") -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "NEMO_RL_REGISTRY"}
    return subprocess.run(
        ["bash", "deployment/register.sh", *arguments],
        cwd=checkout,
        env=environment | ({"NEMO_RL_REGISTRY": registry} if registry else {}),
        capture_output=True,
        text=True,
        check=False,
    )


def registered(checkout: Path, *arguments: str) -> list[str]:
    done = ran(checkout, "--config", "flyte.yaml", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def version_in(lines: list[str]) -> str:
    match = re.search(r"^register: version (\S+) in ", lines[1])
    assert match, lines
    return match[1]


def test_the_version_covers_changed_and_new_files(checkout: Path) -> None:
    versions = [version_in(registered(checkout))]
    for name, text in [
        ("README.md", "changed"),
        ("my_reward.py", "one"),
        ("my_reward.py", "two"),
        ("a name.py", "two"),
    ]:
        (checkout / name).write_text(text)
        versions.append(version_in(registered(checkout)))
    assert len(set(versions)) == len(versions)
    assert version_in(registered(checkout)) == versions[-1]


def test_only_named_launch_plans_are_activated(checkout: Path) -> None:
    options = "--project", "p", "--domain", "production"
    plain = registered(checkout, *options)
    assert len(plain) == 2
    assert "--activate" not in plain[0]
    names = "nightly_collection", "weekly_evaluation"
    both = registered(
        checkout, *options, *(word for name in names for word in ("--activate", name))
    )
    assert both[:2] == plain
    assert both[2:] == [
        f"pyflyte --config flyte.yaml launchplan --project p --domain production --activate {name} "
        f"{version_in(plain)}"
        for name in names
    ]


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        (["--activate"], "none"),
        (["--activate", "--config", "flyte.yaml"], "--config"),
        (["--activate", "nightly"], "nightly"),
        (["--activate", "weekly_evaluation weekly_regression_check"], "weekly_evaluation weekly"),
    ],
)
def test_launch_plans_to_activate_must_be_named(
    checkout: Path, arguments: list[str], got: str
) -> None:
    from workflows import launch_plans

    refused = ran(checkout, *arguments)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--activate needs the name of a launch plan" in refused.stderr
    assert f"got: {got}" in refused.stderr
    plans = [name for name, plan in vars(launch_plans).items() if isinstance(plan, LaunchPlan)]
    assert f"expected: one of {' '.join(plans)}\n" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sideways"], "unknown option --sideways"),
        (["--config"], "--config needs a value"),
        (["--config", "nowhere.yaml"], "there is no configuration nowhere.yaml"),
        ([], "there is no configuration (none given)"),
    ],
)
def test_register_names_missing_requirements(
    checkout: Path, arguments: list[str], message: str
) -> None:
    refused = ran(checkout, *arguments)
    assert refused.returncode == 2
    assert message in refused.stderr


@pytest.mark.slow
def test_a_cluster_without_a_registry_is_refused(checkout: Path) -> None:
    write_program(checkout, "python", f'PYTHONPATH={REPOSITORY} exec {sys.executable} "$@"')
    assert registered(checkout)
    write_config(checkout, "flyte.example.com")
    refused = ran(checkout, "--config", "flyte.yaml")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "register: NEMO_RL_REGISTRY is not set, so pods on flyte.example" in refused.stderr
    assert "fix: export NEMO_RL_REGISTRY" in refused.stderr
    done = ran(checkout, "--config", "flyte.yaml", registry="registry.example/team")
    assert (done.returncode, done.stderr) == (0, "")
    assert "unused=registry.example/team/nemo-rl-unused:0" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--config", "flyte.yaml"], ["--package", "flow.tgz"]])
def test_a_private_key_is_not_registered(checkout: Path, words: list[str]) -> None:
    write_program(checkout, "python", f'PYTHONPATH={REPOSITORY} exec {sys.executable} "$@"')
    assert ran(checkout, *words).returncode == 0
    (checkout / "tls.pem").write_text("-----BEGIN PRIVATE" + " KEY-----\n")
    refused = ran(checkout, *words)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "register: files that would be uploaded with the code hold secrets" in refused.stderr
    assert "got: tls.pem (a private key)" in refused.stderr


def test_a_package_without_a_registry_prints_a_note(checkout: Path) -> None:
    done = ran(checkout, "--package", "flow.tgz")
    assert done.returncode == 0
    assert "NEMO_RL_REGISTRY is not set" in done.stderr
    assert ran(checkout, "--package", "flow.tgz", registry="registry.example").stderr == ""
