"""Calls of flytekit's nodes, and their literals, promises and Python values as plain values."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import msgpack
from flytekit.core.array_node_map_task import ArrayNodeMapTask
from flytekit.core.base_task import Task
from flytekit.core.promise import Promise
from flytekit.core.python_function_task import PythonFunctionTask
from flytekit.core.workflow import WorkflowBase
from flytekit.models.literals import Literal, Scalar
from pydantic import BaseModel

from nemo_rl_core.errors import StoreError
from nemo_rl_core.history.inserts import as_value
from nemo_rl_core.history.records import Kind, State, Value, point_label
from nemo_rl_core.store.manifest import Cost, Manifest
from nemo_rl_core.telemetry import usage
from tasks.artifacts import Artifact
from tasks.ray_cluster.stopping import StopPosition


def plain(value: Any) -> Any:
    """Converts an input or output of a node into JSON values."""
    match value:
        case Promise():
            return reduce(getitem, value.attr_path, plain(value.val))
        case Literal():
            return _plain_literal(value)
        case BaseModel():
            return value.model_dump(mode="json")
        case list() | tuple():
            return [plain(each) for each in value]
        case dict():
            return {str(key): plain(each) for key, each in value.items()}
    return value


def _plain_literal(literal: Literal) -> Any:
    if literal.collection is not None:
        return [_plain_literal(each) for each in literal.collection.literals]
    if literal.map is not None:
        return {key: _plain_literal(each) for key, each in literal.map.literals.items()}
    return _plain_scalar(literal.scalar) if literal.scalar is not None else None


def _plain_scalar(scalar: Scalar) -> Any:
    if scalar.none_type is not None:
        return None
    if scalar.union is not None:
        return _plain_literal(scalar.union.value)
    if scalar.primitive is not None:
        return scalar.primitive.value
    if scalar.binary is not None:
        return msgpack.loads(scalar.binary.value, strict_map_key=False)
    # Files and frames, which no stage of this project returns directly.
    return str(getattr(scalar.value, "uri", scalar.value))


def artifact_id(value: Any) -> str | None:
    """Returns the id of the artifact that a plain value describes, or None for other values.

    An artifact's id is its manifest's name, independent of its folder's name.
    """
    if not isinstance(value, dict) or not isinstance(value.get("directory"), dict):
        return None
    folder = Path(str(value["directory"].get("path")))
    with suppress(StoreError):
        return Manifest.read(folder).name or folder.name
    return folder.name


def described_values(values: Mapping[str, Any], types: Mapping[str, Any]) -> list[Value]:
    """Returns the recorded form of a node's inputs or outputs."""
    described = []
    for name, value in values.items():
        shown = plain(value)
        described.append(as_value(name, type_name(types.get(name)), shown, artifact_id(shown)))
    return described


def type_name(kind: Any) -> str:
    """Returns the name of a type, without annotations for the cache.

    Example:
        >>> type_name(list[Annotated[int, object()]] | None)
        'list[int] | None'
    """
    arguments, origin = get_args(kind), get_origin(kind)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(type_name(each) for each in arguments)
    if kind in (None, NoneType):
        return "None"
    if isinstance(origin, type) and all(
        isinstance(each, type) or get_args(each) for each in arguments
    ):
        return f"{origin.__name__}[{', '.join(type_name(each) for each in arguments)}]"
    if isinstance(kind, type):
        return kind.__name__
    return str(kind).replace("typing.", "")


def named_outputs(names: list[str], returned: Any) -> dict[str, Promise]:
    """Returns the promises that a task or workflow returned, by output name."""
    if not names:
        return {}
    promises = returned if isinstance(returned, tuple) else (returned,)
    return dict(zip(names, promises, strict=True))


def promises_in(value: Any) -> Iterator[Any]:
    """Yields the promises, artifacts and configs in a value; lists and dictionaries may nest."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from promises_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from promises_in(each)
    elif isinstance(value, Promise | Artifact | BaseModel):
        yield value


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
