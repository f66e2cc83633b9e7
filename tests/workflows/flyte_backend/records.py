"""Records of an execution in the backend."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flyteidl.core import literals_pb2

Phase = Literal["RUNNING", "SUCCEEDED", "FAILED", "ABORTED"]


@dataclass
class Attempt:
    """One start of a task's container.

    Attributes:
        number: Index of the attempt, from 0.
        command: Command of the container.
        pod: Folder that serves as the pod's disk, empty at first; only `log` outlives the pod.
        checkpoint: URL in the bucket for the state that the next attempt can resume from.
        pid: Id of the container's first process.
        exit_code: Exit code; None while it runs.
        error: Message of `error.pb`, or how the process ended.
        may_retry: Whether `error.pb` has the kind RECOVERABLE; None if there is no `error.pb`.
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
        """Output of the container."""
        return (self.pod / "log").read_text(errors="replace")


@dataclass
class NodeRecord:
    """One node of a graph.

    Attributes:
        path: Ids of the enclosing nodes and of the node, such as `n3/dn1`.
        entity: Name of the task or workflow.
        cached: Whether its outputs come from the catalog.
        outputs: Outputs, once it has succeeded.
        error: Message, if it has failed.
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
        labels: Labels of the execution, with those of the launch plan.
        overwrites_cache: Whether every task runs and replaces its entry in the catalog.
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
        """Returns the nodes of a task by its function's name, on any shape, in order of start."""
        return [node for node in self.nodes.values() if task in node.entity.split(".")[2:]]
