"""`nemo-rl plan`: what a recipe takes of its GPUs, before anything runs."""

import json
from pathlib import Path
from typing import Any

import click


@click.command("plan")
@click.argument("recipe")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--accelerator", metavar="NAME",
              help="The kind of GPU, such as nvidia-h100, or own for that of this machine; by "
              "default what the recipe names.")  # fmt: skip
@click.option("--model-config", type=click.Path(dir_okay=False, path_type=Path),
              help="The config.json of the model, where the hub cannot be reached.")  # fmt: skip
@click.option("--mean-tokens", type=click.FloatRange(min=0, min_open=True), metavar="NUMBER",
              help="Tokens of a completion on average; by default each is as long as it may "
              "be.")  # fmt: skip
@click.option("--pipeline", metavar="NAME",
              help="The pipeline that the recipe is for; by default the one that it or the recipe "
              "that it begins with is called after.")  # fmt: skip
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
    """Plan memory and speed of RECIPE on its GPUs, from the model's config.json alone.

    RECIPE is a YAML file or the name of one of workflows/recipes; KEY=VALUE changes one setting. No
    GPU and no weights are needed. What does not fit is named with the smallest change that does;
    the exit code is then 1, and where more GPU-hours are expected than `budget` allows.

        nemo-rl plan grpo_7b_8gpu training.activation_checkpointing=false
    """
    from tasks.cli.plan_table import as_mapping, as_table
    from tasks.cli.recipe_plan import planned
    from tasks.platform.gpu_hours import over_budget

    found = planned(
        recipe,
        settings,
        pipeline=pipeline,
        accelerator_name=accelerator,
        model_config=model_config,
        mean_tokens=mean_tokens,
    )
    if as_json:
        shown: dict[str, Any] = as_mapping(found)
        click.echo(json.dumps(shown, indent=1))
    else:
        click.echo(as_table(found))
    if found.problems or over_budget(found):
        raise SystemExit(1)
