"""The nodes of one run: inputs with their sources, outputs, and state.

An output is identified by a mark on flytekit's literal, which is kept through sub-workflows. A
dynamic receives Python values instead: there an artifact is identified by its folder, and a config
by its content, among the dynamic's inputs. Elements of a mapped task, and stages that a stage
calls, receive Python values too. Their nodes are inside the node of the task that calls them.
"""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

from flytekit.core.base_task import Task
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.promise import Promise
from flytekit.core.type_engine import TypeEngine
from flytekit.core.workflow import WorkflowBase
from pydantic import BaseModel

from nemo_rl_core.errors import NemoRLError
from nemo_rl_core.history.records import State, point_label
from nemo_rl_core.history.writer import HistoryWriter, NodeEnd
from nemo_rl_core.store.manifest import Cost
from nemo_rl_core.telemetry import usage
from nemo_rl_core.telemetry.events import (
    ArtifactMade,
    Event,
    MachineSample,
    StageRecord,
    StageResumed,
    StageSaved,
    StageStarted,
    Waiting,
    labeled,
    publish,
)
from nemo_rl_core.types import StepReport
from tasks.artifacts import Artifact
from tasks.local_run.values import (
    NodeCall,
    NodeOutput,
    artifact_id,
    described_values,
    kind_of,
    named_outputs,
    node_name,
    own_name,
    plain,
    point_settings,
    promises_in,
)
from tasks.ray_cluster.stopping import StopPosition

logger = logging.getLogger(f"nemo_rl_core.{__name__}")  # prefix of the run's log
_MAX_ERROR_CHARACTERS = 4000
_MARK = "_nemo_rl_source"


class Recorder:
    """Records the events of one run.

    Args:
        writer: The run's database.
        log_path: The run's log; its length marks the parts of nodes.
        is_stop: Whether an error comes from a signal, and not from the run itself.

    Attributes:
        stopped_at: Position of the run when it was stopped.
    """

    def __init__(
        self,
        writer: HistoryWriter,
        log_path: Path,
        is_stop: Callable[[BaseException], bool] = lambda _: False,
    ) -> None:
        self.records: list[StageRecord] = []
        self.artifacts: list[Artifact] = []
        self.stopped_at = StopPosition()
        self._is_stop = is_stop
        self._writer, self._log_path = writer, log_path
        self._calls: list[NodeCall] = []
        self._made: set[Path] = set()
        self._makers: dict[str, list[NodeOutput]] = {}
        self._num_calls: Counter[str] = Counter()

    def call(
        self, entity: Task | WorkflowBase, kwargs: dict[str, Any], execute: Callable[[], Any]
    ) -> Any:
        """Runs and records a node, and returns flytekit's outputs."""
        call = self._begin(entity, kwargs)
        returned = self._run(call, execute)
        outputs = named_outputs(list(entity.python_interface.outputs), returned)
        for name, promise in outputs.items():
            self._mark(call, name, promise)
        values = _python_values(entity, outputs) if call.is_stage else []
        if call.is_mapped and not call.executed:
            self._record_cached_elements(call, values)
        self._end(call, outputs, values)
        return returned

    def inside(self, task: Task, inputs: dict[str, Any], execute: Callable[[], Any]) -> Any:
        """Runs a task's function, and returns its result.

        It is a node if another task called it: as an element of a mapped task, or by `run_inside`.
        """
        caller = self._calls[-1] if self._calls else None
        if caller is None or caller.entity is task:
            return execute()
        call = self._begin(task, inputs)
        call.executed = True
        returned = self._run(call, execute)
        outputs = named_outputs(list(task.python_interface.outputs), returned)
        for name, value in outputs.items():
            if artifact := artifact_id(plain(value)):
                self._makers.setdefault(artifact, []).append(NodeOutput(call.node, name))
        self._end(call, outputs, list(outputs.values()))
        return returned

    def _run(self, call: NodeCall, execute: Callable[[], Any]) -> Any:
        counts = call.kind == "task" and not call.is_mapped
        self._num_calls[call.shown] += counts
        number = self._num_calls[call.shown] if counts else 1
        self._calls.append(call)
        try:
            try:
                label = labeled(str(number)) if number > 1 else nullcontext()
                with label, usage.measured() as call.spent:
                    return execute()
            finally:
                self._calls.pop()
        except BaseException as error:
            self._fail(call, error)
            raise

    def _record_cached_elements(self, call: NodeCall, values: list[Any]) -> None:
        """Records the elements of a mapped task that flytekit has found in its cache."""
        task = call.entity.python_function_task
        self._calls.append(call)
        for index, value in enumerate(values):
            inputs = {
                name: given if name in call.entity.bound_inputs else given[index]
                for name, given in call.given.items()
            }
            element = self._begin(task, inputs)
            self._end(element, dict.fromkeys(task.python_interface.outputs, value), [value])
        self._calls.pop()

    def executes(self, task: Task) -> None:
        """Marks the current task as not cached."""
        if self._calls and self._calls[-1].entity is task:
            self._calls[-1].executed = True

    def listen(self, event: Event) -> None:
        """Records events: steps, new artifacts, machine utilization."""
        if not self._calls:
            return
        node, position = self._calls[-1].node, self._calls[-1].position
        match event:
            case StepReport(metrics=metrics):
                if event.step <= position.step:
                    self._begin_training(self._calls[-1], event.stage)
                step = self._writer.log_step(self._calls[-1].training or node, event)
                position.step, position.num_steps = event.step, event.num_steps
                position.num_steps_before = step - event.step
                self._calls[-1].num_tokens += int(metrics.get("num_valid_tokens", 0))
            case MachineSample(second, figures):
                machine_metrics = {f"machine/{name}": value for name, value in figures.items()}
                self._writer.log_metrics(node, second, machine_metrics)
            case StageResumed(step):
                self._writer.resumed(node, step)
                self._calls[-1].is_resumed = True
                position.saved = step
            case StageSaved(step):
                position.saved = step
            case Waiting(text):
                # A signal ends nested waits from the innermost, which is the one to report.
                if not isinstance(sys.exception(), KeyboardInterrupt):
                    position.waited_for = text
            case ArtifactMade(folder):
                self._made.add(folder)
                self._calls[-1].has_made = True

    def _begin_training(self, call: NodeCall, name: str) -> None:
        """Opens a node for a further training loop of one task, whose steps start at 1 again."""
        self._end_training(call, "succeeded")
        call.training = self._writer.begin_node(
            name,
            task=call.entity.name,
            kind="task",
            parent=call.node,
            log_from=self._log_bytes(),
            point=call.point,
        )

    def _end_training(self, call: NodeCall, state: State) -> None:
        self._writer.end_node(call.training, NodeEnd(state, log_to=self._log_bytes()))

    def _begin(self, entity: Task | WorkflowBase, kwargs: dict[str, Any]) -> NodeCall:
        name, kind, input_values = node_name(entity, kwargs), kind_of(entity), plain(kwargs)
        caller = self._calls[-1] if self._calls else None
        is_element = caller is not None and caller.is_mapped
        point = point_settings(input_values) if is_element else caller.point if caller else {}
        if is_element and point:
            name = f"{name} ({point_label(point)})"
        node = self._writer.begin_node(
            name,
            task=entity.name,
            kind=kind,
            parent=caller.node if caller else None,
            inputs=described_values(kwargs, entity.python_interface.inputs),
            log_from=self._log_bytes(),
            point=point,
        )
        sources = {
            key: [source for part in promises_in(value) for source in self._source(part)]
            for key, value in kwargs.items()
        }
        for key, found in sources.items():
            for source in found:
                self._writer.connect(source.node, source.output, node, key)
        call = NodeCall(entity, kind, node, name, input_values, sources, point=point)
        call.is_element = is_element
        call.is_inside = caller is not None and (caller.is_inside or caller.is_stage)
        call.is_inside = call.is_inside and not is_element
        if call.is_stage:
            publish(StageStarted(call.shown))
        return call

    def _source(self, value: Promise | Artifact | BaseModel) -> list[NodeOutput]:
        caller = self._calls[-1] if self._calls else None
        if isinstance(value, Promise):
            mark = getattr(value.val, _MARK, None)
            if mark is not None:
                return [mark]
            # An input of the calling sub-workflow, after which flytekit names the promise.
            return caller.sources.get(value.var, []) if caller else []
        shown = plain(value)
        if caller:
            for name, given in caller.given.items():
                if given == shown and caller.sources[name]:
                    return caller.sources[name]
        makers = self._makers.get(artifact_id(shown) or "", [])
        return makers[-1:]

    def _end(self, call: NodeCall, outputs: dict[str, Any], values: list[Any]) -> None:
        artifacts = [each for each in values if isinstance(each, Artifact)] if call.is_stage else []
        # A stage may return an input, as `promote` does, which is not its own output.
        task_name = own_name(call.entity)
        own_artifacts = [each for each in artifacts if each.stage.split()[0] == task_name]
        manifests = [(each.folder, each.manifest) for each in artifacts]
        # Artifacts of earlier runs have no cost in this run, such as points of a sweep.
        costs = [
            manifest.cost
            for folder, manifest in manifests
            if folder in self._made and manifest.stage.split()[0] == task_name
        ]
        cost = costs[0] if len(costs) == 1 else reduce(Cost.plus, costs, Cost())
        if call.is_resumed:  # the other costs already cover only this attempt
            cost = cost.model_copy(update={"tokens": call.num_tokens})
        state = call.state_with(own_artifacts)
        summary = ", ".join(each.summary for each in own_artifacts if each.summary)
        if call.is_mapped:
            summary = f"{len(own_artifacts)} of {len(values)} points succeeded"
        self._end_training(call, state)
        self._writer.end_node(
            call.node,
            NodeEnd(
                state,
                outputs=described_values(outputs, call.entity.python_interface.outputs),
                made=manifests,
                deck_path=_deck(own_artifacts),
                cost={} if call.num_inside else cost.model_dump(),
                summary=summary,
                log_to=self._log_bytes(),
            ),
        )
        if not call.is_element and not call.is_inside:
            self.artifacts += own_artifacts
        if call.is_stage:
            self._publish(call, "cached" if state == "cached" else "ran", cost, summary)

    def _fail(self, call: NodeCall, error: BaseException) -> None:
        is_stop = self._is_stop(error)
        state: State = "stopped" if is_stop else "failed"
        cost = _spent(call) if call.is_stage and not call.num_inside else None
        if is_stop and not self.stopped_at.stage:  # the innermost: outer ones follow
            self.stopped_at = call.position
            call.position.stage = call.shown if call.is_stage else ""
            call.position.num_finished = len(self.records)
        text = (
            f"stopped from outside {self.stopped_at.describe()}" if is_stop else error_text(error)
        )
        self._end_training(call, state)
        end = NodeEnd(
            state, error=text, cost=cost.model_dump() if cost else {}, log_to=self._log_bytes()
        )
        self._writer.end_node(call.node, end)
        if call.is_stage:
            # Where some elements may fail, flytekit drops their errors.
            note = text.partition("\n")[0] if call.is_element and not is_stop else ""
            self._publish(call, "stopped" if is_stop else "failed", cost, note)
        if call.is_element:
            logger.info("%s failed", call.shown, exc_info=error)

    def _publish(
        self, call: NodeCall, state: Any, cost: Cost | None = None, note: str = ""
    ) -> None:
        cost = call.cost_inside if call.num_inside else cost or Cost()
        record = StageRecord(
            call.shown,
            state,
            time.monotonic() - call.began,
            tokens=cost.tokens,
            peak_memory_gib=cost.peak_memory_gib,
            note=note,
            cost=cost,
        )
        if call.has_row:
            self.records.append(record)
        if self._calls and self._calls[-1].is_stage:
            caller = self._calls[-1]
            caller.cost_inside = caller.cost_inside.plus(cost) if caller.num_inside else cost
            caller.num_inside += 1
            caller.has_made |= call.has_made
        publish(record)

    def _mark(self, call: NodeCall, name: str, promise: Promise) -> None:
        """Marks an output's literal with its node, to identify it as an input later.

        Outputs of a sub-workflow or dynamic belong to the inner node that made them; inputs that a
        dynamic returns belong to the dynamic.
        """
        if call.kind == "workflow" and hasattr(promise.val, _MARK):
            return
        source = NodeOutput(call.node, name)
        artifact = artifact_id(plain(promise))
        makers = self._makers.setdefault(artifact, []) if artifact else []
        inner_output = makers[-1] if makers and call.kind == "dynamic" else None
        if inner_output and (inner_output.node or 0) > (call.node or 0):
            source = inner_output
        else:
            makers.append(source)
        setattr(promise.val, _MARK, source)

    def _log_bytes(self) -> int | None:
        try:
            return self._log_path.stat().st_size
        except OSError:
            return None


def _spent(call: NodeCall) -> Cost:
    spent = call.spent
    return Cost(
        wall_seconds=round(time.monotonic() - call.began, 3),
        cpu_seconds=round(spent.cpu_seconds, 3),
        tokens=call.num_tokens or spent.generated_tokens,
        generated_tokens=spent.generated_tokens,
        trained_tokens=spent.trained_tokens,
        flops=spent.flops,
    )


def error_text(error: BaseException) -> str:
    """The recorded text of an error."""
    text = str(error) if isinstance(error, NemoRLError) else f"{type(error).__name__}: {error}"
    return text[:_MAX_ERROR_CHARACTERS]


def _python_values(entity: Task | WorkflowBase, outputs: dict[str, Promise]) -> list[Any]:
    """Returns a stage's outputs; for a mapped stage one per element, None if it failed."""
    ctx = FlyteContextManager.current_context()
    values = [
        TypeEngine.to_python_value(ctx, promise.val, entity.python_interface.outputs[name])
        for name, promise in outputs.items()
    ]
    return [part for value in values for part in (value if isinstance(value, list) else [value])]


def _deck(made: list[Artifact]) -> str:
    decks = [each.folder / "deck.html" for each in made]
    return next((str(deck) for deck in decks if deck.is_file() and deck.stat().st_size), "")
