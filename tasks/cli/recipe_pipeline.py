"""The pipeline that a recipe is for, and recipes that are given to another one."""

from pathlib import Path

from nemo_rl_core.errors import ConfigError
from tasks.cli.pipelines import PIPELINES
from tasks.recipes.recipe_file import RECIPES, read_recipe


def pipeline_of(recipe: str) -> str:
    """The pipeline of a recipe, by its name or by that of the recipe that it begins with.

    Raises:
        ConfigError: If neither is called after a pipeline.
    """
    named, seen = recipe, set()
    while named not in seen:
        seen.add(named)
        stem = Path(named).stem
        fitting = [name for name in PIPELINES if stem == name or stem.startswith(f"{name}_")]
        if fitting:
            return max(fitting, key=len)
        path = Path(named) if named.endswith((".yaml", ".yml")) else RECIPES / f"{named}.yaml"
        values = read_recipe(path) if path.is_file() else {}
        named = str(values.get("recipe", named))
        sections = [name for name in PIPELINES if name in values]
        if named in seen and len(sections) == 1:
            return sections[0]
    raise ConfigError(
        f"it is not clear which pipeline the recipe {recipe!r} is for",
        expected=f"a recipe called after one of {', '.join(PIPELINES)}",
        got=recipe,
        fix=f"name the pipeline: nemo-rl plan {recipe} --pipeline grpo",
    )


def keys_of(recipe: str) -> set[str]:
    """The top-level keys of a recipe and of those that it begins with; none where no file is."""
    found: set[str] = set()
    named, seen = recipe, {""}
    while named not in seen:
        seen.add(named)
        path = Path(named) if named.endswith((".yaml", ".yml")) else RECIPES / f"{named}.yaml"
        values = read_recipe(path) if path.is_file() else {}
        found |= {*values}
        named = str(values.get("recipe", ""))
    return found


def is_shipped(recipe: str) -> bool:
    """Whether a recipe is one of `workflows/recipes`, by its name or its file."""
    if recipe.endswith((".yaml", ".yml")):
        return Path(recipe).resolve().parent == RECIPES
    return (RECIPES / f"{recipe}.yaml").is_file()


def refuse_of_another_pipeline(pipeline: str, recipe: str) -> None:
    """Refuses a recipe that is for another pipeline; one that is not clearly for any passes.

    Args:
        pipeline: That it is given to.
        recipe: A YAML file, or the name of one of `workflows/recipes`.

    Raises:
        ConfigError: With the command that runs it.
    """
    try:
        own = pipeline_of(recipe)
    except ConfigError:
        return
    if own != pipeline:
        raise ConfigError(
            f"this is a recipe for `{own}`",
            expected=f"a recipe for `{pipeline}`, such as {_example(pipeline)}",
            got=recipe,
            fix=f"nemo-rl run {own} {recipe}",
        )


def _example(pipeline: str) -> str:
    shipped = sorted(path.stem for path in RECIPES.glob(f"{pipeline}_*.yaml"))
    return shipped[0] if shipped else f"{pipeline}.yaml"
