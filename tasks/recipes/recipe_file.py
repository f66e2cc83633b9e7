"""Reads and merges recipe files, and reports mistakes in a few lines."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from nemo_rl_core.algorithms.grpo.presets import PRESETS
from nemo_rl_core.config.names import closest_name
from nemo_rl_core.config.places import overlaid, place_of, without_keys
from nemo_rl_core.config.sections import dotted
from nemo_rl_core.errors import ConfigError
from tasks.recipes.yaml_document import (
    Placing,
    RecipeLoader,
    not_yaml,
    refuse_hostile,
    text_of,
    too_deep,
)

RECIPES = Path(__file__).resolve().parents[2] / "workflows" / "recipes"
_MAX_INTEGER: Final = 2**63


def read_recipe(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML or JSON file; an empty file is an empty mapping.

    Raises:
        ConfigError: If it is not a regular file of at most 1 MiB with one UTF-8 document, a mapping
            without repeated keys, cycles or integers of more than 64 bits.
    """
    text = text_of(path)
    try:
        root = yaml.compose(text, Loader=RecipeLoader)
        if root is not None:
            refuse_hostile(root, path)
        values = None if root is None else Placing(path).construct_document(root)
    except yaml.MarkedYAMLError as error:
        raise not_yaml(path, error) from error
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise ConfigError(f"{path} is not YAML", got=str(error).splitlines()[0]) from error
    except RecursionError as error:
        raise too_deep(path) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} is not a recipe",
            expected="a map of sections",
            got={"list": "a list", "str": "a text"}.get(kind := type(values).__name__, kind),
            fix="begin each line with the name of a section or setting, as in `seed: 1`",
        )
    refuse_unwritable(values)
    return values


def with_base(values: dict[str, Any], *, named: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Merges the values into those of the recipe that they name, if they name one.

    Args:
        values: Values of a recipe.
        named: The recipes that led to it, each of which names the next.
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
            got=name[:200] + ("" if path.is_absolute() else f", looked for in {Path.cwd()}"),
            fix=f"did you mean {meant!r}?" if meant else None,
        )
    if path.resolve() in named:
        raise ConfigError(
            "the base recipes form a circle",
            expected="a key `recipe` that leads to a recipe without one",
            got=" -> ".join(each.name for each in (*named, path)),
            fix=f"remove the key `recipe` from {path}, or name another",
        )
    base = with_base(read_recipe(path), named=(*named, path.resolve()))
    return _laid_over(base, without_keys(values, {"recipe"}))


def refuse_unwritable(values: Mapping[str, Any]) -> None:
    """Refuses all values that YAML and JSON allow and records cannot store.

    Raises:
        ConfigError: For integers of more than 64 bits, and halves of surrogate pairs in text.
    """
    wrong = list(_unwritable(values, (), values))
    if not wrong:
        return
    problem = "\n  ".join(wrong) if len(wrong) == 1 else "\n  ".join(["the recipe:", *wrong])
    raise ConfigError(
        problem,
        expected="integers of 64 bits, and text in Unicode",
        fix="correct the named values",
    )


def _laid_over(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merges mappings; other values are replaced, and so are mappings of another `kind`.

    A `training` section is also replaced if its `backend` changes, since backends have different
    settings.

    A preset counts as the fields that it sets: in the changes, it overrides the base.
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
    """Whether changes without a kind are meant for the existing section.

    `model: {name: ...}` is a pretrained model, so it replaces one of another kind; other fields
    without a kind change the model of the base recipe.
    """
    if key == "training":
        backend = old.get("backend", "dtensor")
        return bool(new.get("backend", backend) == backend)
    bare_name = key == "model" and "name" in new
    default_kind = "pretrained" if bare_name else old.get("kind")
    return bool(new.get("kind", default_kind) == old.get("kind", default_kind))


def _unwritable(value: Any, path: tuple[Any, ...], top: Any) -> Iterator[str]:
    if isinstance(value, Mapping | list):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _unwritable(item, (*path, key), top)
        return
    problem = None
    if isinstance(value, int) and not -_MAX_INTEGER <= value < _MAX_INTEGER:
        got = f"{float(value):.3g}" if abs(value) < 10**300 else "over 300 digits"
        problem = f"is too large (got {got})"
    elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        problem = f"contains half of a surrogate pair (got {value!r:.60})"
    if problem is not None:
        at = place_of(top, path)
        yield f"{at + ': ' if at else ''}{dotted(path)} {problem}"
