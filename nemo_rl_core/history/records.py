"""What the runs' database says, as frozen records.

Times are seconds since 1970 in UTC. `None` stands for what is not known or has not ended.
"""

from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

State = Literal["running", "succeeded", "cached", "failed", "aborted"]
Kind = Literal["task", "dynamic", "workflow"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A part of a list.

    Attributes:
        items: At most `limit` of them.
        total: How many there are in all.
        offset: Place of the first one.
        limit: What was asked for.
    """

    items: tuple[T, ...]
    total: int
    offset: int
    limit: int


@dataclass(frozen=True, slots=True)
class Execution:
    """A run of a workflow.

    Attributes:
        id: Name of its folder under `runs/`.
        workflow: Such as `workflows.grpo.grpo`.
        recipe: The recipe's name; empty where none was given.
        state: "aborted" when its process ended without saying how.
        command: The command line, word by word.
        inputs: The workflow's inputs, whole configs.
        packages: Versions by name.
        machine: The fields of `infra.machine.Machine`; older records have fewer.
        folder: In which the command was given; relative paths in the inputs begin there.
        num_nodes: How many tasks it called so far; sub-workflows do not count.
        num_cached: How many of those were cache hits.
    """

    id: str
    workflow: str
    recipe: str
    state: State
    started_at: float
    ended_at: float | None
    command: list[str]
    inputs: dict[str, Any]
    git_commit: str | None
    git_dirty: bool | None
    packages: dict[str, str]
    machine: dict[str, Any]
    source_digest: str
    pid: int
    process_started: float
    log_path: str
    error: str
    folder: str = ""
    num_nodes: int = 0
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """A call of a task, a dynamic workflow or a sub-workflow in a run.

    Attributes:
        parent: The dynamic or sub-workflow that called it; None at the top.
        name: Such as `grpo_iteration 2`.
        task: Such as `tasks.grpo_iteration.grpo_iteration`.
        cached_from: The node, of whichever run, that made what a cache hit returned.
        cost: As in the manifest; of what this node itself made.
        summary: One line about what it made.
        log_from: The first byte of the run's log that was written while it ran; `log_to` the last.
    """

    id: int
    execution: str
    parent: int | None
    name: str
    task: str
    kind: Kind
    state: State
    started_at: float
    ended_at: float | None
    cached_from: int | None
    deck_path: str
    cost: dict[str, float]
    summary: str
    error: str
    log_from: int | None
    log_to: int | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One of the times that a node was tried; `resumed_from_step` where a save was found."""

    number: int
    state: State
    started_at: float
    ended_at: float | None
    resumed_from_step: int | None
    error: str


@dataclass(frozen=True, slots=True)
class Value:
    """An input or an output of a node.

    Attributes:
        type: The Python type as it is written.
        value: JSON text; what is longer than 64 KiB is a JSON string of its beginning, which ends
            with "… (cut)".
        artifact: The artifact's id, where the value is one.
    """

    name: str
    type: str
    value: str
    artifact: str | None


@dataclass(frozen=True, slots=True)
class Edge:
    """An output of one node that was an input of another, of the same run."""

    source: int
    target: int
    source_output: str
    target_input: str


@dataclass(frozen=True, slots=True)
class NodeDetail:
    """A node with all that is known of it; `maker` is the node that a cache hit came from."""

    node: Node
    attempts: tuple[Attempt, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    maker: Node | None


@dataclass(frozen=True, slots=True)
class ArtifactRow:
    """An artifact as a run saw it.

    Attributes:
        id: Name of its folder under `artifacts/`.
        path: The folder, which may be gone by now.
        manifest: What lay in it as `manifest.json`.
        made_by: The node that made it; None where it is older than the database.
    """

    id: str
    kind: str
    stage: str
    format: str
    content_hash: str
    path: str
    step: int | None
    created_at: str
    manifest: dict[str, Any]
    made_by: int | None


@dataclass(frozen=True, slots=True)
class GraphArtifact:
    """An artifact in a graph of ancestors or descendants.

    Attributes:
        depth: 0 for the one that was asked for; the shortest way counts.
        artifact: None where the database and the disk know no more than the id.
        execution: The run that made it.
        state: What lies at its path now: "changed" is another content hash.
    """

    id: str
    content_hash: str
    depth: int
    artifact: ArtifactRow | None
    execution: str | None
    state: Literal["found", "missing", "changed"]


@dataclass(frozen=True, slots=True)
class Parentage:
    """One artifact read another; `role` is the input's name, empty where it is not known."""

    parent: str
    child: str
    role: str


@dataclass(frozen=True, slots=True)
class AncestryGraph:
    """Artifacts, nearest first, and who read whom."""

    root: str
    artifacts: tuple[GraphArtifact, ...]
    parentage: tuple[Parentage, ...] = field(default=())
