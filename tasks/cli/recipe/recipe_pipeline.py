"""The pipeline of a recipe, and the refusal of recipes for other pipelines."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import ConfigError
from tasks.recipes.recipe_file import RECIPES, read_recipe

_SECTIONS = {"distill": "distillation"}
"""Sections of pipelines with another name."""


def _with_bases(recipe: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the names and values of a recipe and its base recipes; no values without a file."""
    seen = {""}
    while recipe not in seen:
        seen.add(recipe)
        path = Path(recipe) if recipe.endswith((".yaml", ".yml")) else RECIPES / f"{recipe}.yaml"
        values = read_recipe(path) if path.is_file() else {}
        yield recipe, values
        recipe = str(values.get("recipe", ""))


def pipeline_of(recipe: str, pipelines: Collection[str]) -> str:
    """Returns the pipeline of a recipe, from its name or that of its base recipe."""
    values: dict[str, Any] = {}
    for named, values in _with_bases(recipe):  # noqa: B007 (the values of the last one)
        stem = Path(named).stem
        fitting = [name for name in pipelines if stem == name or stem.startswith(f"{name}_")]
        if fitting:
            return max(fitting, key=len)
    sections = [name for name in pipelines if _SECTIONS.get(name, name) in values]
    # A supervised start is a part of other pipelines.
    sections = [name for name in sections if name != "sft"] or sections
    if len(sections) == 1:
        return sections[0]
    raise ConfigError(
        f"it is not clear which pipeline the recipe {recipe!r} is for",
        expected=f"a recipe named after one of {', '.join(pipelines)}",
        got=recipe,
        fix=f"rename it, such as to grpo_{Path(recipe).name}, or add --pipeline to nemo-rl plan",
    )


def keys_of(recipe: str) -> set[str]:
    """The top-level keys of a recipe and of its base recipes; empty without a file."""
    return {key for _, values in _with_bases(recipe) for key in values}


def is_shipped(recipe: str) -> bool:
    """Whether a recipe is one of `workflows/recipes`, by its name or its file."""
    if recipe.endswith((".yaml", ".yml")):
        return Path(recipe).resolve().parent == RECIPES
    return (RECIPES / f"{recipe}.yaml").is_file()


def refuse_other_pipeline(pipeline: str, recipe: str, pipelines: Collection[str]) -> None:
    """Refuses a recipe for another pipeline; one that is not clearly for any pipeline passes."""
    try:
        fitting = pipeline_of(recipe, pipelines)
    except ConfigError:
        return
    if fitting != pipeline:
        shipped = sorted(path.stem for path in RECIPES.glob(f"{pipeline}_*.yaml"))
        example = shipped[0] if shipped else f"{pipeline}.yaml"
        raise ConfigError(
            f"this is a recipe for `{fitting}`",
            expected=f"a recipe for `{pipeline}`, such as {example}",
            got=recipe,
            fix=f"nemo-rl run {fitting} {recipe}",
        )
