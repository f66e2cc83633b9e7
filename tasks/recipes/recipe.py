"""Recipes: sparse YAML files, laid over one another, and refused in a few lines."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import click
from pydantic import ValidationError, ValidatorFunctionWrapHandler, model_validator

from nemo_rl_core.algorithms.grpo.presets import PRESETS
from nemo_rl_core.config.base import (
    FrozenConfig,
    collecting_contradictions,
    describe,
    refuse_unknown_keys,
)
from nemo_rl_core.config.names import closest_name
from nemo_rl_core.config.places import overlaid, place_of, without_keys
from nemo_rl_core.config.tracking import TrackingConfig
from nemo_rl_core.errors import ConfigError
from tasks.recipes.recipe_file import read_recipe, refuse_unwritable

RECIPES = Path(__file__).resolve().parents[2] / "workflows" / "recipes"


class RecipeError(click.ClickException):
    """A recipe that cannot be run, in the form that `pyflyte run` prints without a trace."""

    exit_code = 2


class Recipe(FrozenConfig):
    """Base of a workflow's input: whatever is wrong with it is said in a few lines.

    A key `recipe` names another recipe to begin with: one of `workflows/recipes` by its name, or a
    file. What stands beside it is laid over it, key by key: `{recipe: grpo_arithmetic, seed: 1}`.

    Attributes:
        recipe: Another recipe to begin with: the name of one of `workflows/recipes`, or a file.
        tracking: Where metrics go besides the run's own record.
    """

    shorthands: ClassVar[frozenset[str]] = frozenset({"recipe"})

    tracking: TrackingConfig = TrackingConfig()

    @property
    def experiments(self) -> "Sequence[Recipe]":
        """The recipes that are checked against this machine before anything starts."""
        return ()

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Self:
        try:
            with collecting_contradictions():
                if isinstance(value, dict):
                    value = with_base(value)
                    refuse_unwritable(value)
                    # First, since a recipe within a recipe (a sweep's) knows no path from the top.
                    refuse_unknown_keys(cls, value, handler)
                validated: Self = handler(value)
        except ValidationError as error:
            raise RecipeError(str(describe(error, value))) from error
        except ConfigError as error:
            raise RecipeError(str(error)) from error
        return validated


AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)

_default_names: dict[int, str] = {}
"""Names of the workflows' defaults, by the id of the recipe, which lives as long as its module."""


def default_recipe(kind: type[AnyRecipe], name: str) -> AnyRecipe:
    """The recipe `name` of `workflows/recipes` as a workflow's default.

    `pyflyte run ... --help` shows it by this name (see `tasks/platform/command_help.py`).
    """
    recipe = kind.model_validate({"recipe": name})
    _default_names[id(recipe)] = name
    return recipe


def default_name(value: object) -> str | None:
    """The name under which `default_recipe` made a recipe; None for everything else."""
    return _default_names.get(id(value))


def with_base(values: dict[str, Any], *, named: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values laid over those of the recipe that they name, if they do.

    Args:
        values: Of a recipe.
        named: The recipes that led to it, each of which names the next.

    Raises:
        ConfigError: If there is no such recipe, it cannot be read, or it leads back to itself.
    """
    if "recipe" not in values:
        return values
    name = str(values["recipe"])
    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES / f"{name}.yaml"
    if not os.path.isfile(path):  # noqa: PTH113  (takes names of any length)
        choices = sorted(recipe.stem for recipe in RECIPES.glob("*.yaml"))
        at = place_of(values, ("recipe",))
        meant = closest_name(name, choices)
        raise ConfigError(
            f"{at + ': ' if at else ''}there is no recipe {name[:200]!r}",
            expected=f"a .yaml file, or one of {', '.join(choices)}",
            got=f"{name[:200]}{_beside(path)}",
            fix=f"did you mean {meant!r}?" if meant else None,
        )
    if path.resolve() in named:
        raise ConfigError(
            "the recipes begin with each other",
            expected="a key `recipe` that leads to a recipe without one",
            got=" -> ".join(each.name for each in (*named, path)),
            fix=f"remove the key `recipe` from {path}, or name another",
        )
    base = with_base(read_recipe(path), named=(*named, path.resolve()))
    return _laid_over(base, without_keys(values, {"recipe"}))


def _beside(path: Path) -> str:
    """Where a relative name of a file was looked for."""
    return "" if path.is_absolute() else f", looked for in {Path.cwd()}"


def _laid_over(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Maps are merged; everything else is replaced, and so is a map of another `kind`.

    A preset stands for the fields that it sets: named in the changes, it wins over the base.
    """
    preset = PRESETS.get(str(changes.get("preset")), {})
    base = without_keys(base, {*preset})
    merged = overlaid(base, changes)
    for key, value in changes.items():
        old = base.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and _same_kind(key, old, value):
            merged[key] = _laid_over(old, value)
    return merged


def _same_kind(key: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether changes without a kind are meant for what is there.

    `model: {name: ...}` alone is a pretrained model, so it replaces one of another kind; other
    fields without a kind are changes of the model that the base recipe has.
    """
    bare_name = key == "model" and "name" in new
    unsaid = "pretrained" if bare_name else old.get("kind")
    return bool(new.get("kind", unsaid) == old.get("kind", unsaid))
