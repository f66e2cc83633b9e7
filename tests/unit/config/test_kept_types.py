"""Configs refuse values of another type instead of converting them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from nemo_rl_core.algorithms.grpo.config import GRPOSettings
from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.registered import RegisteredBackend
from nemo_rl_core.errors import ConfigError
from tasks.cli.recipe.run_settings import changes_of
from tasks.recipes.common import RecipeError
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.recipe_file import read_recipe

VALUES = (True, False, 0, 1, 1.0, "1", "0.5", "true", "yes", "off")


def configs(base: type[FrozenConfig] = FrozenConfig) -> Iterator[type[FrozenConfig]]:
    """Returns every imported config class."""
    for kind in base.__subclasses__():
        if kind.__module__.startswith(("nemo_rl_core", "tasks")):
            yield kind
            yield from configs(kind)


def converted_values(field: FieldInfo) -> list[Any]:
    """Returns the values that pydantic converts to another type for a plain field."""
    annotation = Annotated[field.annotation, *field.metadata] if field.metadata else None
    adapter, numbers, converted = TypeAdapter(annotation or field.annotation), (int, float), []
    for value in VALUES:
        try:
            read = adapter.validate_python(value)
        except (ValidationError, ConfigError, RecipeError, TypeError):
            continue
        is_number = type(value) in numbers and type(read) in numbers
        is_scalar = type(read) in (bool, *numbers, str)
        if is_scalar and type(read) is not type(value) and not is_number:
            converted.append(value)
    return converted


def test_config_fields_never_convert_values() -> None:
    num_refused, accepted = 0, []
    # The class registered with a backend reads its section.
    for kind in {each for each in configs() if not issubclass(each, RegisteredBackend)}:
        for name, field in kind.model_fields.items():
            for value in converted_values(field):
                num_refused += 1
                try:
                    kind.model_validate({name: value})
                    accepted.append((kind.__name__, name, value))
                except ValidationError as error:
                    at = {item["loc"][0] for item in error.errors() if item["loc"]}
                    accepted += [] if name in at else [(kind.__name__, name, value)]
                except (RecipeError, ConfigError) as error:
                    accepted += [] if name in str(error) else [(kind.__name__, name, value)]
    assert accepted == []
    assert num_refused > 500, num_refused


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({"seed": True}, "seed", "integer"),
        ({"seed": "3"}, "seed", "integer"),
        ({"seed": 1.5}, "seed", "integer, got a number with a fractional part"),
        ({"grpo": {"max_grad_norm": True}}, "grpo.max_grad_norm", "number"),
        ({"grpo": {"loss": {"kl": {"beta": False}}}}, "grpo.loss.kl.beta", "number"),
        ({"grpo": {"keep_best": {"count": "1"}}}, "grpo.keep_best.count", "integer"),
        ({"evaluation": {"ks": [1, True]}}, "evaluation.ks.1", "integer"),
        ({"grpo": {"advantage": {"kind": "gdpo", "weights": ["1"]}}}, "weights.0", "number"),
        ({"training": {"deterministic": 1}}, "training.deterministic", "boolean"),
        ({"measure_base": "yes"}, "measure_base", "boolean"),
    ],
)
def test_a_recipe_names_each_value_of_another_type(
    values: dict[str, Any], path: str, expected: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        GRPORecipe.model_validate({**values, "cluster": {"num_workers": True}})
    assert f"{path}: Input should be a valid {expected} (got " in caught.value.message
    assert "cluster.num_workers: Input should be a valid integer (got True)" in caught.value.message


def test_settings_in_python_are_as_strict() -> None:
    with pytest.raises(ValidationError, match="valid integer"):
        GRPOSettings.model_validate({"seed": True})


def test_numbers_may_be_written_with_and_without_a_point() -> None:
    recipe = GRPORecipe.model_validate({"seed": 2.0, "grpo": {"max_grad_norm": 1}})
    assert (recipe.seed, type(recipe.seed)) == (2, int)
    assert recipe.grpo.max_grad_norm == 1.0


@pytest.mark.parametrize("text", ["yes", "true", "1:30:00", "0777", "00", "_1", "1.0.0"])
def test_yaml_1_1_numbers_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"grpo:\n  max_grad_norm: {text}\n")
    with pytest.raises(RecipeError, match=r"mine.yaml:2: grpo.max_grad_norm: .* valid number"):
        GRPORecipe.model_validate(read_recipe(path))
    with pytest.raises(RecipeError, match=r"grpo.max_grad_norm: .* valid number"):
        GRPORecipe.model_validate(changes_of([f"grpo.max_grad_norm={text}"]))


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("1E5", 1e5), (".5", 0.5), ("2", 2), ("-3", -3), ("1_000", 1000)],
)
def test_numbers_are_read_as_people_write_them(tmp_path: Path, text: str, value: float) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"a: {text}\n")
    assert read_recipe(path) == {"a": value}
    assert changes_of([f"a={text}"]) == {"a": value}


def test_an_integer_of_5000_digits_is_refused_in_a_few_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"seed: {'9' * 5000}\n")
    with pytest.raises(ConfigError, match="an integer of 5,000 digits") as caught:
        read_recipe(path)
    assert len(str(caught.value)) < 400
    with pytest.raises(ConfigError, match="the value of seed is not YAML") as caught:
        changes_of([f"seed={'9' * 5000}"])
    assert len(str(caught.value)) < 400
