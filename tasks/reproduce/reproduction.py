"""Repeats a recorded training run in a separate store, with helpers for every repetition."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def checkout(commit: str | None, folder: Path) -> Iterator[Path]:
    """Makes a git worktree of this repository at a commit, removed at the end."""
    target = folder / "source"
    git = ["git", "-C", str(ROOT)]
    completed = subprocess.run(
        [*git, "worktree", "add", "--detach", str(target), commit or ""],
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode:
        raise StoreError(
            "the run's source cannot be checked out",
            expected=f"a repository at {ROOT} that holds the commit {commit}",
            got=completed.stderr.strip().splitlines()[-1] if completed.stderr else "",
            fix="fetch the commit, or run the current source with --anyway",
        )
    try:
        yield target
    finally:
        subprocess.run(
            [*git, "worktree", "remove", "--force", str(target)], capture_output=True, check=False
        )


def is_training(execution: Execution) -> bool:
    """Whether a run is a training run started by `fit`, and not a workflow."""
    return "trainer" in execution.inputs


def train_again(
    execution: Execution,
    artifact: ArtifactRow,
    store: Store,
    *,
    source: Path = ROOT,
    anyway: bool = False,
    trust: bool = False,
) -> Path:
    """Repeats a training run on the artifacts that it read; returns the folder of the new model.

    With `anyway`, a changed reward is used; with `trust`, a reward is unpickled even if it is not
    the recorded one.
    """
    parents = {each["role"]: each["path"] for each in artifact.manifest["parents"]}
    reasons = [*execution.inputs.get("unrepeatable", ())]
    if "settings" not in execution.inputs:
        reasons.append("the run was itself a repetition")
    elif artifact.kind != "checkpoint" or "train" not in parents:
        reasons.append(f"{artifact.stage} is an input of the training, which is kept as it is")
    reasons += [
        f"its input {role}, {path}, is missing"
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
    from nemo_rl_core.trainers.fit.recording import REWARD_DIGEST, refuse_changed_reward
    from nemo_rl_core.trainers.fit.repeating import Repetition

    run = Path(execution.log_path).parent
    if not trust:
        refuse_changed_reward(run, execution.inputs.get(REWARD_DIGEST, ""))
    request = store.root / "repetition.json"
    store.create()
    Repetition(
        trainer=execution.inputs["trainer"],
        settings=execution.inputs["settings"],
        config=artifact.manifest["config"],
        parents=parents,
        run=str(run),
        anyway=anyway,
    ).write(request)
    command = [sys.executable, "-m", "nemo_rl_core.trainers.fit.repeating", str(request)]
    exit_code = run_in(Path(execution.folder), store, command, source=source)
    return _trained_artifact(store, artifact.stage, exit_code)


def run_in(folder: Path, store: Store, command: list[str], *, source: Path) -> int:
    """Runs a command in the folder if it exists, with the store and the source; its exit code."""
    environment = {**os.environ, "NEMO_RL_HOME": str(store.root), "PYTHONPATH": str(source)}
    return subprocess.run(
        command, cwd=folder if folder.is_dir() else source, env=environment, check=False
    ).returncode


def _trained_artifact(store: Store, stage: str, exit_code: int) -> Path:
    """Returns the folder of the artifact that the only stage of a repeated training made."""
    with History(store) as history:
        runs = history.executions().items
        if not runs:
            raise StoreError(
                "the second run did not begin", got=f"exit code {exit_code}", fix="see above"
            )
        for node in history.nodes(runs[0].id):
            for output in history.node(node.id).outputs:
                if output.artifact:
                    return Path(history.artifact(output.artifact).path)
    raise StoreError(
        f"the second run made no artifact of {stage}",
        got=runs[0].error or "a run without this output",
        fix="see its log",
    )
