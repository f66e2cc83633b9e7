"""What the backend remembers of an execution."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flyteidl.core import literals_pb2

Phase = Literal["RUNNING", "SUCCEEDED", "FAILED", "ABORTED"]


@dataclass
class Attempt:
    """One start of a task's container.

    Attributes:
        command: As it was started.
        pod: The folder that stands for the pod's disk, empty at first; only `log` outlives it.
        checkpoint: The address in the bucket where it leaves what the next attempt goes on from.
        exit_code: None while it runs.
        error: What `error.pb` said, or how the process ended.
        may_retry: Whether `error.pb` said RECOVERABLE; None where there is none.
    """

    number: int
    command: list[str]
    pod: Path
    checkpoint: str
    pid: int
    exit_code: int | None = None
    error: str = ""
    may_retry: bool | None = None

    @property
    def log(self) -> str:
        """What the container printed."""
        return (self.pod / "log").read_text(errors="replace")


@dataclass
class NodeRecord:
    """One node of a graph.

    Attributes:
        path: Ids of the nodes that hold it and its own: `n3/dn1`.
        entity: The task's or the workflow's name.
        cached: Whether the catalog had its outputs.
        outputs: Once it has ended well.
        error: Of one that has not.
    """

    path: str
    entity: str
    phase: Phase = "RUNNING"
    cached: bool = False
    attempts: list[Attempt] = field(default_factory=list)
    outputs: literals_pb2.LiteralMap = field(default_factory=literals_pb2.LiteralMap)
    error: str = ""


@dataclass
class ExecutionRecord:
    """One launch of a launch plan.

    Attributes:
        labels: Of the execution; the launch plan's own among them.
        overwrites_cache: Whether every task runs, and what the catalog had is replaced.
    """

    name: str
    launch_plan: str
    inputs: literals_pb2.LiteralMap
    phase: Phase = "RUNNING"
    error: str = ""
    outputs: literals_pb2.LiteralMap = field(default_factory=literals_pb2.LiteralMap)
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    overwrites_cache: bool = False

    def named(self, task: str) -> list[NodeRecord]:
        """The nodes of a task by its function's name, on any shape, in the order of their begin."""
        return [node for node in self.nodes.values() if task in node.entity.split(".")[2:]]
