"""Recipes that are based on other recipes."""

from pathlib import Path

import pytest

from tasks.recipes.common import RecipeError, SFTTaskConfig
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.recipe_file import with_base


def test_only_named_fields_change() -> None:
    recipe = {"recipe": "grpo_arithmetic", "seed": 3, "grpo": {"loss": {"clip_low": 0.1}}}
    changed = GRPORecipe.model_validate(recipe)
    base = GRPORecipe.model_validate({"recipe": "grpo_arithmetic"})
    assert (changed.seed, changed.grpo.loss.clip_low) == (3, 0.1)
    assert changed.grpo.learning_rate == base.grpo.learning_rate
    assert changed.grpo.loss.kl == base.grpo.loss.kl
    assert changed.sft == base.sft


def test_a_map_of_another_kind_is_replaced(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("data: {kind: arithmetic, num_train: 7, num_validation: 5}")
    other = with_base({"recipe": str(base), "data": {"kind": "file", "train": "a.csv"}})
    assert other == {"data": {"kind": "file", "train": "a.csv"}}
    same = with_base({"recipe": str(base), "data": {"num_train": 9}})
    assert same == {"data": {"kind": "arithmetic", "num_train": 9, "num_validation": 5}}


def test_training_with_another_backend_is_replaced(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("training: {share_prefixes: true}")
    other = with_base({"recipe": str(base), "training": {"backend": "mine"}})
    assert other == {"training": {"backend": "mine"}}
    for same in ({"backend": "dtensor", "compile": True}, {"compile": True}):
        merged = with_base({"recipe": str(base), "training": same})
        assert merged == {"training": {"share_prefixes": True, **same}}


def test_a_bare_model_name_is_a_pretrained_model_not_a_new_name_for_the_old_one() -> None:
    changed = GRPORecipe.model_validate(
        {"recipe": "grpo_arithmetic", "model": {"name": "some/model"}}
    )
    assert (changed.model.kind, changed.model.name) == ("pretrained", "some/model")


def test_no_supervised_start_where_the_recipe_says_null() -> None:
    assert GRPORecipe.model_validate({"recipe": "grpo_arithmetic", "sft": None}).sft is None


def test_a_supervised_start_shows_the_tools_of_the_environment() -> None:
    calculator = {"kind": "tools", "tools": [{"kind": "calculator"}]}
    tasks = [
        {"task": "sums", "environment": calculator},
        {"task": "talk", "environment": {"kind": "exact"}},
    ]
    for environment, shown in (
        (calculator, {""}),
        ({"kind": "by_task", "tasks": tasks}, {"sums"}),
        ({"kind": "exact"}, set()),
    ):
        recipe = GRPORecipe.model_validate(
            {"recipe": "grpo_arithmetic", "environment": environment, "rollouts": {"max_turns": 2}}
        )
        config = SFTTaskConfig.of(recipe)
        assert set(config.tools) == shown
        assert all('"name": "calculator"' in tools for tools in config.tools.values())
        assert ("tools" in config.model_dump()) == bool(shown)


def test_an_unknown_recipe_lists_the_choices() -> None:
    with pytest.raises(RecipeError, match="no recipe 'grpo_arithmetik'") as caught:
        GRPORecipe.model_validate({"recipe": "grpo_arithmetik"})
    assert "grpo_arithmetic" in caught.value.message


def test_a_preset_overrides_the_base_recipe() -> None:
    values = {"preset": "dapo", "overlong": None, "num_steps_per_iteration": 7}
    recipe = GRPORecipe.model_validate({"recipe": "grpo_arithmetic", "grpo": values})
    # The base recipe has a penalty in the loss; DAPO has none, and it has other bounds.
    assert recipe.grpo.loss.kl is None
    assert recipe.grpo.loss.clip_high == 0.28
    # Fields outside of the preset stay as in the recipe.
    assert (recipe.grpo.learning_rate, recipe.grpo.num_steps_per_iteration) == (0.0005, 7)
