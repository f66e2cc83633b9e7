"""`nemo-rl eval`: show an evaluation, or the changes between two."""

import click
import rich_click

from tasks.cli.records.names import artifact_folder, complete_artifacts


@rich_click.command("eval")
@click.argument("evaluation", shell_complete=complete_artifacts)
@click.argument("after", required=False, shell_complete=complete_artifacts)
@click.option("--number", "-n", type=click.IntRange(min=0), default=5, show_default=True,
              help="How many prompts to print.")  # fmt: skip
@click.option("--only", type=click.Choice(["right", "unscored", "wrong"]),
              help="Only completions with this verdict.")  # fmt: skip
@click.option("--mode", type=click.Choice(["greedy", "sampled"]), default="greedy",
              show_default=True, help="Which completions to print.")  # fmt: skip
def evaluate(evaluation: str, after: str | None, number: int, only: str | None, mode: str) -> None:
    """Print completions of an evaluation, or the changes between two.

    EVALUATION is an artifact by its id, its folder, or its rows.parquet. With AFTER, a later
    evaluation, the command prints the prompts that are correct in only one of the two.
    """
    from nemo_rl_core.evals.listing import change_lines, completion_lines, read_evaluation

    rows = read_evaluation(artifact_folder(evaluation))
    if after is None:
        lines = completion_lines(rows, number, mode=mode, only=only)
    else:
        lines = change_lines(rows, read_evaluation(artifact_folder(after)), number)
    for line in lines:
        click.echo(line)
