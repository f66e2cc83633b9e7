"""Changes pyflyte's output: defaults by name, short errors, and error boxes as wide as paths.

pyflyte prints a default as JSON, so that one recipe fills three screens, and reports a mistake in
YAML with a traceback. rich assumes 80 columns in a pipe or a file, and breaks paths in errors.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.cells import cell_len
from rich_click.rich_help_formatter import RichHelpFormatter

from nemo_rl_core.errors import ConfigError
from tasks.recipes.common import Recipe, RecipeError, default_name
from tasks.recipes.recipe_file import read_recipe

_RUN = "flytekit.clis.sdk_in_container.run"
_TYPES = "flytekit.interaction.click_types"
_DEFAULT_VALUE = 5
"""Its index among the arguments of `to_click_option`."""
_FRAME = 6
"""Columns of an error's box around its text, and of the space around it."""


def patch_recipe_options() -> None:
    """Wraps pyflyte's options for recipes and the parsing of their values.

    Does nothing outside of pyflyte, and nothing if repeated.
    """
    run: Any = sys.modules.get(_RUN)
    if run is not None and not hasattr(run.to_click_option, "__wrapped__"):
        run.to_click_option = _with_default_name(run.to_click_option)
        types: Any = sys.modules[_TYPES]
        types.JsonParamType._parse = _with_short_errors(types.JsonParamType._parse)
        types.JsonParamType.convert = _with_line_numbers(types.JsonParamType.convert)


def _with_short_errors(original: Any) -> Any:
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


def _with_line_numbers(original: Any) -> Any:
    """Validates a recipe as it was read, since JSON has neither line numbers nor infinity."""

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


def _with_default_name(original: Any) -> Any:
    @functools.wraps(original)
    def to_click_option(*args: Any) -> click.Option:
        option: click.Option = original(*args)
        name = default_name(args[_DEFAULT_VALUE])
        if name is not None:
            option.show_default = f"the recipe {name}"
            option.help = (
                "A recipe: a YAML or JSON file, or inline JSON. It may name a base recipe: "
                '{"recipe": "' + name + '", "seed": 1}. Recipes are in workflows/recipes.'
            )
        return option

    return to_click_option


def widen_error_boxes() -> None:
    """Wraps the part of rich-click that writes errors; no-op if repeated."""
    if not hasattr(RichHelpFormatter.write_error, "__wrapped__"):
        RichHelpFormatter.write_error = _with_wide_box(  # type: ignore[method-assign]
            RichHelpFormatter.write_error
        )


def _with_wide_box(original: Any) -> Any:
    @functools.wraps(original)
    def write_error(self: RichHelpFormatter, e: click.ClickException) -> None:
        if not sys.stderr.isatty():
            longest = max(map(cell_len, e.format_message().splitlines()), default=0)
            self.width = max(self.width, longest + _FRAME)
        original(self, e)

    return write_error
