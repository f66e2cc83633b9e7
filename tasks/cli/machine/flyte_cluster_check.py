"""Runs the cluster checks with Flyte's client: registers, launches, and reads node by node."""

import re
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, Self

from flytekit.configuration import Config, ImageConfig
from flytekit.constants import CopyFileDetection
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.core.workflow import WorkflowBase
from flytekit.models.core.execution import NodeExecutionPhase as Phase
from flytekit.models.core.execution import WorkflowExecutionPhase as WorkflowPhase
from flytekit.models.core.identifier import WorkflowExecutionIdentifier
from flytekit.remote import FlyteRemote
from flytekit.tools.fast_registration import FastPackageOptions

from nemo_rl_core.config.cluster import ClusterConfig
from tasks.flyte.code_secrets import CHECKOUT, refuse_secrets
from tasks.flyte.flyte_answers import explained_answers
from tasks.pods.node_room import CheckLine
from tasks.pods.registry import refuse_missing_registry
from tasks.pods.site_pods import QUEUE_LABEL, job_settings

_FOLDER = "/home/nemo"  # the images' user may not write flytekit's default, /root
_PAUSE_SECONDS = 1.0
_ENDED_EXECUTION = (
    WorkflowPhase.SUCCEEDED,
    WorkflowPhase.FAILED,
    WorkflowPhase.ABORTED,
    WorkflowPhase.TIMED_OUT,
)
_ENDED = (Phase.SUCCEEDED, Phase.FAILED, Phase.ABORTED, Phase.TIMED_OUT, Phase.SKIPPED)


@dataclass(frozen=True)
class _Node:
    """A node of `workflows/cluster_check.py`.

    Attributes:
        name: Name of the line if the node returns none.
        advice: How to find out why the node has not ended.
    """

    name: str
    advice: str


_PENDING = "kubectl describe its pod: no room, no image, or a volume that cannot be mounted"
_JOB = (
    "look whether KubeRay's operator runs (helm install kuberay-operator, "
    "deployment/production/values-kuberay.yaml), then at kubectl describe rayjob"
)
_ADMITTED = (
    "look at kubectl describe workloads, whether Kueue admits the RayJob: its queue has no quota "
    "left, or lacks a resource or a topology that deployment/pods.yaml asks for. Once admitted, "
)
NODES = {
    "pods": _Node("pods", _PENDING),
    "bucket-written": _Node("bucket write", _PENDING),
    "bucket": _Node("bucket", _PENDING),
    "volume-back": _Node("volume back", _PENDING),
    "volume": _Node("volume", _PENDING),
    "nodes": _Node("nodes", _PENDING),
    "rights": _Node("lifetime: run", _PENDING),
    "ray": _Node("ray", _JOB),
    "engines": _Node("ray: engines", _JOB),
    "notices": _Node("notices", _PENDING),
}
"""The nodes, in the order of the workflow."""

_FIXES = {
    r"rayjobs\.ray\.io.* is forbidden|cannot create resource .rayjobs": "let Flyte make RayJobs: "
    "rbac.extraRules of deployment/production/values-s3.yaml, then helm upgrade",
    r"no matches for kind|no kind match": "install KubeRay's operator and its CRDs, then restart "
    "Flyte (deployment/production/values-kuberay.yaml)",
    r"ErrImage|ImagePull|InvalidImageName|manifest unknown": "push the images "
    "(deployment/images/build.sh), register with the same NEMO_RL_REGISTRY, and let the namespace "
    "pull them (secret nemo-rl-registry)",
    r"AccessDenied|Access Denied|Forbidden|SignatureDoesNotMatch|InvalidAccessKeyId|NoSuchBucket|"
    r"PermissionError|NoCredentials": "let the account `default` of the namespace read and "
    "write the bucket of Flyte's userDataContainer (STAGE_ROLE of "
    "deployment/production/cluster.yaml)",
    r"exceeded quota|exceed limits": "raise the namespace's ResourceQuota "
    "(deployment/production/cluster.yaml), or ask for a smaller shape",
    r"persistentvolumeclaim|Multi-Attach|FailedMount|FailedAttach": "make the claim nemo-rl-store "
    "in this namespace, with ReadWriteMany (deployment/production/cluster.yaml)",
    r"OOMKilled": "let pods have the memory that they ask for (LimitRange of the namespace)",
    r"never has|cluster never|NEMO_RL_CLUSTER_GPUS": "ask for a smaller shape, or correct "
    "NEMO_RL_CLUSTER_GPUS in Flyte's default-env-vars",
    r"No module named|ModuleNotFound": "build the images of this checkout, and push them",
}
"""Fixes for errors of Flyte, by a pattern of the error."""


class CheckRun:
    """A launched workflow of checks."""

    def __init__(self, remote: FlyteRemote, execution: WorkflowExecutionIdentifier) -> None:
        self._remote, self._execution = remote, execution
        self.name, self.endpoint = execution.name, remote.config.platform.endpoint

    @classmethod
    def start(
        cls,
        config: Path | None,
        workflow: WorkflowBase,
        *,
        project: str,
        domain: str,
        cluster: ClusterConfig,
        wait_seconds: float,
        autoscaled: bool = False,
    ) -> Self:
        """Registers the workflow with the code of this checkout, and launches it."""
        flyte_config = Config.auto(str(config) if config else None)
        refuse_missing_registry(flyte_config.platform.endpoint)
        refuse_secrets(CHECKOUT)
        remote = FlyteRemote(flyte_config, default_project=project, default_domain=domain)
        inputs = {
            "cluster": cluster,
            "key": uuid.uuid4().hex,
            "wait_seconds": wait_seconds,
            "autoscaled": autoscaled,
        }
        explained = explained_answers(
            "the checks cannot be launched",
            flyte_config.platform.endpoint,
            project=project,
            domain=domain,
            what="workflows and executions",
        )
        # On slow machines flytekit writes to stdout how long packing took; --json is for programs.
        with redirect_stdout(sys.stderr), explained:
            registered = remote.register_script(
                workflow,
                image_config=ImageConfig.auto_default_image(),
                destination_dir=_FOLDER,
                source_path=str(CHECKOUT),
                module_name=workflow.__module__,
                fast_package_options=FastPackageOptions([], copy_style=CopyFileDetection.ALL),
            )
            execution = remote.execute(registered, inputs=inputs)
        return cls(remote, execution.id)

    def lines(self, *, timeout_seconds: float, interrupted: Event) -> Iterator[CheckLine]:
        """Yields the lines of each check when it has ended.

        Checks that have not ended within the time, or at an interrupt, are aborted and reported
        as failed.
        """
        deadline = time.monotonic() + timeout_seconds
        open_nodes = dict(NODES)
        states: dict[str, str] = {}
        ended = ""
        while open_nodes and not ended and time.monotonic() < deadline:
            if interrupted.is_set():
                break
            ended = self._end()  # read before the nodes, which do not change afterwards
            nodes, _ = self._remote.client.list_node_executions(self._execution, limit=100)
            for node in nodes:
                states[node.id.node_id] = Phase.enum_to_string(node.closure.phase)
                if node.id.node_id in open_nodes and node.closure.phase in _ENDED:
                    yield from self._lines_of_ended(node, open_nodes.pop(node.id.node_id))
            if "bucket-written" not in open_nodes and states["bucket-written"] != "SUCCEEDED":
                open_nodes.pop("bucket", None)  # nothing to read
            if open_nodes and not ended:
                interrupted.wait(_PAUSE_SECONDS)
        why = f"within {timeout_seconds:g} s"
        if ended:
            why = f"before the execution: {ended}"
        elif interrupted.is_set():
            why = "before the interrupt"
        if open_nodes and not ended:
            self._remote.client.terminate_execution(self._execution, "cluster-check gave up")
        for id_, node in open_nodes.items():
            result = f"did not end {why}; Flyte reports it as {states.get(id_, 'not started')}"
            yield CheckLine(name=node.name, state="fail", found=result, fix=_advice(node))

    def _end(self) -> str:
        """Returns how the execution has ended; empty while it runs."""
        closure = self._remote.client.get_execution(self._execution).closure
        if closure.phase not in _ENDED_EXECUTION:
            return ""
        phase = str(WorkflowPhase.enum_to_string(closure.phase))
        return f"{phase}, {closure.error.message[:300]}" if closure.error else phase

    def _lines_of_ended(self, execution: Any, node: _Node) -> Iterator[CheckLine]:
        if execution.closure.phase != Phase.SUCCEEDED:
            error = execution.closure.error
            message = error.message if error else Phase.enum_to_string(execution.closure.phase)
            yield line_of_error(node.name, message)
            return
        outputs = self._remote.client.get_node_execution_data(execution.id).full_outputs
        literal = outputs.literals.get("o0")
        if literal is not None and literal.collection is not None:
            context = FlyteContextManager.current_context()
            yield from TypeEngine.to_python_value(context, literal, list[CheckLine])


def _advice(node: _Node) -> str:
    """Returns the advice for a waiting node; with Kueue, a RayJob waits for its queue first."""
    is_queued = node.advice == _JOB and QUEUE_LABEL in job_settings().labels
    return _ADMITTED + node.advice if is_queued else node.advice


def line_of_error(name: str, message: str) -> CheckLine:
    """Returns the line of a check that Flyte could not run, with the fix for its error."""
    message_lines = [line.strip() for line in message.splitlines() if line.strip()]
    for pattern, fix in _FIXES.items():
        for line in message_lines:
            if re.search(pattern, line):
                return CheckLine(name=name, state="fail", found=line[:300], fix=fix)
    # The cause is at the end of a trace, and at the beginning of every other message.
    cause = (
        message_lines[-1]
        if "Traceback" in message
        else message_lines[0]
        if message_lines
        else "no error was given"
    )
    fix = "look at the logs of its pod (kubectl logs, or Flyte's console)"
    return CheckLine(name=name, state="fail", found=cause[:300], fix=fix)
