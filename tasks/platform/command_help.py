"""What pyflyte shows of recipes: default ones by name, and mistakes in files in a few lines.

pyflyte prints a default as JSON, of which a whole recipe fills three screens, and answers a slip of
YAML with a trace.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from nemo_rl_core.errors import ConfigError
from tasks.recipes.common import Recipe, RecipeError, default_name
from tasks.recipes.recipe_file import read_recipe

_RUN = "flytekit.clis.sdk_in_container.run"
_TYPES = "flytekit.interaction.click_types"
_DEFAULT_VALUE = 5
"""Its index among the arguments of `to_click_option`."""


def explain_recipes() -> None:
    """Wraps pyflyte's options and its reading of files; no-op outside pyflyte and if repeated."""
    run: Any = sys.modules.get(_RUN)
    if run is not None and not hasattr(run.to_click_option, "__wrapped__"):
        run.to_click_option = _naming(run.to_click_option)
        types: Any = sys.modules[_TYPES]
        types.JsonParamType._parse = _explaining(types.JsonParamType._parse)
        types.JsonParamType.convert = _keeping_places(types.JsonParamType.convert)


def _explaining(original: Any) -> Any:
    @functools.wraps(original)
    def parse(self: Any, value: Any, param: Any) -> Any:
        if not isinstance(value, str):
            return original(self, value, param)
        if value.lstrip()[:1] in ("{", "["):
            return _inline(lambda: original(self, value, param))
        is_recipe = value.endswith((".yaml", ".yml"))
        # Unlike `Path.exists`, this takes names of any length.
        if not is_recipe and not os.path.exists(value):  # noqa: PTH110
            return original(self, value, param)
        try:
            return read_recipe(Path(value))
        except ConfigError as error:
            raise RecipeError(f"Invalid value for '--config': {error}") from error

    return parse


def _inline(parse: Callable[[], Any]) -> Any:
    try:
        return parse()
    except ValueError as error:  # an integer of more than 4,300 digits
        raise RecipeError(f"the JSON of --config cannot be read: {error}") from error
    except RecursionError as error:
        raise RecipeError("the JSON of --config is nested too deeply\n  fix: correct it") from error


def _keeping_places(original: Any) -> Any:
    """A recipe is validated as it was read, since JSON knows neither lines nor infinity."""

    @functools.wraps(original)
    def convert(self: Any, value: Any, param: Any, ctx: Any) -> Any:
        kind = self._python_type
        if not (isinstance(kind, type) and issubclass(kind, Recipe)) or value is None:
            return original(self, value, param, ctx)
        parsed = self._parse(value, param)
        if not isinstance(parsed, dict):
            return original(self, value, param, ctx)
        return kind.model_validate(parsed, context={"deserialize": True})

    return convert


def _naming(original: Any) -> Any:
    @functools.wraps(original)
    def to_click_option(*args: Any) -> click.Option:
        option: click.Option = original(*args)
        name = default_name(args[_DEFAULT_VALUE])
        if name is not None:
            option.show_default = f"the recipe {name}"
            option.help = (
                "A recipe: a YAML or JSON file, or JSON, which may name another to begin with, as "
                'in {"recipe": "' + name + '", "seed": 1}. Recipes stand in workflows/recipes.'
            )
        return option

    return to_click_option
