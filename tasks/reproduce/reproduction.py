"""Repeats a recorded training run, or the stages that made an artifact, in a separate store."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.ancestry import folder_ancestry
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import ArtifactRow, Execution
from nemo_rl_core.store.manifest import Manifest
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


_PROGRAM = Path(__file__).with_name("stages_again.py")


@dataclass(frozen=True)
class StageCall:
    """A call of a task, for one of the artifacts that it returns.

    Attributes:
        name: Name of that artifact.
        stage: Stage in its manifest, such as "grpo_iteration 2".
        function: Name of the task in the module, or of the stage.
        part: Suffix of the stage's name: the iteration, or which artifact.
        parents: Names of the artifacts that it read, by role.
    """

    name: str
    stage: str
    module: str
    function: str
    part: str
    config: dict[str, Any]
    parents: dict[str, str]


def manifests_behind(history: History | None, artifact: ArtifactRow) -> dict[str, Manifest]:
    """Returns the manifests of an artifact and of all its ancestors, by name, parents first."""
    if history is not None and history.has_artifact(artifact.id):
        graph = history.ancestry(artifact.id)
    else:
        graph = folder_ancestry(Path(artifact.path))
    unknown = [each.id for each in graph.artifacts if each.artifact is None]
    if unknown:
        raise StoreError(
            f"{artifact.id} cannot be made again from its record",
            expected="the manifests of all artifacts that it was made from",
            got=f"none of {', '.join(unknown)}",
            fix="pass the downloaded folder, whose ancestors.json has them",
        )
    manifests = {
        each.id: Manifest.model_validate(each.artifact.manifest)
        for each in graph.artifacts
        if each.artifact is not None
    }
    parents = {name: [each.key for each in found.parents] for name, found in manifests.items()}
    return {name: manifests[name] for name in TopologicalSorter(parents).static_order()}


def stage_calls(history: History | None, manifests: Mapping[str, Manifest]) -> list[StageCall]:
    """Returns the calls that make artifacts again, in order."""
    return [
        _call(name, manifest, _task_of(history, name, manifest))
        for name, manifest in manifests.items()
    ]


def _call(name: str, manifest: Manifest, task: str) -> StageCall:
    stage, _, part = manifest.stage.partition(" ")
    return StageCall(
        name=name,
        stage=manifest.stage,
        module=task.rpartition(".")[0],
        function=task.rpartition(".")[2] or stage,
        part=part,
        config=manifest.config,
        parents={parent.role: parent.key for parent in manifest.parents},
    )


def _task_of(history: History | None, name: str, manifest: Manifest) -> str:
    if manifest.run is not None:
        return manifest.run.task
    row = history.artifact(name) if history and history.has_artifact(name) else None
    if history is None or row is None or row.made_by is None:
        raise StoreError(
            f"the run that made {name} is not recorded",
            expected="an artifact that a recorded run, or one on a cluster, made",
            got="one older than the store's history, or from another store",
            fix="run its workflow again, and reproduce the new artifact",
        )
    return history.node(row.made_by).node.task


def run_stages(calls: list[StageCall], store: Store, *, source: Path, folder: Path) -> Path:
    """Runs stages in a separate store and process."""
    store.create()
    request = store.root / "stages.json"
    request.write_text(json.dumps({"calls": [asdict(call) for call in calls]}))
    command = [sys.executable, "-P", str(_PROGRAM), str(request)]
    exit_code = run_in(folder, store, command, source=source)
    folders = json.loads(request.read_text()).get("folders")
    if folders is None:
        raise StoreError(
            "a stage failed when it ran again", got=f"exit code {exit_code}", fix="see above"
        )
    return Path(folders[calls[-1].name])
