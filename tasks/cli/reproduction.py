"""A recorded run once more, in a store of its own, and the artifact that comes of it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import ArtifactRow, Execution
from nemo_rl_core.store.git import git_state
from nemo_rl_core.store.machine import Machine
from nemo_rl_core.store.manifest import package_versions
from nemo_rl_core.store.store import Store
from tasks.platform.caching import source_digest

ROOT = Path(__file__).resolve().parents[2]

BITS_FOLLOW_THE_MACHINE = (
    "bits are the same on machines of one kind: libraries choose kernels by the instruction set "
    "and divide sums among threads, the last bits of a sum follow, and training makes the "
    "difference large; compare figures over several seeds instead"
)


@dataclass(frozen=True)
class OutputPlace:
    """Which output of which node an artifact is: the same in every run of a workflow.

    Attributes:
        number: Which of several nodes of that name, 0-based.
    """

    task: str
    name: str
    number: int
    output: str


@dataclass(frozen=True)
class Doubts:
    """Why a second run may not give the same.

    Attributes:
        serious: Differences of code or packages.
        remarks: What should not matter, and may.
        bits: Differences of the machine by which the last bits of a sum are others.
    """

    serious: tuple[str, ...]
    remarks: tuple[str, ...]
    bits: tuple[str, ...]


def maker_of(history: History, artifact: ArtifactRow) -> Execution:
    """The run that made an artifact.

    Raises:
        StoreError: If that is not recorded.
    """
    execution = history.maker(artifact)
    if execution is None:
        raise StoreError(
            f"no record says which run made {artifact.id}",
            expected="an artifact that a recorded run made",
            got="one that is older than the store's record, or came from elsewhere",
            fix="run its workflow again, and reproduce what that makes",
        )
    return execution


def doubts_about(execution: Execution, *, checked_out: bool = False) -> Doubts:
    """Holds this machine and this source against those of the run.

    Args:
        execution: The run to be done again.
        checked_out: It will run in a checkout of its commit, so that the source here is no matter.
    """
    serious, remarks = [], []
    here = package_versions()
    for name in sorted({*here, *execution.packages}):
        then, now = execution.packages.get(name, "none"), here.get(name, "none")
        if then != now:
            serious.append(f"{name} was {then} and is {now}")
    commit, dirty = git_state(ROOT)
    if checked_out:
        if execution.git_dirty:
            serious.append("the run's source had changes that no commit holds")
    elif source_digest(execution.workflow.rpartition(".")[0]) != execution.source_digest:
        serious.append("the source of the workflow is another")
    if not checked_out and commit != execution.git_commit:
        remarks.append(f"the commit was {execution.git_commit} and is {commit}")
    if not checked_out and dirty:
        remarks.append("the working tree has uncommitted changes")
    bits = tuple(_of_machine(execution.machine, Machine.current()))
    return Doubts(tuple(serious), tuple(remarks), bits)


def _of_machine(then: dict[str, Any], here: Machine) -> Iterator[str]:
    """What of a machine decides in which order numbers are added, where it is another."""
    now = here.model_dump()
    texts = {
        "cpu_model": "the processor was {0} and is {1}",
        "instruction_set": "its vector extensions differ (then alone {0}, now alone {1})",
        "threads": "libraries took {0} threads and take {1}",
        "cores": "it had {0} cores and has {1}",
    }
    for name, text in texts.items():
        before, after = then.get(name), now[name]
        if before in (None, after):  # older records have fewer fields
            continue
        if name == "instruction_set":
            before, after = _only_in(before, after), _only_in(after, before)
        yield text.format(before, after)


def _only_in(one: str, other: str) -> str:
    return " ".join(sorted({*one.split()} - {*other.split()})) or "none"


@contextmanager
def checkout(commit: str | None, folder: Path) -> Iterator[Path]:
    """A git worktree of this repository at a commit, removed at the end.

    Raises:
        StoreError: If there is no such commit here.
    """
    target = folder / "source"
    git = ["git", "-C", str(ROOT)]
    made = subprocess.run(
        [*git, "worktree", "add", "--detach", str(target), commit or ""],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise StoreError(
            "the run's source cannot be checked out",
            expected=f"a repository at {ROOT} that holds the commit {commit}",
            got=made.stderr.strip().splitlines()[-1] if made.stderr else "",
            fix="fetch the commit, or run the source that is here with --anyway",
        )
    try:
        yield target
    finally:
        subprocess.run(
            [*git, "worktree", "remove", "--force", str(target)], capture_output=True, check=False
        )


def run_again(execution: Execution, store: Store, *, source: Path = ROOT) -> int:
    """Runs the recorded workflow with the recorded inputs; returns the command's exit code.

    Args:
        execution: The run to be done again.
        store: A store without its artifacts; else all would be cache hits.
        source: The repository's root, or a checkout of another commit.
    """
    module, _, name = execution.workflow.rpartition(".")
    store.root.mkdir(parents=True, exist_ok=True)
    inputs = store.root / "inputs.json"
    inputs.write_text(json.dumps(execution.inputs))
    workflow = source.joinpath(*module.split(".")).with_suffix(".py")
    folder = Path(execution.folder)
    pyflyte = Path(sys.executable).with_name("pyflyte")
    environment = {**os.environ, "NEMO_RL_HOME": str(store.root), "PYTHONPATH": str(source)}
    command = [str(pyflyte), "run", str(workflow), name, "--inputs-file", str(inputs)]
    return subprocess.run(
        command, cwd=folder if folder.is_dir() else source, env=environment, check=False
    ).returncode


def place_of(history: History, artifact: ArtifactRow) -> OutputPlace:
    """Where in its run an artifact was made."""
    assert artifact.made_by is not None, "ask maker_of first"
    detail = history.node(artifact.made_by)
    alike = [
        node.id
        for node in history.nodes(detail.node.execution)
        if (node.task, node.name) == (detail.node.task, detail.node.name)
    ]
    output = next(each.name for each in detail.outputs if each.artifact == artifact.id)
    return OutputPlace(detail.node.task, detail.node.name, alike.index(detail.node.id), output)


def artifact_at(history: History, execution: str, place: OutputPlace) -> ArtifactRow:
    """What a run made at a place.

    Raises:
        StoreError: If it did not get there.
    """
    alike = [
        node
        for node in history.nodes(execution)
        if (node.task, node.name) == (place.task, place.name)
    ]
    values = history.node(alike[place.number].id).outputs if len(alike) > place.number else ()
    for each in values:
        if each.name == place.output and each.artifact:
            return history.artifact(each.artifact)
    raise StoreError(
        f"the second run made no {place.output} of {place.name}",
        got=history.execution(execution).error or "a run that ended elsewhere",
        fix="see its log",
    )
