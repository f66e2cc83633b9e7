"""Repetition of a recorded training in a separate store, and what every repetition needs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import ArtifactRow, Execution
from nemo_rl_core.store.store import Store

ROOT = Path(__file__).resolve().parents[2]

BITS_FOLLOW_THE_MACHINE = (
    "bits are the same on machines of one kind: libraries choose kernels by the instruction set "
    "and split sums among threads, which changes the last bits of sums, and training amplifies "
    "the difference; compare metrics over several seeds instead"
)


@dataclass(frozen=True)
class OutputRef:
    """The node output that an artifact is, equal in every run of a workflow.

    Attributes:
        number: Index among several nodes of that name, 0-based.
    """

    task: str
    name: str
    number: int
    output: str


@contextmanager
def checkout(commit: str | None, folder: Path) -> Iterator[Path]:
    """A git worktree of this repository at a commit, removed at the end.

    Raises:
        StoreError: If the repository has no such commit.
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
            fix="fetch the commit, or run the current source with --anyway",
        )
    try:
        yield target
    finally:
        subprocess.run(
            [*git, "worktree", "remove", "--force", str(target)], capture_output=True, check=False
        )


def is_training(execution: Execution) -> bool:
    """Whether a run is a training that Python started (`fit`), and no workflow."""
    return "trainer" in execution.inputs


def train_again(
    execution: Execution,
    artifact: ArtifactRow,
    store: Store,
    *,
    source: Path = ROOT,
    anyway: bool = False,
    trust: bool = False,
) -> int:
    """Repeats a training on the artifacts that it read; returns the command's exit code.

    Args:
        execution: The run of `fit`.
        artifact: Its model.
        store: A store without it.
        source: As of `run_again`.
        anyway: Whether a changed reward is used.
        trust: Whether any reward is unpickled, and not only the one of the record.

    Raises:
        StoreError: If a part of its inputs is not recorded, gone, or another one.
    """
    parents = {each["role"]: each["path"] for each in artifact.manifest["parents"]}
    reasons = [*execution.inputs.get("unrepeatable", ())]
    if "settings" not in execution.inputs:
        reasons.append("the run was itself a repetition")
    elif artifact.kind != "checkpoint" or "train" not in parents:
        reasons.append(f"{artifact.stage} is an input of the training, which is kept as it is")
    reasons += [
        f"its input {role}, {path}, is gone"
        for role, path in parents.items()
        if not Path(path).is_dir()
    ]
    if reasons:
        raise StoreError(
            f"{artifact.id} cannot be made again from its record",
            expected="a training whose inputs are all recorded",
            got="; ".join(reasons),
            fix="run its script again",
        )
    from nemo_rl_core.trainers.recording import REWARD_DIGEST, refuse_changed_reward
    from nemo_rl_core.trainers.repeating import Repetition

    run = Path(execution.log_path).parent
    if not trust:
        refuse_changed_reward(run, execution.inputs.get(REWARD_DIGEST, ""))
    asked = store.root / "repetition.json"
    store.create()
    Repetition(
        trainer=execution.inputs["trainer"],
        settings=execution.inputs["settings"],
        config=artifact.manifest["config"],
        parents=parents,
        run=str(run),
        anyway=anyway,
    ).write(asked)
    command = [sys.executable, "-m", "nemo_rl_core.trainers.repeating", str(asked)]
    return _run_in(execution, store, command, source=source)


def _run_in(execution: Execution, store: Store, command: list[str], *, source: Path) -> int:
    """Runs a command where the run was, with the store and the source; returns its exit code."""
    folder = Path(execution.folder)
    environment = {**os.environ, "NEMO_RL_HOME": str(store.root), "PYTHONPATH": str(source)}
    return subprocess.run(
        command, cwd=folder if folder.is_dir() else source, env=environment, check=False
    ).returncode


def output_of(history: History, artifact: ArtifactRow) -> OutputRef:
    """Returns the output of its run that an artifact is."""
    assert artifact.made_by is not None, "the run must be recorded"
    detail = history.node(artifact.made_by)
    alike = [
        node.id
        for node in history.nodes(detail.node.execution)
        if (node.task, node.name) == (detail.node.task, detail.node.name)
    ]
    output = next(each.name for each in detail.outputs if each.artifact == artifact.id)
    return OutputRef(detail.node.task, detail.node.name, alike.index(detail.node.id), output)


def output_artifact(history: History, execution: str, reference: OutputRef) -> ArtifactRow:
    """Returns the artifact of an output of a run.

    Raises:
        StoreError: If the run has no such output.
    """
    alike = [
        node
        for node in history.nodes(execution)
        if (node.task, node.name) == (reference.task, reference.name)
    ]
    values = (
        history.node(alike[reference.number].id).outputs if len(alike) > reference.number else ()
    )
    for each in values:
        if each.name == reference.output and each.artifact:
            return history.artifact(each.artifact)
    raise StoreError(
        f"the second run made no {reference.output} of {reference.name}",
        got=history.execution(execution).error or "a run without this output",
        fix="see its log",
    )
