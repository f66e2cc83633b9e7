"""From the arguments of `nemo-rl plan` to the plan of a recipe."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.planning.accelerators import Accelerator, accelerator
from tasks.cli.pipelines import PIPELINES
from tasks.cli.recipe_pipeline import pipeline_of
from tasks.cli.run_settings import chosen_pipeline
from tasks.platform.gpu_plan import (
    ASSUMED,
    RecipePlan,
    accelerator_of,
    plan_recipe,
    read_model_config,
)
from tasks.recipes.common import PipelineRecipe


def planned(
    recipe: str,
    settings: Sequence[str],
    *,
    pipeline: str | None,
    accelerator_name: str | None,
    model_config: Path | None,
    mean_tokens: float | None = None,
) -> RecipePlan:
    """The plan of a recipe with changes; of a sweep, that of its first point.

    Raises:
        NemoRLError: If the recipe, the GPU or the model's config is not known, or the recipe has no
            GPU.
    """
    name = pipeline or pipeline_of(recipe)
    chosen = chosen_pipeline(name, [recipe, *settings], pipelines=PIPELINES)
    experiments = [each for each in chosen.recipe.experiments if isinstance(each, PipelineRecipe)]
    experiment = experiments[0]
    if not experiment.cluster.num_gpus:
        raise ConfigError(
            "the recipe uses no GPU, so that there is none to plan for",
            expected="cluster.shape: one_gpu, node_8gpu or cluster",
            got=f"cluster.shape: {experiment.cluster.shape}",
            fix=f"say which: nemo-rl plan {recipe} cluster.shape=one_gpu",
        )
    config = read_model_config(model_config) if model_config else None
    plan = plan_recipe(
        experiment,
        _gpu(experiment, accelerator_name),
        model_config=config,
        mean_completion_tokens=mean_tokens,
    )
    # That of a sweep is of all of its points.
    return replace(plan, max_gpu_hours=chosen.recipe.budget.max_gpu_hours)


def _gpu(recipe: PipelineRecipe, name: str | None) -> Accelerator:
    return accelerator(name) if name else accelerator_of(recipe) or ASSUMED
