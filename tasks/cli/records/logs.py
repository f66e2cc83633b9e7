"""`nemo-rl logs`: the log of a run."""

import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import click
import rich_click

from tasks.cli.records.names import complete_runs, refuse_ignored

_POLL_SECONDS = 0.5
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Sequences that color text or move the cursor, and control characters other than tab and line."""
_RECORD = re.compile(r"(?:\([\w :=.-]+\) )?(?:\d{4}-\d\d-\d\d [\d:,]{12} )?([A-Z]+) [\d: -]+(\w*)")
"""Start of a record: its level, and the package of its logger."""


@rich_click.command("logs")
@click.argument("run", required=False, shell_complete=complete_runs)
@click.option("--follow", "-f", is_flag=True, help="Print new lines until the run has ended.")
@click.option("--number", "-n", type=click.IntRange(min=0), default=40, show_default=True,
              help="How many of the last lines to print.")  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="Print all lines, also flytekit's.")
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

    if everything:
        refuse_ignored("--all", "number")
    is_shown = _Shown(pattern, everything=everything)
    last = None if everything else number
    with History(Store.default()) as history:
        execution = find_run(history, run)
        path = Path(execution.log_path)
        if not path.is_file():
            raise NotRecordedError(
                f"the log of {execution.id} is not on this machine", got=str(path)
            )
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for line in deque((line for line in _lines(file) if is_shown(line)), maxlen=last):
                click.echo(line)
            if is_shown.num_hidden:
                note = f"{is_shown.num_hidden} lines of flytekit are not shown; --all prints them"
                click.echo(note, err=True)
            while follow:
                # The state first: the last lines are written before the end is recorded.
                history.sweep()
                is_running = history.execution(execution.id).state == "running"
                for line in _lines(file):
                    if is_shown(line):
                        click.echo(line)
                if not is_running:
                    return
                time.sleep(_POLL_SECONDS)


class _Shown:
    """Whether a line matches, and is not part of a record that flytekit logs about each value."""

    def __init__(self, pattern: str | None, *, everything: bool) -> None:
        try:
            self._pattern = re.compile(pattern or "")
        except re.error as error:
            raise click.BadParameter(f"{pattern!r} is not a regular expression: {error}") from error
        self._everything, self._is_noise, self.num_hidden = everything, False, 0

    def __call__(self, line: str) -> bool:
        if (record := _RECORD.match(line)) is not None:
            level, package = record.groups()
            self._is_noise = package == "flytekit" and level in ("DEBUG", "INFO")
        if self._is_noise and not self._everything:
            self.num_hidden += 1
            return False
        return self._pattern.search(line) is not None


def _lines(file: IO[str]) -> Iterator[str]:
    """Yields complete new lines without control characters; of redrawn text the last state."""
    start = file.tell()
    while (line := file.readline()).endswith("\n"):
        start = file.tell()
        drawn = line.rstrip("\r\n").rpartition("\r")[2]
        yield _ESCAPES.sub("", drawn)
    file.seek(start)  # a line whose end is not written yet
