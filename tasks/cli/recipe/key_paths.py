"""Sections and keys of all recipes by their path, such as `grpo.loss`."""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import replace

from pydantic import BaseModel

import tasks.recipes
from nemo_rl_core.config.names import unknown_names
from tasks.cli.recipe.recipe_keys import Key, keys_of, tables
from tasks.recipes.common import Recipe

Kinds = tuple[type[BaseModel], ...]


def recipe_classes() -> Kinds:
    """Returns the class of every recipe."""
    for module in pkgutil.iter_modules(tasks.recipes.__path__):
        importlib.import_module(f"tasks.recipes.{module.name}")
    return tuple(_below(Recipe))


def top_keys() -> list[Key]:
    """Returns the keys at the top of recipes, each once."""
    keys = {key.path: key for kind in recipe_classes() for key in keys_of(kind)}
    return sorted(keys.values(), key=lambda key: key.path)


def keys_at(path: str) -> list[tuple[str, list[Key]]]:
    """Returns the keys of a section, or a single key.

    Returns:
        Pairs of a heading and keys: first those that all variants of the section have, with the
        empty heading, then those of each variant, such as `kind: clipped`.

    Raises:
        ConfigError: If no recipe has the path.
    """
    kinds, key = recipe_classes(), None
    names = path.split(".")
    for index, name in enumerate(names):
        keys = [each for kind in kinds for each in keys_of(kind)]
        by_name = {each.path: each for each in keys}
        if name not in by_name:
            where = f" in {'.'.join(names[:index])}" if index else ""
            raise unknown_names(
                f"there is no key{where}",
                [name],
                sorted(by_name),
                otherwise="`nemo-rl keys SECTION` lists the keys",
            )
        key = by_name[name]
        kinds = tuple(
            dict.fromkeys(kind for each in keys if each.path == name for kind in each.variants)
        )
    assert key is not None, "a path has at least one name"
    if not kinds:
        return [("", [replace(key, path=path)])]
    shown = [(": ".join(table.tag or ()), [*table.keys]) for table in tables(path, kinds)]
    return [(heading, keys) for heading, keys in shown if keys or heading]


def completions(incomplete: str) -> list[str]:
    """Returns the keys that begin with a text; those of sections end with a dot."""
    section, _, _ = incomplete.rpartition(".")
    keys = [key for _, keys in keys_at(section) for key in keys] if section else top_keys()
    words = [key.path + ("." if key.variants else "=") for key in keys]
    return sorted({word for word in words if word.startswith(incomplete)})


def _below(kind: type[Recipe]) -> Iterator[type[Recipe]]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)
