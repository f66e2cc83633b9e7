"""The nodes of a run while they run: names, kinds and progress."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flytekit.core.array_node_map_task import ArrayNodeMapTask
from flytekit.core.base_task import Task
from flytekit.core.python_function_task import PythonFunctionTask
from flytekit.core.workflow import WorkflowBase

from nemo_rl_core.history.records import Kind, State, point_label
from nemo_rl_core.store.manifest import Cost
from nemo_rl_core.telemetry import usage
from tasks.artifacts import Artifact
from tasks.ray_cluster.stopping import StopPosition


class NodeOutput(NamedTuple):
    """An output of a node of this run."""

    node: int | None
    output: str


@dataclass
class NodeCall:
    """A running node.

    Attributes:
        given: Inputs as plain values, with their sources.
        has_made: Whether it has made an artifact; a stage may find its result in the store instead.
        is_resumed: Whether it resumed from a save, whose tokens are not counted here.
        spent: Resources that its work used; complete when it has ended.
        position: Its progress, for a run that is stopped.
        point: Settings of the sweep's point that it belongs to; empty outside of a sweep.
        is_inside: Whether a stage, or an element of a mapped task, called it.
        training: Node with the steps of its second or a later training loop; None for the first.
    """

    entity: Task | WorkflowBase
    kind: Kind
    node: int | None
    name: str
    given: dict[str, Any]
    sources: dict[str, list[NodeOutput]]
    began: float = field(default_factory=time.monotonic)
    executed: bool = False
    has_made: bool = False
    num_tokens: int = 0
    is_resumed: bool = False
    spent: usage.Spent = field(default_factory=usage.Spent)
    position: StopPosition = field(default_factory=StopPosition)
    point: dict[str, Any] = field(default_factory=dict)
    is_element: bool = False
    is_inside: bool = False
    num_inside: int = 0
    cost_inside: Cost = field(default_factory=Cost)
    training: int | None = None

    @property
    def shown(self) -> str:
        """Its name on the terminal."""
        in_point = self.point and not self.is_element
        return f"{self.name} ({point_label(self.point)})" if in_point else self.name

    @property
    def is_mapped(self) -> bool:
        """Whether it is a mapped task, whose elements are nodes inside it."""
        return isinstance(self.entity, ArrayNodeMapTask)

    @property
    def has_row(self) -> bool:
        """Whether the table at the end of the run has it."""
        return self.is_stage and not self.is_inside and not (self.is_mapped and self.num_inside)

    @property
    def is_stage(self) -> bool:
        """Whether it is shown to the user, as cached tasks are."""
        return isinstance(self.entity, Task) and bool(self.entity.metadata.cache)

    @property
    def state(self) -> State:
        """The final state of a node that did not fail."""
        return "cached" if self.is_stage and not self.executed else "succeeded"

    def state_with(self, made: Sequence[Artifact]) -> State:
        """The final state of a node with its artifacts, which may have existed before."""
        return "cached" if self.is_stage and made and not self.has_made else self.state


def kind_of(entity: Task | WorkflowBase) -> Kind:
    """Returns the kind of a node."""
    if isinstance(entity, WorkflowBase):
        return "workflow"
    is_dynamic = (
        isinstance(entity, PythonFunctionTask)
        and entity.execution_mode == PythonFunctionTask.ExecutionBehavior.DYNAMIC
    )
    return "dynamic" if is_dynamic else "task"


def own_name(entity: Task | WorkflowBase) -> str:
    """The name without its module; a mapped task has the name of its inner task."""
    mapped = entity.python_function_task if isinstance(entity, ArrayNodeMapTask) else entity
    return str(mapped.name).rpartition(".")[2]


def node_name(entity: Task | WorkflowBase, inputs: dict[str, Any]) -> str:
    """Returns the task's name, with the iteration if it has one."""
    name = own_name(entity)
    iteration = inputs.get("iteration")
    return f"{name} {iteration}" if isinstance(iteration, int) else name


def point_settings(given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a sweep's point, from the config of its stage; empty for other stages."""
    config = given.get("config")
    point = config.get("point") if isinstance(config, dict) else None
    return point if isinstance(point, dict) else {}
