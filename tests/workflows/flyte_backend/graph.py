"""Executes a graph as Flyte does: a node runs as soon as its inputs exist."""

import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flyteidl.core import dynamic_job_pb2, literals_pb2, tasks_pb2, workflow_pb2

from tests.workflows.flyte_backend.bindings import resolve
from tests.workflows.flyte_backend.buckets import Bucket
from tests.workflows.flyte_backend.catalog import Catalog
from tests.workflows.flyte_backend.containers import (
    ContainerError,
    Locations,
    Machine,
    read_outputs,
    run_container,
)
from tests.workflows.flyte_backend.records import ExecutionRecord, NodeRecord

START, END = "start-node", "end-node"
_CONTINUE = workflow_pb2.WorkflowMetadata.FAIL_AFTER_EXECUTABLE_NODES_COMPLETE


class Registry(Protocol):
    """Lookup of the tasks and workflows that the nodes of a graph refer to."""

    def task(self, name: str, version: str) -> tasks_pb2.TaskTemplate:
        """Returns a registered task."""
        ...

    def workflow(self, name: str, version: str) -> workflow_pb2.WorkflowTemplate:
        """Returns a registered workflow."""
        ...


class NodeError(Exception):
    """A node, and therefore its graph, ended without outputs."""


@dataclass
class Scope:
    """Tasks and workflows that a graph's nodes may name: the graph's, then the registered ones."""

    registry: Registry
    tasks: Mapping[tuple[str, str], tasks_pb2.TaskTemplate]
    workflows: Mapping[tuple[str, str], workflow_pb2.WorkflowTemplate]

    def task(self, name: str, version: str) -> tasks_pb2.TaskTemplate:
        """Looks it up by name and version."""
        return self.tasks.get((name, version)) or self.registry.task(name, version)

    def workflow(self, name: str, version: str) -> workflow_pb2.WorkflowTemplate:
        """Looks it up by name and version."""
        return self.workflows.get((name, version)) or self.registry.workflow(name, version)


class Walk:
    """One execution of a workflow and its graphs.

    Args:
        record: Record of the execution, which is updated.
        catalog: Cache of task outputs.
        bucket: Storage for files between containers.
        machine: Starts the containers.
        pods: Parent of a folder for each execution, with one folder per container.
        environment: Variables that Flyte gives every container of the execution.
        aborted: Event that ends the execution.
        at_once: Whether nodes whose inputs exist run in parallel, as on Flyte, or one by one.
    """

    def __init__(
        self,
        record: ExecutionRecord,
        catalog: Catalog,
        *,
        bucket: Bucket,
        machine: Machine,
        pods: Path,
        environment: dict[str, str],
        aborted: threading.Event,
        at_once: bool = False,
    ) -> None:
        self._record, self._catalog = record, catalog
        self._at_once = at_once
        self._bucket, self._machine, self._pods = bucket, machine, pods / record.name
        self._environment, self._aborted = environment, aborted

    def task(
        self,
        task: tasks_pb2.TaskTemplate,
        inputs: literals_pb2.LiteralMap,
        scope: Scope,
        path: str = "n0",
    ) -> literals_pb2.LiteralMap:
        """Runs one task as a node of a graph, with its allowed number of attempts."""
        return self._task(task, inputs, scope, path)

    def workflow(
        self,
        template: workflow_pb2.WorkflowTemplate,
        inputs: literals_pb2.LiteralMap,
        scope: Scope,
        path: str = "",
    ) -> literals_pb2.LiteralMap:
        """Runs a workflow's nodes, and its failure node when one of them fails."""
        try:
            continues = template.metadata.on_failure == _CONTINUE
            return self._graph(template, inputs, scope, path, continues=continues)
        except NodeError:
            if template.HasField("failure_node"):
                node = template.failure_node
                bindings = [each for each in node.inputs if each.var in inputs.literals]
                self._run(node, resolve(bindings, {"": inputs}), scope, f"{path}{node.id}")
            raise

    def _graph(
        self,
        graph: "workflow_pb2.WorkflowTemplate | dynamic_job_pb2.DynamicJobSpec",
        inputs: literals_pb2.LiteralMap,
        scope: Scope,
        path: str,
        *,
        continues: bool = False,
    ) -> literals_pb2.LiteralMap:
        outputs = {"": inputs, START: inputs}
        waiting = [node for node in graph.nodes if node.id not in (START, END)]
        errors: list[NodeError] = []
        running: dict[Future[literals_pb2.LiteralMap], str] = {}
        with ThreadPoolExecutor(max(len(waiting), 1)) as pool:
            while waiting or running:
                ready = [n for n in waiting if all(id_ in outputs for id_ in n.upstream_node_ids)]
                if errors and not continues:
                    ready = []
                for node in ready if self._at_once else ready[: not running]:
                    resolved = resolve(node.inputs, outputs)
                    future = pool.submit(self._run, node, resolved, scope, f"{path}{node.id}")
                    running[future] = node.id
                    waiting.remove(node)
                if not running:
                    break
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    name = running.pop(done)
                    try:
                        outputs[name] = done.result()
                    except NodeError as error:
                        errors.append(error)
        if errors:
            raise errors[0]
        if waiting:
            stuck = ", ".join(node.id for node in waiting)
            raise NodeError(f"none of {stuck} can run: no node produces their inputs")
        return resolve(graph.outputs, outputs)

    def _run(
        self,
        node: workflow_pb2.Node,
        inputs: literals_pb2.LiteralMap,
        scope: Scope,
        path: str,
    ) -> literals_pb2.LiteralMap:
        kind = node.WhichOneof("target")
        if kind == "task_node":
            reference = node.task_node.reference_id
            task = scope.task(reference.name, reference.version)
            return self._task(task, inputs, scope, path)
        if kind == "workflow_node":
            reference = node.workflow_node.sub_workflow_ref
            template = scope.workflow(reference.name, reference.version)
            return self._recorded(
                NodeRecord(path, reference.name),
                lambda _: self.workflow(template, inputs, scope, f"{path}/"),
            )
        if kind == "array_node":
            return self._array(node.array_node, inputs, scope, path)
        raise NodeError(f"{path}: a node of kind {kind!r} is not supported")

    def _array(
        self,
        array: workflow_pb2.ArrayNode,
        inputs: literals_pb2.LiteralMap,
        scope: Scope,
        path: str,
    ) -> literals_pb2.LiteralMap:
        reference = array.node.task_node.reference_id
        task = scope.task(reference.name, reference.version)
        mapped = [name for name in inputs.literals if name not in array.bound_inputs]
        size = max(len(inputs.literals[name].collection.literals) for name in mapped)
        outputs = []
        for index in range(size):
            single = literals_pb2.LiteralMap()
            for name, literal in inputs.literals.items():
                one = literal.collection.literals[index] if name in mapped else literal
                single.literals[name].CopyFrom(one)
            outputs.append(self._task(task, single, scope, f"{path}/{index}", mapped=inputs))
        gathered = literals_pb2.LiteralMap()
        for name in outputs[0].literals:
            many = [each.literals[name] for each in outputs]
            gathered.literals[name].collection.literals.extend(many)
        return gathered

    def _task(
        self,
        task: tasks_pb2.TaskTemplate,
        inputs: literals_pb2.LiteralMap,
        scope: Scope,
        path: str,
        *,
        mapped: literals_pb2.LiteralMap | None = None,
    ) -> literals_pb2.LiteralMap:
        def run(record: NodeRecord) -> literals_pb2.LiteralMap:
            cached = self._catalog.get(task, inputs)
            if cached is not None and not self._record.overwrites_cache:
                record.cached = True
                return cached
            name, content = self._attempts(task, inputs, record, mapped)
            if name == "futures.pb":
                outputs = self._dynamic(content, inputs, scope, f"{path}/")
            else:
                outputs = read_outputs(content)
            self._catalog.put(task, inputs, outputs)
            return outputs

        return self._recorded(NodeRecord(path, task.id.name), run)

    def _recorded(self, record: NodeRecord, run: "_Run") -> literals_pb2.LiteralMap:
        self._record.nodes[record.path] = record
        try:
            record.outputs = outputs = run(record)
        except Exception as error:
            record.error = f"{error}"
            record.phase = "ABORTED" if self._aborted.is_set() else "FAILED"
            raise
        record.phase = "SUCCEEDED"
        return outputs

    def _dynamic(
        self, content: bytes, inputs: literals_pb2.LiteralMap, outer: Scope, path: str
    ) -> literals_pb2.LiteralMap:
        """Executes the graph that a dynamic task has produced."""
        spec = dynamic_job_pb2.DynamicJobSpec.FromString(content)
        tasks = {(task.id.name, task.id.version): task for task in spec.tasks}
        workflows = {(w.id.name, w.id.version): w for w in spec.subworkflows}
        scope = Scope(outer.registry, {**outer.tasks, **tasks}, {**outer.workflows, **workflows})
        return self._graph(spec, inputs, scope, path)

    def _attempts(
        self,
        task: tasks_pb2.TaskTemplate,
        inputs: literals_pb2.LiteralMap,
        record: NodeRecord,
        mapped: literals_pb2.LiteralMap | None,
    ) -> tuple[str, bytes]:
        allowed = 1 + task.metadata.retries.retries
        for number in range(allowed):
            locations = self._locations(record.path, number, inputs if mapped is None else mapped)
            environment = dict(self._environment)
            if mapped is not None:
                environment["FLYTE_K8S_ARRAY_INDEX"] = record.path.rpartition("/")[2]
                environment["BATCH_JOB_ARRAY_INDEX_VAR_NAME"] = "FLYTE_K8S_ARRAY_INDEX"
            environment["FLYTE_ATTEMPT_NUMBER"] = str(number)
            try:
                return run_container(
                    task,
                    locations,
                    number,
                    bucket=self._bucket,
                    machine=self._machine,
                    environment=environment,
                    started=record.attempts.append,
                    aborted=self._aborted,
                )
            except ContainerError as error:
                last = number + 1 == allowed or not error.may_retry or self._aborted.is_set()
                if last:
                    raise NodeError(f"{task.id.name} ({record.path}): {error}") from error
        raise AssertionError("a task has at least one attempt")

    def _locations(self, path: str, number: int, inputs: literals_pb2.LiteralMap) -> Locations:
        flat = path.replace("/", "-")
        node = f"{self._record.name}/{flat}"
        self._bucket.write(f"{node}/inputs.pb", inputs.SerializeToString())
        pod = self._pods / flat / str(number)
        pod.mkdir(parents=True)
        return Locations(
            pod=pod,
            inputs=f"{node}/inputs.pb",
            outputs=f"{node}/{number}",
            raw=f"{node}/{number}/raw",
            checkpoint=f"{node}/{number}/checkpoint",
            previous_checkpoint=f"{node}/{number - 1}/checkpoint" if number else None,
        )


class _Run(Protocol):
    def __call__(self, record: NodeRecord, /) -> literals_pb2.LiteralMap: ...
