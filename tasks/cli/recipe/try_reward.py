"""`nemo-rl try-reward`: score a few rows with a recipe's environment, before a run."""

from pathlib import Path

import click
import rich_click

from tasks.cli.recipe.run import complete_settings


@rich_click.command("try-reward")
@click.argument("recipe", shell_complete=complete_settings)
@click.option("-n", "num_rows", type=click.IntRange(min=1), default=5, show_default=True,
              help="Rows to score, from the start of the training rows.")  # fmt: skip
@click.option("--model", type=click.Path(path_type=Path),
              help="A folder with a model, to score its greedy completions too.")  # fmt: skip
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True,
              help="Maximum number of tokens of a sampled completion.")  # fmt: skip
def try_reward(recipe: str, num_rows: int, model: Path | None, max_new_tokens: int) -> None:
    """Score a few rows with the environment of a recipe, before anything trains.

    RECIPE is a YAML file, or the name of one of workflows/recipes. Each row is scored with its
    solution and its reference answer, with the solution of another row, without an answer, and,
    with --model, with the completion of the model. A multi-turn environment replies to the first
    turn. Exit code 1: something could not be scored.
    """
    from tasks.cli.recipe.reward_trial import run_trial, table

    trial = run_trial(recipe, num_rows=num_rows, model=model, max_new_tokens=max_new_tokens)
    click.echo(table(trial))
    if trial.num_failed:
        click.get_current_context().exit(1)
