"""`nemo-rl rollouts`: recorded rollouts of a training, by step."""

from pathlib import Path

import click


@click.group()
def rollouts() -> None:
    """Show recorded rollouts: the folder `rollouts` of a training artifact."""


@rollouts.command("list")
@click.argument("folder", type=click.Path(path_type=Path))
def list_steps(folder: Path) -> None:
    """Print one line per step: rollouts, failures, and means of reward, tokens and turns."""
    from nemo_rl_core.rollouts.listing import listed
    from nemo_rl_core.rollouts.records import RolloutRecords

    click.echo(listed(RolloutRecords(folder)))


@rollouts.command("show")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="The last step by default.")
@click.option("--failed", is_flag=True, help="Only failed rollouts, with their errors.")
@click.option("--limit", type=click.IntRange(min=0), default=10, show_default=True,
              help="Maximum number of rollouts.")  # fmt: skip
def show_step(folder: Path, step: int | None, *, failed: bool, limit: int) -> None:
    """Print the rollouts of one step."""
    from nemo_rl_core.rollouts.listing import shown_step
    from nemo_rl_core.rollouts.records import RolloutRecords

    click.echo(shown_step(RolloutRecords(folder), step, failed=failed, limit=limit))
