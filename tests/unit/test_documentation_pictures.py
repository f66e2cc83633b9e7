"""The curves of the documentation: recipes that are accepted, and pictures of the stored values."""

import json

import pytest
import yaml
from generate import curves

from tests.documents import recipe_problem


@pytest.mark.parametrize("name", curves.RECIPES)
def test_recipes_are_accepted(name: str) -> None:
    assert recipe_problem(yaml.safe_dump(curves.recipe_of(name))) is None


def test_changes_of_a_recipe_keep_the_rest_of_a_section() -> None:
    recipe = curves.recipe_of("learning rate 0.005")
    grpo = {"num_iterations": 1, "num_steps_per_iteration": 40, "learning_rate": 0.005}
    assert recipe["grpo"] == grpo
    assert recipe["sft"] == curves.BASE["sft"]


def test_pictures_show_the_stored_values() -> None:
    """Draw them again after a run: `docs/generate/curves.py`."""
    values = json.loads(curves.VALUES.read_text())
    assert values.keys() == {*curves.RECIPES}
    for name, text in curves.drawn(values).items():
        assert (curves.PICTURES / name).read_text() == text
