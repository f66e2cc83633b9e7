"""Whether rows have arrived that no run has begun with, and the one run that they start.

Nothing is noted between two looks. The name of a run follows from the listing of its rows, and
Flyte refuses a second execution of a name: so a listing starts one run, whoever looks how often,
and whenever a look is killed.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from flytekit.models.core.execution import WorkflowExecutionPhase as Phase

from nemo_rl_core.checkpoints.hub import commit_of
from nemo_rl_core.config.data import DataConfig, FileData, HubData, MixtureData
from nemo_rl_core.errors import DataError
from nemo_rl_core.store import remote
from nemo_rl_core.store.files import hash_file, list_files
from tasks.recipes.arrivals import WatchedRows

_ENDED_BADLY = {Phase.FAILED: "has failed", Phase.TIMED_OUT: "has timed out"}
_LETTERS = 9
"""Of the schedule's name in that of a run, which has 20 characters as those that Flyte makes."""


@dataclass(frozen=True)
class RowsSeen:
    """What lies at the addresses of a recipe's rows now.

    Attributes:
        digest: Of the whole listing, in hex.
        written: When the youngest object was written, in seconds since 1970; None where all is
            known by commits of the hub.
        found: In words.
    """

    digest: str
    written: float | None
    found: str


class Runs(Protocol):
    """The executions of a cluster."""

    def phase(self, name: str) -> int | None:
        """The phase of an execution; None where there was never one of that name."""
        ...

    def start(self, name: str) -> bool:
        """Starts the schedule's run under a name.

        Returns:
            False where there is one of that name, or another run of the schedule goes on.
        """
        ...


def look(watched: WatchedRows, runs: Runs, *, now: float) -> str:
    """Looks once, and starts a run where there are new rows that nobody writes any more.

    Args:
        watched: What is looked at.
        runs: Of the schedule.
        now: In seconds since 1970.

    Returns:
        What was found and done.

    Raises:
        DataError: If an address cannot be asked.
    """
    try:
        rows = rows_seen(watched.data)
    except remote.NothingThereError as error:
        return f"no rows yet: {error.problem}"
    ends = []
    for number in range(watched.num_tries):
        name = run_name(watched.schedule, rows, number)
        phase = runs.phase(name)
        if phase is None:
            return f"{_started(watched, runs, rows, name, now=now)} ({rows.found})"
        if phase not in _ENDED_BADLY:
            return f"nothing new: {name} {_state(phase)} these rows ({rows.found})"
        ends.append(f"{name} {_ENDED_BADLY[phase]}")
    return (
        f"nothing new: {', '.join(ends)} on these rows; no other run starts before there are "
        f"other rows ({rows.found})"
    )


def rows_seen(data: Sequence[DataConfig]) -> RowsSeen:
    """Lists what lies at the addresses of rows, and reads none of it.

    Args:
        data: Of one recipe; generated rows have no address.

    Raises:
        NothingThereError: If one of the addresses has no rows.
        DataError: If one cannot be asked.
    """
    parts = [part for each in data for part in _parts(each)]
    digest = sha256("\n".join(part.digest for part in parts).encode()).hexdigest()
    times = [part.written for part in parts if part.written is not None]
    found = ", ".join(dict.fromkeys(part.found for part in parts))
    return RowsSeen(digest, max(times, default=None), found)


def can_arrive(data: DataConfig) -> bool:
    """Whether rows have an address where others may come to lie: in a bucket, or on the hub."""
    if isinstance(data, MixtureData):
        return any(can_arrive(source.data) for source in data.sources)
    if isinstance(data, FileData):
        return any(remote.is_remote(name) for name in (data.train, data.validation) if name)
    return isinstance(data, HubData)


def run_name(schedule: str, rows: RowsSeen, number: int) -> str:
    """The name of the run on these rows, as Flyte 1.16 takes one.

    Args:
        schedule: Its name.
        rows: What the run begins with.
        number: How many runs on these rows have failed.

    Example:
        >>> run_name("My rows_2", RowsSeen("ab", None, ""), 0)
        'my-rows-2-26abbf5dea'
    """
    words = re.sub("[^a-z0-9]+", "-", schedule.lower()).strip("-")
    words = words if words[:1].isalpha() else f"r{words}"
    digest = sha256(f"{schedule}\n{rows.digest}\n{number}".encode()).hexdigest()
    return f"{words[:_LETTERS].rstrip('-')}-{digest[:10]}"


def _started(watched: WatchedRows, runs: Runs, rows: RowsSeen, name: str, *, now: float) -> str:
    minutes = None if rows.written is None else (now - rows.written) / 60
    if minutes is not None and minutes < watched.settled_minutes:
        return (
            f"new rows, of which the last was written {max(minutes, 0):.1f} minutes ago: a run "
            f"starts when none is younger than {watched.settled_minutes:g}"
        )
    if runs.start(name):
        return f"new rows: {name} was started"
    if runs.phase(name) is None:
        return f"new rows: {name} starts when the schedule's present run has ended"
    return f"nothing new: {name} was started by another look"


def _state(phase: int) -> str:
    if phase == Phase.SUCCEEDED:
        return "has run on"
    return "was aborted on" if phase in (Phase.ABORTED, Phase.ABORTING) else "runs on"


def _parts(data: DataConfig) -> Iterator[RowsSeen]:
    if isinstance(data, MixtureData):
        for source in data.sources:
            yield from _parts(source.data)
    elif isinstance(data, HubData):
        yield _of_the_hub(data)
    elif isinstance(data, FileData):
        names = (data.train, data.validation)
        yield from (_at(name) for name in names if name is not None)


def _of_the_hub(data: HubData) -> RowsSeen:
    commit = commit_of("dataset", data.name, data.revision)
    if commit is None:
        raise DataError(
            f"the hub does not say which commit {data.name} is at",
            expected="an answer of the hub, with the rights that HF_TOKEN gives",
            got="none",
            fix="look at the network of the pods, the name and the token; the next look asks again",
        )
    return RowsSeen(commit, None, f"{data.name} at {commit[:12]}")


def _at(name: str) -> RowsSeen:
    if not remote.is_remote(name):
        return _in_checkout(Path(name))
    objects = remote.listing(name)
    content = remote.content(objects)
    times = [each.written for each in objects if each.written is not None]
    counted = f"{len(objects)} objects of {sum(each.size for each in objects)} bytes in {name}"
    return RowsSeen(content, max(times, default=None), counted)


def _in_checkout(path: Path) -> RowsSeen:
    """Files that came with the code change with its version alone."""
    files = [path / name for name in list_files(path)] if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise remote.NothingThereError(
            f"there is no file {path}",
            expected="rows at an address, or in the code that the schedule was registered with",
            got="no such file",
            fix="upload it, and name where it lies in the recipe",
        )
    digest = sha256("\n".join(hash_file(each) for each in files).encode()).hexdigest()
    written = max(each.stat().st_mtime for each in files)
    return RowsSeen(digest, written, f"{len(files)} files in {path}")
