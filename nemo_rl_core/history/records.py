"""Rows of the runs' database.

Times are seconds since 1970 in UTC. `None` stands for an unknown value or a missing end.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field

State = Literal["running", "succeeded", "cached", "failed", "stopped", "aborted"]
Kind = Literal["task", "dynamic", "workflow"]

Moment = Annotated[float, Field(ge=0, lt=253402300800, allow_inf_nan=False)]
"""Seconds since 1970 in UTC, before the year 10,000."""

PROGRESS = "progress/"
RUN_SECONDS = f"{PROGRESS}run_seconds"
"""Metric of each step: seconds since the start of the run."""
NUM_TOKENS = f"{PROGRESS}num_tokens"
"""Metric of each step: tokens that the node has trained on."""
LAST_STEP = f"{PROGRESS}last_step"
"""Metric of each step: the last step of the training, numbered like the step."""

T = TypeVar("T")


def point_label(point: Mapping[str, Any]) -> str:
    """Formats the settings of a point; sections are omitted where fields are unambiguous.

    Example:
        >>> point_label({"seed": 0, "grpo.learning_rate": 0.0002})
        'seed 0, learning_rate 0.0002'
    """
    short = {name: name.rpartition(".")[2] for name in point}
    uses = Counter(short.values())
    names = {name: last if uses[last] == 1 else name for name, last in short.items()}
    return ", ".join(f"{names[name]} {value}" for name, value in point.items())


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A part of a list; `damaged` has one line for each unreadable row."""

    items: tuple[T, ...]
    total: int
    offset: int
    limit: int
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Execution:
    """A run of a workflow.

    Attributes:
        state: "stopped" if it was ended by Ctrl-C or SIGTERM; "aborted" if its process died
            without recording an end.
        machine: The fields of `store.machine.Machine`; older records have fewer.
        folder: Working directory of the command, the base of relative paths in the inputs.
    """

    id: str
    workflow: str
    recipe: str
    state: State
    started_at: Moment
    ended_at: Moment | None
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

    An element of a mapped task, such as a point of a sweep, is a node inside the mapped task's
    node. The stages that a point runs are nodes inside the point's node.

    Attributes:
        parent: Id of the calling node; None at the top level.
        cached_from: For a cache hit, the node, possibly of another run, that made the outputs.
        cost: Cost of the artifacts that this node made, from their manifests, without the cost of
            inner nodes.
        log_from: Index of the first byte of the run's log that was written while it ran; `log_to`
            is the end.
        point: Settings of the sweep's point that the node belongs to; empty outside of a sweep.
    """

    id: int
    execution: str
    parent: int | None
    name: str
    task: str
    kind: Kind
    state: State
    started_at: Moment
    ended_at: Moment | None
    cached_from: int | None
    deck_path: str
    cost: dict[str, float | str | None]
    summary: str
    error: str
    log_from: int | None
    log_to: int | None
    point: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name with the settings of the point."""
        label = f" ({point_label(self.point)})" if self.point else ""
        return self.name.removesuffix(label) + label


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a node; `resumed_from_step` is set if it resumed from a save."""

    number: int
    state: State
    started_at: Moment
    ended_at: Moment | None
    resumed_from_step: int | None
    error: str


@dataclass(frozen=True, slots=True)
class Value:
    """An input or an output of a node.

    Attributes:
        value: JSON text; if longer than 64 KiB, a truncated JSON string that ends with "… (cut)".
    """

    name: str
    type: str
    value: str
    artifact: str | None


@dataclass(frozen=True, slots=True)
class Edge:
    """An output of one node that is an input of another node of the same run."""

    source: int
    target: int
    source_output: str
    target_input: str


@dataclass(frozen=True, slots=True)
class NodeDetail:
    """A node with its attempts and values; `maker` is the node that made a cache hit."""

    node: Node
    attempts: tuple[Attempt, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    maker: Node | None


@dataclass(frozen=True, slots=True)
class ArtifactRow:
    """A recorded artifact.

    Attributes:
        id: Name of its folder under `artifacts/`.
        path: Path of the folder, which may have been removed.
        made_by: Id of the node that made it; None if it is older than the database.
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
        depth: Length of the shortest path from the root.
        state: Current state of its folder; "changed" means another content hash.
    """

    id: str
    content_hash: str
    depth: int
    artifact: ArtifactRow | None
    execution: str | None
    state: Literal["found", "missing", "changed"]


@dataclass(frozen=True, slots=True)
class Parentage:
    """A parent of an artifact; `role` is the name of the input, empty if unknown."""

    parent: str
    child: str
    role: str


@dataclass(frozen=True, slots=True)
class AncestryGraph:
    """Artifacts, nearest first, and the relations between them."""

    root: str
    artifacts: tuple[GraphArtifact, ...]
    parentage: tuple[Parentage, ...] = field(default=())
