"""The services that flytekit's client calls: registration, launches and uploads."""

import hashlib
import re
import threading
import uuid
from concurrent import futures
from pathlib import Path
from typing import Any, Self

import grpc
from flyteidl.admin import common_pb2 as common
from flyteidl.admin import execution_pb2 as executions
from flyteidl.admin import launch_plan_pb2 as launch_plans
from flyteidl.admin import node_execution_pb2 as node_executions
from flyteidl.admin import project_pb2 as projects
from flyteidl.admin import task_execution_pb2 as task_executions
from flyteidl.admin import task_pb2 as tasks
from flyteidl.admin import version_pb2 as versions
from flyteidl.admin import workflow_pb2 as workflows
from flyteidl.core import compiler_pb2, execution_pb2, identifier_pb2, literals_pb2
from flyteidl.service import admin_pb2_grpc, dataproxy_pb2, dataproxy_pb2_grpc

from tests.workflows.flyte_backend.buckets import Bucket, FolderBucket
from tests.workflows.flyte_backend.catalog import Catalog
from tests.workflows.flyte_backend.containers import Machine, Processes
from tests.workflows.flyte_backend.graph import Scope, Walk
from tests.workflows.flyte_backend.launch_plans import refusals
from tests.workflows.flyte_backend.records import Attempt, ExecutionRecord, NodeRecord

PROJECT, DOMAIN = "flytesnacks", "development"
_HOST = "127.0.0.1"

Key = tuple[str, str]


def _key(identifier: identifier_pb2.Identifier) -> Key:
    return identifier.name, identifier.version


class Backend(admin_pb2_grpc.AdminServiceServicer, dataproxy_pb2_grpc.DataProxyServiceServicer):
    """Flyte's admin service, its data proxy and its engine. A context manager.

    Args:
        root: A folder for the bucket (`blobs`) and the pods' disks and logs (`pods`).
        bucket: Storage for files between containers; by default the folder `blobs`.
        machine: Starts the containers; by default as processes of this machine.
        at_once: Whether nodes of a graph run in parallel; see `Walk`.

    Attributes:
        tasks, workflows, launch_plans: Registered entities, by name and version.
        active: Active version of each launch plan.
        executions: Every launch, by its name.

    Example:
        >>> with Backend(folder) as backend:                               # doctest: +SKIP
        ...     subprocess.run(["pyflyte", "--config", backend.config, "register", "workflows"])
    """

    def __init__(
        self,
        root: Path,
        *,
        bucket: Bucket | None = None,
        machine: Machine | None = None,
        at_once: bool = False,
    ) -> None:
        self._at_once = at_once
        self._bucket, self._pods = bucket or FolderBucket(root / "blobs"), root / "pods"
        self._machine = machine or Processes()
        self.tasks: dict[Key, tasks.TaskSpec] = {}
        self.workflows: dict[Key, workflows.WorkflowSpec] = {}
        self.launch_plans: dict[Key, launch_plans.LaunchPlanSpec] = {}
        self.active: dict[str, str] = {}
        self.executions: dict[str, ExecutionRecord] = {}
        self._specs: dict[str, executions.ExecutionCreateRequest] = {}
        self._aborted: dict[str, threading.Event] = {}
        self._walks: list[threading.Thread] = []
        self._catalog = Catalog()
        self._projects = {(PROJECT, DOMAIN)}
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, self._server)
        dataproxy_pb2_grpc.add_DataProxyServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(f"{_HOST}:0")
        self._root = root

    @property
    def config(self) -> Path:
        """A configuration file for `pyflyte --config`."""
        path = self._root / "flyte.yaml"
        path.write_text(f"admin:\n  endpoint: dns:///{_HOST}:{self._port}\n  insecure: true\n")
        return path

    def __enter__(self) -> Self:
        self._root.mkdir(parents=True, exist_ok=True)
        self._bucket.__enter__()
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for event in self._aborted.values():
            event.set()
        for walk in self._walks:
            walk.join(60)
        self._server.stop(1).wait()
        self._bucket.__exit__()

    # Lookups by the graph.

    def task(self, name: str, version: str) -> Any:
        """Returns the template of a registered task."""
        return self.tasks[name, version].template

    def workflow(self, name: str, version: str) -> Any:
        """Returns the template of a registered workflow."""
        return self.workflows[name, version].template

    # Registration.

    def CreateTask(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Registers a task; an existing one must be identical."""
        self._keep(self.tasks, request, context)
        return tasks.TaskCreateResponse()

    def CreateWorkflow(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Registers a workflow."""
        self._keep(self.workflows, request, context)
        return workflows.WorkflowCreateResponse()

    def CreateLaunchPlan(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Registers a launch plan; as Flyte does, refuses one that it could not launch."""
        workflow = self.workflows.get(_key(request.spec.workflow_id))
        interface = workflow and workflow.template.interface
        wrong = list(refusals(request, interface, projects=self._projects))
        if wrong:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "; ".join(wrong))
        self._keep(self.launch_plans, request, context)
        return launch_plans.LaunchPlanCreateResponse()

    def _keep(self, kept: dict[Key, Any], request: Any, context: grpc.ServicerContext) -> None:
        key = _key(request.id)
        if key not in kept:
            kept[key] = request.spec
        elif _meaning(kept[key]) == _meaning(request.spec):
            context.abort(grpc.StatusCode.ALREADY_EXISTS, f"{key} already exists")
        else:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{key} exists with other content")

    def GetTask(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Returns a task with its compiled form."""
        spec = self._find(self.tasks, request, context)
        closure = tasks.TaskClosure(compiled_task=compiler_pb2.CompiledTask(template=spec.template))
        return tasks.Task(id=request.id, closure=closure)

    def GetWorkflow(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Returns a workflow with everything that its graph reaches."""
        spec = self._find(self.workflows, request, context)
        version = request.id.version
        compiled = compiler_pb2.CompiledWorkflowClosure(
            primary=compiler_pb2.CompiledWorkflow(template=spec.template),
            sub_workflows=[
                compiler_pb2.CompiledWorkflow(template=each) for each in spec.sub_workflows
            ],
            tasks=[
                compiler_pb2.CompiledTask(template=task.template)
                for (_, of), task in self.tasks.items()
                if of == version
            ],
        )
        closure = workflows.WorkflowClosure(compiled_workflow=compiled)
        return workflows.Workflow(id=request.id, closure=closure)

    def GetLaunchPlan(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Returns a launch plan with its expected inputs and outputs."""
        self._find(self.launch_plans, request, context)
        return self._launch_plan(_key(request.id))

    def GetActiveLaunchPlan(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Returns the active version of a launch plan."""
        name = request.id.name
        if name not in self.active:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no active launch plan {name}")
        return self._launch_plan((name, self.active[name]))

    def ListLaunchPlans(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Lists the versions of one launch plan or of all."""
        keys = [key for key in self.launch_plans if request.id.name in ("", key[0])]
        page, token = _page(keys, request, context, sorts=True)
        return launch_plans.LaunchPlanList(
            launch_plans=[self._launch_plan(key) for key in page], token=token
        )

    def ListActiveLaunchPlans(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Lists the active version of each launch plan."""
        page, token = _page([*self.active.items()], request, context, sorts=True)
        return launch_plans.LaunchPlanList(
            launch_plans=[self._launch_plan(key) for key in page], token=token
        )

    def ListLaunchPlanIds(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Lists the names of launch plans, without versions."""
        names = [*dict.fromkeys(name for name, _ in self.launch_plans)]
        page, token = _page(names, request, context)
        entities = [
            common.NamedEntityIdentifier(project=PROJECT, domain=DOMAIN, name=name) for name in page
        ]
        return common.NamedEntityIdentifierList(entities=entities, token=token)

    def ListWorkflows(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Lists the versions of one workflow or of all, without their graphs."""
        keys = [key for key in self.workflows if request.id.name in ("", key[0])]
        page, token = _page(keys, request, context, sorts=True)
        identifiers = [self.workflows[key].template.id for key in page]
        return workflows.WorkflowList(
            workflows=[workflows.Workflow(id=each) for each in identifiers], token=token
        )

    def _launch_plan(self, key: Key) -> Any:
        spec = self.launch_plans[key]
        interface = self.workflows[_key(spec.workflow_id)].template.interface
        is_active = self.active.get(key[0]) == key[1]
        closure = launch_plans.LaunchPlanClosure(
            state=launch_plans.ACTIVE if is_active else launch_plans.INACTIVE,
            expected_inputs=spec.default_inputs,
            expected_outputs=interface.outputs,
        )
        identifier = identifier_pb2.Identifier(
            resource_type=identifier_pb2.LAUNCH_PLAN,
            project=PROJECT,
            domain=DOMAIN,
            name=key[0],
            version=key[1],
        )
        return launch_plans.LaunchPlan(id=identifier, spec=spec, closure=closure)

    def UpdateLaunchPlan(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Activates or deactivates a launch plan."""
        self._find(self.launch_plans, request, context)
        name, version = _key(request.id)
        if request.state == launch_plans.ACTIVE:
            self.active[name] = version
        elif self.active.get(name) == version:
            del self.active[name]
        return launch_plans.LaunchPlanUpdateResponse()

    def _find(self, kept: dict[Key, Any], request: Any, context: grpc.ServicerContext) -> Any:
        key = _key(request.id)
        if key not in kept:
            context.abort(grpc.StatusCode.NOT_FOUND, f"{key} was never registered")
        return kept[key]

    # Launches.

    def CreateExecution(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Starts to execute the launch plan's workflow."""
        spec = self._find_plan(request, context)
        name = request.name or f"f{uuid.uuid4().hex[:12]}"
        self._refuse_start(name, request.spec.launch_plan.name, spec, context)
        inputs = literals_pb2.LiteralMap()
        for key, parameter in spec.default_inputs.parameters.items():
            if parameter.HasField("default"):
                inputs.literals[key].CopyFrom(parameter.default)
        inputs.MergeFrom(spec.fixed_inputs)
        for key, literal in request.inputs.literals.items():
            inputs.literals[key].CopyFrom(literal)
        labels = {**spec.labels.values, **request.spec.labels.values}
        record = ExecutionRecord(
            name,
            request.spec.launch_plan.name,
            inputs,
            labels=labels,
            overwrites_cache=request.spec.overwrite_cache,
        )
        self.executions[name], self._specs[name] = record, request
        self._aborted[name] = threading.Event()
        walk = threading.Thread(target=self._walk, args=(record, spec), daemon=True)
        self._walks.append(walk)
        walk.start()
        return executions.ExecutionCreateResponse(id=_execution_id(name))

    def _refuse_start(self, name: str, plan: str, spec: Any, context: grpc.ServicerContext) -> None:
        """Aborts as flyteadmin 1.16 does (execution_manager.go, execution_validator.go)."""
        if len(name) > 63 or not re.fullmatch(r"[a-z][a-z\-0-9]*", name):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"invalid name format: {name}")
        most = spec.concurrency_policy.max
        running = [
            each
            for each in self.executions.values()
            if each.launch_plan == plan and each.phase == "RUNNING"
        ]
        if most and len(running) >= most:
            message = (
                f"concurrency limit ({most}) reached for launch plan {plan}; skipping execution"
            )
            context.abort(grpc.StatusCode.ALREADY_EXISTS, message)
        if name in self.executions:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, f"execution {name} already exists")

    def _find_plan(self, request: Any, context: grpc.ServicerContext) -> Any:
        identifier = request.spec.launch_plan
        if identifier.resource_type != identifier_pb2.LAUNCH_PLAN:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "only launch plans can be launched here")
        if _key(identifier) not in self.launch_plans:
            context.abort(grpc.StatusCode.NOT_FOUND, f"{_key(identifier)} was never registered")
        return self.launch_plans[_key(identifier)]

    def _walk(self, record: ExecutionRecord, plan: Any) -> None:
        spec = self.workflows[_key(plan.workflow_id)]
        sub_workflows = {(each.id.name, each.id.version): each for each in spec.sub_workflows}
        environment = {
            "FLYTE_INTERNAL_EXECUTION_ID": record.name,
            "FLYTE_INTERNAL_EXECUTION_PROJECT": PROJECT,
            "FLYTE_INTERNAL_EXECUTION_DOMAIN": DOMAIN,
            "FLYTE_INTERNAL_EXECUTION_WORKFLOW": plan.workflow_id.name,
            "FLYTE_INTERNAL_EXECUTION_LAUNCHPLAN": record.launch_plan,
        }
        walk = Walk(
            record,
            self._catalog,
            bucket=self._bucket,
            machine=self._machine,
            pods=self._pods,
            environment=environment,
            aborted=self._aborted[record.name],
            at_once=self._at_once,
        )
        try:
            scope = Scope(self, {}, sub_workflows)
            record.outputs = walk.workflow(spec.template, record.inputs, scope)
            record.phase = "SUCCEEDED"
        except Exception as error:  # noqa: BLE001  (any error in a graph ends it)
            record.error = f"{error}"
            record.phase = "ABORTED" if self._aborted[record.name].is_set() else "FAILED"

    def GetExecution(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Returns the state of a launch."""
        record = self._record(request.id.name, context)
        phase = execution_pb2.WorkflowExecution.Phase.Value(record.phase)
        closure = executions.ExecutionClosure(phase=phase)
        if record.error:
            closure.error.message = record.error
        spec = self._specs[record.name].spec
        return executions.Execution(id=_execution_id(record.name), spec=spec, closure=closure)

    def GetExecutionData(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Returns the inputs and outputs of a launch."""
        record = self._record(request.id.name, context)
        return executions.WorkflowExecutionGetDataResponse(
            full_inputs=record.inputs, full_outputs=record.outputs
        )

    def TerminateExecution(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Ends a launch and its running container."""
        record = self._record(request.id.name, context)
        self._aborted[record.name].set()
        return executions.ExecutionTerminateResponse()

    def ListNodeExecutions(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Lists the nodes of the workflow, without those inside a dynamic task or sub-workflow."""
        record = self._record(request.workflow_execution_id.name, context)
        nodes = [node for path, node in [*record.nodes.items()] if "/" not in path]
        page, token = _page(nodes, request, context, sorts=True)
        listed = [self._node_execution(record, node) for node in page]
        return node_executions.NodeExecutionList(node_executions=listed, token=token)

    def GetNodeExecutionData(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Returns the outputs of a node."""
        record = self._record(request.id.execution_id.name, context)
        node = record.nodes[request.id.node_id]
        return node_executions.NodeExecutionGetDataResponse(full_outputs=node.outputs)

    def ListTaskExecutions(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Lists the attempts of a node's task; none if it was cached or is not a task."""
        identifier = request.node_execution_id
        node = self._record(identifier.execution_id.name, context).nodes[identifier.node_id]
        page, token = _page(node.attempts, request, context, sorts=True)
        listed = [_task_execution(identifier, node, each) for each in page]
        return task_executions.TaskExecutionList(task_executions=listed, token=token)

    def GetTaskExecution(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Returns an attempt."""
        return _task_execution(request.id.node_execution_id, *self._attempt(request.id, context))

    def GetTaskExecutionData(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Returns the outputs of an attempt that succeeded."""
        node, attempt = self._attempt(request.id, context)
        outputs = node.outputs if attempt is node.attempts[-1] else None
        return task_executions.TaskExecutionGetDataResponse(full_outputs=outputs)

    def _attempt(
        self, identifier: identifier_pb2.TaskExecutionIdentifier, context: grpc.ServicerContext
    ) -> tuple[NodeRecord, Attempt]:
        parent = identifier.node_execution_id
        node = self._record(parent.execution_id.name, context).nodes[parent.node_id]
        return node, node.attempts[identifier.retry_attempt]

    def _node_execution(self, record: ExecutionRecord, node: NodeRecord) -> Any:
        phase = execution_pb2.NodeExecution.Phase.Value(node.phase)
        closure = node_executions.NodeExecutionClosure(phase=phase)
        if node.error:
            closure.error.message = node.error
        identifier = identifier_pb2.NodeExecutionIdentifier(
            node_id=node.path, execution_id=_execution_id(record.name)
        )
        return node_executions.NodeExecution(id=identifier, closure=closure)

    def _record(self, name: str, context: grpc.ServicerContext) -> ExecutionRecord:
        if name not in self.executions:
            context.abort(grpc.StatusCode.NOT_FOUND, f"there is no execution {name}")
        return self.executions[name]

    # Other calls of the client.

    def GetVersion(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Returns a made-up version of the control plane."""
        return versions.GetVersionResponse(control_plane_version=versions.Version(Version="v1.16"))

    def GetDomains(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Returns the only domain."""
        return projects.GetDomainsResponse(domains=[projects.Domain(id=DOMAIN, name=DOMAIN)])

    def CreateUploadLocation(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        """Returns a path in the bucket and a URL that accepts the bytes for it."""
        digest = request.filename_root or hashlib.sha256(request.content_md5).hexdigest()[:24]
        path = f"uploads/{digest}/{request.filename}"
        return dataproxy_pb2.CreateUploadLocationResponse(
            signed_url=self._bucket.upload_url(path, request.content_md5),
            native_url=self._bucket.url(path),
        )


def _task_execution(
    parent: identifier_pb2.NodeExecutionIdentifier, node: NodeRecord, attempt: Attempt
) -> task_executions.TaskExecution:
    """Describes an attempt: the last one has the node's phase, and all before it have failed."""
    phase = node.phase if attempt is node.attempts[-1] else "FAILED"
    task = identifier_pb2.Identifier(resource_type=identifier_pb2.TASK, name=node.entity)
    return task_executions.TaskExecution(
        id=identifier_pb2.TaskExecutionIdentifier(
            task_id=task,
            node_execution_id=parent,
            retry_attempt=node.attempts.index(attempt),
        ),
        closure=task_executions.TaskExecutionClosure(
            phase=execution_pb2.TaskExecution.Phase.Value(phase)
        ),
    )


def _page(
    entries: list[Any], request: Any, context: grpc.ServicerContext, *, sorts: bool = False
) -> tuple[list[Any], str]:
    """Returns the requested page of the entries and the token of the next page."""
    if request.limit <= 0:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "invalid value for limit")
    if request.sort_by.key:
        if request.sort_by.key not in ("created_at", "name", "version") or not sorts:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "invalid sort_key")
        if request.sort_by.direction == common.Sort.DESCENDING:
            entries = entries[::-1]
    begin = int(request.token or 0)
    end = begin + request.limit
    return entries[begin:end], str(end) if end < len(entries) else ""


def _meaning(spec: Any) -> bytes:
    """Returns bytes that are equal for two registrations of the same entity."""
    same = type(spec).FromString(spec.SerializeToString())
    for template in [same.template, *same.sub_workflows] if hasattr(same, "sub_workflows") else []:
        for node in template.nodes:
            # flytekit writes them in the order of a set, which differs between processes.
            node.upstream_node_ids.sort()
    return same.SerializeToString(deterministic=True)


def _execution_id(name: str) -> identifier_pb2.WorkflowExecutionIdentifier:
    return identifier_pb2.WorkflowExecutionIdentifier(project=PROJECT, domain=DOMAIN, name=name)
