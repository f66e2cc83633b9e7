"""Old names of settings and Python names work, with a warning at the user's line."""

import importlib
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.algorithms.grpo.config import Asynchronous
from nemo_rl_core.algorithms.grpo.trainer import GRPOTrainer
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.deprecations import MOVED, warn_renamed
from tasks.recipes.common import RecipeError
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.recipe_file import read_recipe

JUDGE = {"kind": "llm_judge", "judge": {"kind": "endpoint", "url": "http://a", "model": "b"}}
RENAMED = [
    ({"generation": {}}, "generation", "generate_timeout_seconds"),
    ({"generation": {"backend": "hf"}}, "generation", "generate_timeout_seconds"),
    ({"grpo": {"asynchronous": {}}}, "grpo.asynchronous", "step_timeout_seconds"),
    ({"environment": {"kind": "regex", "pattern": "x"}}, "environment", "match_timeout_seconds"),
    ({"environment": JUDGE}, "environment.judge", "reply_timeout_seconds"),
    ({"environment_workers": {}}, "environment_workers", "call_timeout_seconds"),
]
"""Sections of which a key was renamed, and its new name; the old one is `timeout_seconds`."""


def classes(kind: type[FrozenConfig] = FrozenConfig) -> set[type[FrozenConfig]]:
    return {kind, *(each for child in kind.__subclasses__() for each in classes(child))}


@pytest.mark.parametrize(("recipe", "path", "new"), RENAMED)
def test_an_old_key_sets_the_new_one(recipe: dict[str, Any], path: str, new: str) -> None:
    def with_key(key: str) -> Any:
        *outer, last = path.split(".")
        copy = section = {name: dict(value) for name, value in recipe.items()}
        for name in outer:
            section = section[name]
        section[last] = {**section[last], key: 3}
        return copy

    expected = GRPORecipe.model_validate(with_key(new))
    with pytest.warns(DeprecationWarning, match=f"^'timeout_seconds' is now called '{new}'") as got:
        assert GRPORecipe.model_validate(with_key("timeout_seconds")) == expected
    assert {each.filename for each in got} == {__file__}


def test_every_renamed_key_is_in_the_list_above() -> None:
    tables = {tuple(kind.renamed.items()) for kind in classes() if kind.renamed}
    assert tables == {(("timeout_seconds", new),) for _, _, new in RENAMED}
    for kind in classes():
        assert {*kind.renamed.values()} <= {*kind.model_fields}


def test_the_warning_names_file_and_line(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("seed: 1\ngeneration:\n  timeout_seconds: 7\n")
    with pytest.warns(DeprecationWarning) as seen:
        read = GRPORecipe.model_validate(read_recipe(recipe))
    assert read.generation.generate_timeout_seconds == 7
    assert [(each.filename, each.lineno) for each in seen] == [(str(recipe), 3)]


def test_other_mistakes_are_listed_without_the_old_name() -> None:
    values = {"generation": {"timeout_seconds": 7, "max_new_tokns": 3}}
    with pytest.raises(RecipeError, match=r"^unknown key 'generation\.max_new_tokns'"):
        GRPORecipe.model_validate(values)


def test_both_names_at_once_are_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("generation: {generate_timeout_seconds: 5,\n  timeout_seconds: 7}\n")
    with pytest.raises(RecipeError, match="former name of 'generate_timeout_seconds'") as caught:
        GRPORecipe.model_validate(read_recipe(recipe))
    assert f"{recipe}:2: 'timeout_seconds' is" in str(caught.value)
    assert str(caught.value).endswith(
        "remove 'timeout_seconds' and write its value as 'generate_timeout_seconds'"
    )


def test_an_old_name_in_python_warns_at_the_call() -> None:
    with pytest.warns(DeprecationWarning) as seen:
        trainer = GRPOTrainer.from_pretrained("a/model", timeout_seconds=3)
    assert trainer.settings.generation.generate_timeout_seconds == 3
    assert {each.filename for each in seen} == {__file__}
    with pytest.warns(DeprecationWarning, match="'step_timeout_seconds'"):
        config = Asynchronous.model_validate({"timeout_seconds": 3})
    assert config.step_timeout_seconds == 3


@pytest.mark.parametrize(
    ("module", "name", "target"),
    [(module, name, new) for module, names in MOVED.items() for name, new in names.items()],
)
def test_a_moved_name_is_the_new_one(module: str, name: str, target: str) -> None:
    new_module, _, attribute = target.partition(":")
    with pytest.warns(DeprecationWarning) as seen:
        old = getattr(importlib.import_module(module), name)
    assert old is getattr(importlib.import_module(new_module), attribute)
    assert str(seen[0].message).startswith(f"'{module}.{name}' is now called '{new_module}.")
    assert seen[0].filename == __file__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        importlib.import_module(module).nothing  # noqa: B018


def test_a_script_shows_the_warning_once(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "from tasks.platform.stage import make\n"
        "from nemo_rl_core.config.generation import VllmGenerationConfig\n"
        "for _ in range(2):\n"
        "    print(VllmGenerationConfig(timeout_seconds=3).generate_timeout_seconds)\n"
    )
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "3.0\n3.0\n"
    lines = [line for line in done.stderr.splitlines() if "Deprecation" in line]
    assert [line.partition(" Depr")[0] for line in lines] == [f"{script}:1:", f"{script}:4:"]


def test_the_same_line_of_two_files_warns_twice() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for file in ("one.yaml", "other.yaml", "one.yaml"):
            warn_renamed("same_line_old", "new", f"{file}:3")
    assert [each.filename for each in seen] == ["one.yaml", "other.yaml"]
