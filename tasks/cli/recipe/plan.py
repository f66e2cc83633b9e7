"""`nemo-rl plan`: memory and speed of a recipe on its GPUs, before anything runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import rich_click

from nemo_rl_core.errors import ConfigError
from tasks.cli.pipelines import complete_pipelines, current_pipelines
from tasks.cli.recipe.run import complete_settings

if TYPE_CHECKING:
    from tasks.recipes.common import PipelineRecipe


@rich_click.command("plan")
@click.argument("recipe", shell_complete=complete_settings)
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_settings)
@click.option("--accelerator", metavar="NAME",
              help="The kind of GPU, such as nvidia-h100, or own for the one of this machine; by "
              "default what the recipe names.")  # fmt: skip
@click.option("--model-config", type=click.Path(dir_okay=False, path_type=Path),
              help="The config.json of the model, where the hub cannot be reached.")  # fmt: skip
@click.option("--mean-tokens", type=click.FloatRange(min=0, min_open=True), metavar="NUMBER",
              help="Mean number of tokens of a completion; by default all are as long as they may "
              "be.")  # fmt: skip
@click.option("--pipeline", metavar="NAME", shell_complete=complete_pipelines,
              help="Pipeline of the recipe; by default the one in the name of the recipe or of its "
              "base recipe.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    recipe: str,
    settings: tuple[str, ...],
    *,
    accelerator: str | None,
    model_config: Path | None,
    mean_tokens: float | None,
    pipeline: str | None,
    as_json: bool,
) -> None:
    """Plan memory and speed of RECIPE on its GPUs, from the model's config.json.

    RECIPE is a YAML file or the name of one of workflows/recipes; KEY=VALUE changes one setting.
    Neither GPUs nor weights are needed. For stages that do not fit, the smallest change that fits
    is printed. The exit code is 1 if a stage does not fit, or if more GPU-hours are expected than
    `budget` allows.

        nemo-rl plan grpo_7b_8gpu training.activation_checkpointing=false
    """
    from nemo_rl_core.planning.accelerators import accelerator as accelerator_named
    from tasks.cli.recipe.recipe_pipeline import pipeline_of
    from tasks.cli.recipe.run_settings import chosen_pipeline
    from tasks.planning.gpu_hours import over_budget
    from tasks.planning.gpu_plan import ASSUMED, accelerator_of, plan_recipe, read_model_config
    from tasks.planning.plan_table import as_mapping, as_table

    pipelines = current_pipelines()
    name = pipeline or pipeline_of(recipe, pipelines)
    chosen = chosen_pipeline(name, [recipe, *settings], pipelines=pipelines).recipe
    experiment = chosen.experiments[0]  # of a sweep, its first point
    _refuse_without_gpus(experiment, recipe)
    recipe_plan = plan_recipe(
        experiment,
        accelerator_named(accelerator) if accelerator else accelerator_of(experiment) or ASSUMED,
        model_config=read_model_config(model_config) if model_config else None,
        mean_completion_tokens=mean_tokens,
    )
    # The budget of a sweep is for all of its points.
    recipe_plan = replace(recipe_plan, max_gpu_hours=chosen.budget.max_gpu_hours)
    if as_json:
        click.echo(json.dumps(as_mapping(recipe_plan), indent=1))
    else:
        click.echo(as_table(recipe_plan))
    if recipe_plan.problems or over_budget(recipe_plan):
        raise SystemExit(1)


def _refuse_without_gpus(experiment: "PipelineRecipe", recipe: str) -> None:
    if not experiment.cluster.num_gpus:
        raise ConfigError(
            "the recipe uses no GPU, so there is nothing to plan",
            expected="cluster.shape: one_gpu, node_8gpu or cluster",
            got=f"cluster.shape: {experiment.cluster.shape}",
            fix=f"name one: nemo-rl plan {recipe} cluster.shape=one_gpu",
        )
