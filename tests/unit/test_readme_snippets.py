"""What the README shows of recipes can be run as it is printed there."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from nemo_rl_core.config.environment import EnvironmentConfig
from tasks.recipes.common import PipelineRecipe
from tasks.recipes.evaluate import EvaluateRecipe
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.sweep import SweepRecipe

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.M | re.S)
BLOCKS: list[str] = re.findall(r"^```yaml\n(.*?)^```$", README, re.M | re.S)
# `word: {…}` is a section of a recipe, and `{kind: …}` alone an environment.
SECTIONS = sorted(set(re.findall(r"`(\w+: \{[^`]*\})`", PROSE)))
ENVIRONMENTS = sorted(set(re.findall(r"`(\{kind: [^`]*\})`", PROSE)))
ADAPTER = TypeAdapter[Any](EnvironmentConfig)


def experiment_of(recipe: dict[str, Any]) -> type[PipelineRecipe | SweepRecipe]:
    """Of the kinds of recipes that are shown: only one has a baseline, and only one varies."""
    if "over" in recipe:
        return SweepRecipe
    return EvaluateRecipe if "baseline" in recipe else GRPORecipe


@pytest.mark.parametrize("text", [*BLOCKS, *SECTIONS])
def test_a_recipe_is_accepted(text: str) -> None:
    recipe = yaml.safe_load(text)
    accepted = experiment_of(recipe).model_validate(recipe)
    if isinstance(accepted, PipelineRecipe):
        accepted.refuse_contradictions()


@pytest.mark.parametrize("text", ENVIRONMENTS)
def test_an_environment_is_accepted(text: str) -> None:
    recipe = {"recipe": "grpo_arithmetic", "environment": yaml.safe_load(text)}
    GRPORecipe.model_validate(recipe).refuse_contradictions()


def test_every_environment_is_shown() -> None:
    kinds = set(ADAPTER.json_schema()["discriminator"]["mapping"])
    assert {yaml.safe_load(text)["kind"] for text in ENVIRONMENTS} == kinds
