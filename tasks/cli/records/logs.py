"""`nemo-rl logs`: the log of a run."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import click
import rich_click

from tasks.cli.records.names import complete_runs

_POLL_SECONDS = 0.5
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Sequences that color text or move the cursor, and control characters other than tab and line."""


@rich_click.command("logs")
@click.argument("run", required=False, shell_complete=complete_runs)
@click.option("--follow", "-f", is_flag=True, help="Print new lines until the run has ended.")
@click.option("--number", "-n", type=click.IntRange(min=0), default=40, show_default=True,
              help="How many of the last lines to print.")  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="Print all lines.")
@click.option("--grep", "pattern", metavar="REGEX", help="Only lines that match.")
def logs(
    run: str | None, *, follow: bool, number: int, everything: bool, pattern: str | None
) -> None:
    """Print the end of the log of RUN, by default of the latest run.

    RUN is the id of a run, or the beginning of one. The log has the output of libraries and
    workers; the lines that the run printed are not in it.

        nemo-rl logs -f
    """
    from nemo_rl_core.errors import NotRecordedError
    from nemo_rl_core.history.queries import History
    from nemo_rl_core.store.store import Store
    from tasks.cli.records.names import find_run

    matches = _matcher(pattern)
    with History(Store.default()) as history:
        execution = find_run(history, run)
        path = Path(execution.log_path)
        if not path.is_file():
            raise NotRecordedError(
                f"the log of {execution.id} is not on this machine", got=str(path)
            )
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            lines = [line for line in _lines(file) if matches.search(line)]
            for line in lines if everything else lines[len(lines) - number :]:
                click.echo(line)
            while follow:
                # The state first: the last lines are written before the end is recorded.
                history.sweep()
                is_running = history.execution(execution.id).state == "running"
                for line in _lines(file):
                    if matches.search(line):
                        click.echo(line)
                if not is_running:
                    return
                time.sleep(_POLL_SECONDS)


def _matcher(pattern: str | None) -> re.Pattern[str]:
    try:
        return re.compile(pattern or "")
    except re.error as error:
        raise click.BadParameter(f"{pattern!r} is not a regular expression: {error}") from error


def _lines(file: IO[str]) -> Iterator[str]:
    """Yields complete new lines without control characters; of redrawn text the last state."""
    start = file.tell()
    while (line := file.readline()).endswith("\n"):
        start = file.tell()
        drawn = line.rstrip("\r\n").rpartition("\r")[2]
        yield _ESCAPES.sub("", drawn)
    file.seek(start)  # a line whose end is not written yet
