"""Mistakes in recipes are reported with file and line, in any of several files."""

import copy
from pathlib import Path
from typing import Any

import click
import pytest
from flytekit.clis.sdk_in_container import run as pyflyte_run
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.interaction.click_types import JsonParamType

from nemo_rl_core.config.places import place_of
from tasks.cli.recipe.run_settings import changes_of
from tasks.local_run.command_help import patch_recipe_options
from tasks.recipes.common import Recipe, RecipeError
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.recipe_file import read_recipe
from tasks.recipes.sweep import SweepRecipe

HEADING = "the configuration is not valid:"
FIX = "  fix: change the named values"


def given_to_pyflyte(text: str, kind: type[Recipe] = GRPORecipe) -> Any:
    """Result of `pyflyte run ... --config TEXT` for its argument."""
    assert pyflyte_run is not None  # what a command of pyflyte has imported
    patch_recipe_options()
    parameter: Any = JsonParamType(kind)
    return parameter.convert(text, None, None)


def refused(text: str, kind: type[Recipe] = GRPORecipe) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        given_to_pyflyte(text, kind)
    lines = caught.value.message.splitlines()
    assert len(lines) <= 8
    return lines


def test_each_mistake_has_the_line_of_its_file_with_inheritance_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(
        "recipe: grpo_arithmetic\n"
        "generation:\n"
        "  temperature: -1\n"
        "environment:\n"
        "  kind: weighted_sum\n"
        "  parts:\n"
        "    - environment: {kind: exact}\n"
        "    - weigth: 2\n"
        "      environment: {kind: exact}\n"
    )
    mine = tmp_path / "mine.yaml"
    mine.write_text("recipe: base.yaml\ngrpo:\n\n  lerning_rate: 1\n\nseed: x\n")
    lines = refused("mine.yaml")
    assert (lines[0], lines[-1]) == (HEADING, FIX)
    assert sorted(line.split(" ")[2] + " " + line.split(" ")[3] for line in lines[1:-1]) == [
        "base.yaml:3: generation.temperature:",
        "base.yaml:8: environment.parts.1.weigth:",
        "mine.yaml:4: grpo.lerning_rate:",
        "mine.yaml:6: seed:",
    ]


def test_changes_are_named_with_their_own_location(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("seed: x\ngrpo:\n  learning_rate: a\n  num_iterations: b\n")
    Path("mine.yaml").write_text("recipe: base.yaml\ngrpo: {learning_rate: c}\nseed: 1\n")
    assert refused("mine.yaml")[1:-1] == [
        "  mine.yaml:2: grpo.learning_rate: Input should be a valid number (got 'c')",
        "  base.yaml:4: grpo.num_iterations: Input should be a valid integer (got 'b')",
    ]


def test_aliases_and_merges_are_named_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("x: &rate\n  learning_rate: a\ngrpo:\n  <<: *rate\n  seed: 3\n")
    values = read_recipe(path)
    assert values == {"x": {"learning_rate": "a"}, "grpo": {"learning_rate": "a", "seed": 3}}
    assert place_of(values, ("grpo", "learning_rate")) == f"{path}:2"
    assert place_of(values, ("grpo", "seed")) == f"{path}:5"
    assert place_of(values, ("grpo", "absent")) == f"{path}:3"
    assert place_of(values, ("absent",)) is None
    assert copy.deepcopy(values) == values


def test_arguments_of_the_command_line_are_named(tmp_path: Path) -> None:
    changes = changes_of(["grpo.learning_rate=.inf", "seed=x"])
    with pytest.raises(RecipeError) as caught:
        GRPORecipe.model_validate(changes)
    assert caught.value.message.splitlines()[1:-1] == [
        "  the argument seed=x: seed: Input should be a valid integer (got 'x')",
        "  the argument grpo.learning_rate=.inf: grpo.learning_rate: Input should be a finite "
        "number (got inf)",
    ]


def test_a_sweep_names_the_lines_of_its_base(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text("base:\n  grpo:\n    lerning_rate: 1\nover: {grpo.learning_rate: [1e-4]}\n")
    assert refused(str(path), SweepRecipe)[0] == f"{path}:3: unknown key 'base.grpo.lerning_rate'"


def test_contradictions_of_sections_are_named_with_the_other_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "cluster:\n  num_workers: 3\n  shape: one_gpu\n"
        "grpo:\n  num_generations_per_prompt: 1\n"
        "training: {tensor_parallel_size: x}\n"
    )
    lines = refused(str(path))
    entries = {line.split(" ")[2]: line for line in lines[1:-1]}
    assert entries.keys() == {f"{path}:1:", f"{path}:4:", f"{path}:6:"}
    # A separate contradiction has its four parts.
    path.write_text("cluster:\n  num_workers: 3\n  shape: one_gpu\n")
    lines = refused(str(path))
    assert lines[0].startswith(f"{path}:1: cluster: ")
    assert [line.split(":")[0] for line in lines[1:]] == ["  expected", "  got", "  fix"]


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan", "1e999"])
@pytest.mark.parametrize("key", ["grpo.learning_rate", "generation.temperature", "model.dtype"])
def test_invalid_numbers_are_refused_in_a_few_lines(tmp_path: Path, key: str, number: str) -> None:
    path = tmp_path / "mine.yaml"
    section, name = key.split(".")
    path.write_text(f"recipe: grpo_arithmetic\n{section}:\n  {name}: {number}\n")
    assert f"{path}:3: {key}: Input should be" in refused(str(path))[1]


@pytest.mark.parametrize("text", ['{"grpo": {"learning_rate": Infinity}}', '{"seed": NaN}'])
def test_json_of_the_command_line_is_named(text: str) -> None:
    assert refused(text)[0] == HEADING


@pytest.mark.parametrize(
    "key",
    [
        "loss.clip_high",
        "loss.dual_clip",
        "loss.importance.cap",
        "gate.max_sequence_mult_prob_error",
        "max_grad_norm",
    ],
)
def test_infinity_is_not_accepted_as_a_bound(tmp_path: Path, key: str) -> None:
    path = tmp_path / "mine.yaml"
    word = "\n".join(f"{'  ' * depth}{name}:" for depth, name in enumerate(key.split("."), 1))
    kind = "\n      kind: truncated" if "importance" in key else ""
    path.write_text(f"recipe: grpo_arithmetic\ngrpo:\n{word} .inf{kind}\n")
    recipe = given_to_pyflyte(str(path))
    entries = recipe.grpo
    for name in key.split("."):
        entries = getattr(entries, name)
    assert entries == float("inf")
    # As a task's input it stays what it is.
    context = FlyteContextManager.current_context()
    expected = TypeEngine.to_literal_type(GRPORecipe)
    literal = TypeEngine.to_literal(context, recipe, GRPORecipe, expected)
    assert TypeEngine.to_python_value(context, literal, GRPORecipe) == recipe


UNWRITABLE = {
    "2^64": ('{"grpo": {"num_steps_per_iteration": 18446744073709551616}}', "is too large"),
    "-2^64": ('{"seed": -18446744073709551616}', "seed is too large (got -1.84e+19)"),
    "10^400": (f'{{"seed": 1{"0" * 400}}}', "seed is too large (got over 300 digits)"),
    "half a pair": (
        r'{"model": {"name": "\ud800"}}',
        "model.name contains half of a surrogate pair",
    ),
    "3,000 levels": ('{"a":' * 3000 + "1" + "}" * 3000, "nested too deeply"),
    "no key of that name": ('{"recipe": "grpo_arithmetik"}', "did you mean 'grpo_arithmetic'?"),
    "a long name": ('{"recipe": "' + "x" * 5000 + '.yaml"}', "there is no recipe"),
    "a list": ("[1]", "Input should be a valid dictionary"),
}


@pytest.mark.parametrize("name", list(UNWRITABLE))
def test_values_that_records_cannot_store_are_refused(name: str) -> None:
    text, message = UNWRITABLE[name]
    with pytest.raises(click.ClickException) as caught:
        given_to_pyflyte(text)
    assert message in f"{type(caught.value).__name__} {caught.value.format_message()}"
    assert len(caught.value.format_message()) < 2500


def test_all_numbers_that_are_too_large_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f'seed: {2**64}\ngrpo:\n  num_iterations: {2**70}\nname: "\\ud800"\n')
    lines = refused(str(path))
    assert lines[1:4] == [
        f"  {path}:1: seed is too large (got 1.84e+19)",
        f"  {path}:3: grpo.num_iterations is too large (got 1.18e+21)",
        f"  {path}:4: name contains half of a surrogate pair (got '\\ud800')",
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("grpo:\n\tseed: 1\n", "base.yaml, line 2: this is not YAML"),
        ("- 1\n", "base.yaml is not a recipe"),
        (b"\x00\x01", "base.yaml is not YAML"),
        (b"\xff\xfe\x00", "base.yaml, line 1: the file is not in UTF-8"),
        ("recipe: base.yaml\n", "the base recipes form a circle"),
        ("recipe: absent.yaml\n", "base.yaml:1: there is no recipe 'absent.yaml'"),
    ],
)
def test_a_wrong_base_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | bytes, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    Path("mine.yaml").write_text("recipe: base.yaml\n")
    lines = refused("mine.yaml")
    assert said in lines[0]
