"""A section without a kind changes the fields of the default kind."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from nemo_rl_core.algorithms.dpo.config import DPOConfig, SigmoidLoss
from nemo_rl_core.config.annotations import classes_of, tag_of
from nemo_rl_core.config.base import fields_of
from nemo_rl_core.errors import ConfigError
from tasks.cli.recipe.run_settings import changes_of
from tasks.recipes.common import Recipe, RecipeError
from tasks.recipes.distillation import DistillationRecipe
from tasks.recipes.dpo import DPORecipe
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.post_train import PostTrainRecipe
from tasks.recipes.recipe_file import read_recipe
from tests.unit.config.test_kept_types import configs


def default_kinds() -> list[tuple[type[BaseModel], str, FieldInfo]]:
    """Returns fields of all configs whose default is one of several variants."""
    return [
        (kind, name, field)
        for kind in configs()
        for name, field in kind.model_fields.items()
        if isinstance(field.default, BaseModel)
        and len([each for each in classes_of(field.annotation) if tag_of(each)]) > 1
        # `model: {name: ...}` is a pretrained model, whatever the default is.
        and name not in {"model", "teacher"}
    ]


def test_every_field_with_a_default_kind_takes_its_fields_without_the_kind() -> None:
    seen = set()
    for kind, name, field in default_kinds():
        tag = tag_of(type(field.default))
        assert tag is not None
        values = field.default.model_dump()
        del values[tag[0]]
        try:
            read = kind.model_validate({name: values})
        except ValidationError as error:  # for other fields, which the class requires
            assert name not in {each["loc"][0] for each in error.errors()}
            continue
        except ConfigError:  # such as a regression check, which requires a baseline
            continue
        assert type(getattr(read, name)) is type(field.default)
        seen.add(name)
    assert seen >= {"loss", "advantage", "divergence", "environment", "data", "pairs", "schedule"}


@pytest.mark.parametrize(
    ("recipe", "settings", "path", "expected"),
    [
        (DPORecipe, ["dpo.loss.beta=0.5"], "dpo.loss", {"kind": "sigmoid", "beta": 0.5}),
        (GRPORecipe, ["grpo.loss.kl.beta=0"], "grpo.loss", {"kind": "clipped"}),
        (GRPORecipe, ["data.num_train=99"], "data", {"kind": "arithmetic", "num_train": 99}),
        (PostTrainRecipe, ["pairs.margin=0.5"], "pairs", {"kind": "rollouts", "margin": 0.5}),
    ],
)
def test_one_field_is_enough(
    recipe: type[Recipe], settings: list[str], path: str, expected: dict[str, Any]
) -> None:
    read: Any = recipe.model_validate(changes_of(settings))
    for part in path.split("."):
        read = getattr(read, part)
    assert expected.items() <= read.model_dump().items()


def test_the_kind_of_a_preset_overrides_the_default() -> None:
    grpo = {"preset": "gdpo", "advantage": {"weights": [1.0, 0.1]}}
    advantage = GRPORecipe.model_validate({"grpo": grpo}).grpo.advantage
    assert advantage.model_dump() == {"kind": "gdpo", "weights": [1.0, 0.1]}


def test_python_calls_may_omit_the_kind_too() -> None:
    assert DPOConfig.model_validate({"loss": {"beta": 0.5}}).loss == SigmoidLoss(beta=0.5)


@pytest.mark.parametrize(
    ("recipe", "text", "line"),
    [
        (DPORecipe, "dpo:\n  loss: {gamma: 1}\n", "mine.yaml:2: .*'gamma' belongs to kind simpo"),
        (DPORecipe, "dpo:\n  loss:\n    betta: 1\n", "mine.yaml:3: .*did you mean 'beta'"),
        (DPORecipe, "dpo:\n  loss:\n    beta: x\n", "mine.yaml:3: dpo.loss.beta: .*valid number"),
        (
            DistillationRecipe,
            "distillation:\n  divergence: {weight: 0.1}\n",
            "mine.yaml:2: .*'weight' belongs to kind mixed",
        ),
        (GRPORecipe, "data: {train: a.jsonl}\n", "mine.yaml:1: .*'train' belongs to kind file or"),
    ],
)
def test_a_field_of_another_kind_is_named_with_that_kind(
    tmp_path: Path, recipe: type[Recipe], text: str, line: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        recipe.model_validate(read_recipe(path))
    pattern, message = line, " ".join(caught.value.message.split())
    assert re.search(pattern, message), message


def test_a_config_within_others_sets_the_kind_once() -> None:
    """Otherwise the schema would grow with each use, up to Python's recursion limit."""
    for _ in range(3):
        TypeAdapter(list[DPOConfig])
    schema, depth = fields_of(DPOConfig.__pydantic_core_schema__)["loss"]["schema"], 0
    while schema["type"] in {"default", "function-before"}:
        depth += schema["type"] == "function-before"
        schema = schema["schema"]
    assert depth == 1
