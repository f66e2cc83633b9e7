"""`pyflyte run FILE WORKFLOW --help` on one screen, with default recipes shown by name.

pyflyte prints a default as JSON, and a whole recipe fills three screens.
"""

import functools
import sys
from typing import Any

import click

from tasks.recipes.recipe import default_name

_RUN = "flytekit.clis.sdk_in_container.run"
_DEFAULT_VALUE = 5
"""Its index among the arguments of `to_click_option`."""


def show_recipes_by_name() -> None:
    """Wraps pyflyte's creation of options; no-op outside pyflyte and if repeated."""
    run: Any = sys.modules.get(_RUN)
    if run is not None and not hasattr(run.to_click_option, "__wrapped__"):
        run.to_click_option = _naming(run.to_click_option)


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
