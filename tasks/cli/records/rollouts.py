"""`nemo-rl rollouts`: recorded rollouts of a training, by step."""

from typing import TYPE_CHECKING

import click
import rich_click

from tasks.cli.records.names import artifact_folder, complete_artifacts

if TYPE_CHECKING:
    from nemo_rl_core.rollouts.records import RolloutRecords


@rich_click.group()
def rollouts() -> None:
    """Show recorded rollouts of TRAINING: an artifact by its id, or its folder."""


@rollouts.command("list")
@click.argument("training", shell_complete=complete_artifacts)
def list_steps(training: str) -> None:
    """Print one line per step: rollouts, failures, and means of reward, tokens and turns."""
    from nemo_rl_core.rollouts.listing import listed

    click.echo(listed(_records(training)))


@rollouts.command("show")
@click.argument("training", shell_complete=complete_artifacts)
@click.option("--step", type=int, help="The last step by default.")
@click.option("--failed", is_flag=True, help="Only failed rollouts, with their errors.")
@click.option("--limit", type=click.IntRange(min=0), default=10, show_default=True,
              help="Maximum number of rollouts.")  # fmt: skip
def show_step(training: str, step: int | None, *, failed: bool, limit: int) -> None:
    """Print the rollouts of one step."""
    from nemo_rl_core.rollouts.listing import shown_step

    click.echo(shown_step(_records(training), step, failed=failed, limit=limit))


def _records(training: str) -> "RolloutRecords":
    from nemo_rl_core.errors import DataError
    from nemo_rl_core.rollouts.records import RolloutRecords

    folder = artifact_folder(training)
    records = RolloutRecords(folder / "rollouts" if (folder / "rollouts").is_dir() else folder)
    if not records.steps():
        raise DataError(
            f"{training!r} has no recorded rollouts",
            expected="the id or folder of a training that samples, such as grpo_iteration",
            got="a folder without step_*.parquet" if folder.is_dir() else "no such artifact",
            fix="nemo-rl runs RUN lists the artifacts of a run",
        )
    return records
