"""The stages that made an artifact, as calls that can be repeated from its manifests."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.ancestry import folder_ancestry
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import ArtifactRow
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.store.store import Store
from tasks.reproduce.reproduction import run_in

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
    return _parents_first(manifests, artifact.id)


def _parents_first(manifests: Mapping[str, Manifest], root: str) -> dict[str, Manifest]:
    ordered: dict[str, Manifest] = {}

    def visit(name: str) -> None:
        if name not in ordered:
            for parent in manifests[name].parents:
                visit(parent.key)
            ordered[name] = manifests[name]

    visit(root)
    return ordered


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
            "a stage failed when it ran again",
            got=f"exit code {exit_code}",
            fix="see above",
        )
    return Path(folders[calls[-1].name])
