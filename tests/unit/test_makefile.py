"""Arguments that `make` passes to a pipeline, from its dry run."""

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def made(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `make --dry-run` without variables of an outer `make`."""
    environment = {name: text for name, text in os.environ.items() if "MAKE" not in name}
    return subprocess.run(
        ["make", "--dry-run", *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("config", "argument"),
    [
        ("grpo_ci", "workflows/recipes/grpo_ci.yaml"),
        ("mine.yaml", "mine.yaml"),
        ('{"seed": 1, "grpo": {}}', '{"seed": 1, "grpo": {}}'),
    ],
)
def test_a_recipe_is_given_by_its_name_its_file_or_as_json(config: str, argument: str) -> None:
    last = made("grpo", f"CONFIG={config}").stdout.splitlines()[-1]
    assert last.endswith(f"pyflyte run workflows/grpo.py grpo --config '{argument}'")


@pytest.mark.parametrize("setting", ["seed=1", "grpo.learning_rate=1e-4"])
def test_a_setting_that_make_would_ignore_is_refused(setting: str) -> None:
    refused = made("grpo", setting)
    assert refused.returncode == 2
    assert f".venv/bin/nemo-rl run grpo {setting}." in refused.stderr
    assert refused.stdout == ""


def test_help_fits_into_80_columns_and_begins_with_what_users_need() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    names = [line.split()[1] for line in lines if line.startswith("  make ")]
    assert names[:3] == ["help", "setup", "grpo"]
    assert names.index("images") < names.index("test")
    assert len(names) == len(set(names))
