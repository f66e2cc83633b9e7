"""Stages with Ray workers: Flyte's Ray plugin, with one task per shape.

A task's resources are fixed at registration, before the recipe sets the number of GPUs. So a stage
is declared once, on the smallest shape, and `stage.on(cluster)` returns the same stage on another
shape: a separate task, created inside a `@dynamic`, where the recipe is known. Its container finds
it by the shape's name.

With `cluster.lifetime: run` it is a plain task of the same name (`experimental/run_stage.py`).
"""

import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from flytekit.configuration import SerializationSettings
from flytekit.core.base_task import TaskMetadata, TaskResolverMixin
from flytekit.core.context_manager import ExecutionParameters, FlyteContext, FlyteContextManager
from flytekit.core.python_auto_container import default_task_resolver
from flytekit.core.tracker import TrackedInstance
from flytekit.extend import TaskPlugins
from flytekit.models.literals import LiteralMap
from flytekitplugins.ray import HeadNodeConfig, WorkerNodeConfig
from flytekitplugins.ray.task import RayFunctionTask
from pydantic import BaseModel

from nemo_rl_core.checkpoints import stop_request
from nemo_rl_core.config.cluster import ClusterConfig, Lifetime
from nemo_rl_core.config.placement import DedicatedBundles
from nemo_rl_core.distributed.resources import Resource, ResourceManager
from nemo_rl_core.distributed.virtual_cluster import start_ray
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.produce import is_dry_run
from nemo_rl_core.telemetry.waiting import waiting
from tasks.flyte import local
from tasks.pods import pods
from tasks.pods.resources import Kind
from tasks.pods.shapes import Shape, laptop, shape_named, shape_of
from tasks.pods.site_pods import job_settings
from tasks.ray_cluster.cluster_volume import downloaded_to_the_store, remove_uploaded
from tasks.ray_cluster.stopping import StopSignals

CLUSTER_GPUS = "NEMO_RL_CLUSTER_GPUS"
"""The variable with the number of GPUs of the cluster, or its maximum."""

_WAIT_SECONDS = 900.0
"""Time limit for worker pods after the head: an image of 10 GB on a new machine takes minutes."""


@dataclass(frozen=True)
class RayStage:
    """The parts of a `RayJobConfig` that `RayFunctionTask` reads, from a shape."""

    shape: Shape
    kind: Kind
    address: str | None = None
    runtime_env: dict[str, Any] | None = None
    enable_autoscaling: bool = False  # a stage needs all of its workers from the first step
    autoscaler_options: None = None
    shutdown_after_job_finishes: bool = True
    ttl_seconds_after_finished: int = 0  # the next stage may have its GPUs

    @property
    def head_node_config(self) -> HeadNodeConfig:
        """The head runs no workers."""
        return HeadNodeConfig(ray_start_params={"num-cpus": "0"}, pod_template=pods.head_pod())

    @property
    def worker_node_config(self) -> list[WorkerNodeConfig]:
        """One group per machine size."""
        return [
            WorkerNodeConfig(
                group_name=f"gpus-{nodes.num_gpus}" if nodes.num_gpus else "workers",
                replicas=nodes.count,
                ray_start_params={},
                pod_template=pods.worker_pod(self.shape, nodes),
            )
            for nodes in self.shape.nodes
        ]


class RayStageTask(RayFunctionTask):
    """A stage on a Ray cluster of one shape; in a local run, all stages share one small runtime."""

    lifetime: ClassVar[Lifetime] = "stage"

    def __init__(self, task_config: RayStage, task_function: Callable[..., Any], **options: Any):
        self._options = options
        image = task_config.kind.on(task_config.shape).image
        super().__init__(
            task_config=task_config,
            task_function=task_function,
            **{**options, "container_image": image},
        )
        self._others: dict[str, RayStageTask] = {}
        self._of_run: RayStageTask | None = None
        self._returned: Any = None

    @property
    def metadata(self) -> TaskMetadata:
        """Flyte's settings of the task, with the site's settings of RayJobs."""
        settings = super().metadata
        state = FlyteContextManager.current_context().execution_state
        if state is not None and state.is_local_execution():
            return settings
        job, kind = job_settings(), self.task_config.kind
        # Flyte puts a task's labels only on its RayJob, not on the pods. The same object is
        # modified, since flytekit stores in it whether there is a deck.
        settings.labels = dict(job.labels) or None
        settings.annotations = dict(job.annotations) or None
        settings.interruptible = kind.interruptible or (job.spot_training and kind.resumes)
        return settings

    @property
    def shape(self) -> Shape:
        """The shape of its reserved cluster."""
        return self.task_config.shape

    def on(
        self, config: ClusterConfig, dedicated: Sequence[DedicatedBundles] = ()
    ) -> "RayStageTask":
        """Returns this stage on the cluster of a recipe; call inside a `@dynamic`.

        `dedicated` are bundles of engines and scoring models in addition to the GPUs of the section
        `cluster`. Local runs have one runtime for all shapes.
        """
        if not isinstance(config, ClusterConfig):
            raise ConfigError(
                f"the size of {self.name} is requested before its recipe is known",
                expected="a ClusterConfig, as there is one inside a @dynamic",
                got=type(config).__name__,
                fix="call the stage in a @dynamic that has its config as an input",
            )
        state = FlyteContextManager.current_context().execution_state
        if state is not None and state.is_local_execution():
            return self
        shape = shape_of(config, dedicated)
        check_offered(shape)
        stage = self.on_shape(shape)
        return stage if config.lifetime == "stage" else stage.of_run()

    def on_shape(self, shape: Shape) -> "RayStageTask":
        """Returns the task for a shape, the same object at every call."""
        if shape == self.shape:
            return self
        if shape.name not in self._others:
            config = RayStage(shape, self.task_config.kind)
            other = RayStageTask(config, self.task_function, **self._options)
            other._name = f"{self.name}.{shape.name.replace(':', '_')}"
            self._place(other)
            self._others[shape.name] = other
        return self._others[shape.name]

    def of_run(self) -> "RayStageTask":
        """Returns this stage on the cluster of its run, the same object at every call."""
        if self._of_run is None:
            # Imported by name, since that file imports this one.
            run_stage = importlib.import_module("tasks.ray_cluster.experimental.run_stage")
            of_run: RayStageTask = run_stage.RunStageTask(self)
            self._place(of_run)
            self._of_run = of_run
        return self._of_run

    def _place(self, other: "RayStageTask") -> None:
        """Gives another form of this stage the module and name of this one.

        A task that is made in a @dynamic ignores the resolver that it is given, and flytekit
        prefixes its name, which is in the cache key, with the program that made it.
        """
        other.set_resolver(by_shape)
        other._instantiated_in = self._instantiated_in

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the stage, with inputs that do not contain the lifetime of its cluster."""
        inputs = {name: _without_lifetime(value) for name, value in kwargs.items()}
        return super().__call__(*args, **inputs)

    def dispatch_execute(self, ctx: FlyteContext, input_literal_map: LiteralMap) -> Any:
        """Runs the stage; on a cluster, on inputs that the workers' pods can read."""
        state = ctx.execution_state
        if state is None or state.is_local_execution():
            return super().dispatch_execute(ctx, input_literal_map)
        with downloaded_to_the_store(ctx) as shared:
            literals = super().dispatch_execute(shared, input_literal_map)
        remove_uploaded(self._returned)  # uploaded by the conversion to literals
        return literals

    def execute(self, **kwargs: Any) -> Any:
        """Runs the function of the stage; on a cluster, SIGTERM saves its step and exits with 143.

        The handler is set here, since Ray sets its own when the stage joins it.
        """
        with _stopped_gracefully() if local.on_cluster() else nullcontext():
            self._returned = super().execute(**kwargs)
        return self._returned

    def pre_execute(self, user_params: ExecutionParameters) -> ExecutionParameters:
        """Starts Ray or reuses an earlier stage's; on a cluster, waits for the stage's workers."""
        state = FlyteContextManager.current_context().execution_state
        if state is not None and not state.is_local_execution():
            params = super().pre_execute(user_params)
            import ray

            await_workers(self.shape, ray.cluster_resources)
            return params
        if not is_dry_run():
            start_ray()
            with waiting("importing torch and transformers"):  # what every such stage imports
                for library in ("torch", "transformers.modeling_utils"):
                    importlib.import_module(library)
        return user_params


def _without_lifetime(value: Any) -> Any:
    """Removes settings that do not change results, and so are in no key, from a stage's config."""
    cluster = getattr(value, "cluster", None)
    if not isinstance(value, BaseModel) or not isinstance(cluster, ClusterConfig):
        return value
    if cluster.lifetime == "stage":
        return value
    return value.model_copy(update={"cluster": cluster.model_copy(update={"lifetime": "stage"})})


@contextmanager
def _stopped_gracefully() -> Iterator[None]:
    """Exposes the process to the pod's hook, and makes SIGTERM stop it after a save."""
    pid = Path(pods.STAGE_PID)
    pid.write_text(str(os.getpid()))
    try:
        with StopSignals(stop_request.ask):
            yield
    finally:
        pid.unlink(missing_ok=True)


TaskPlugins.register_pythontask_plugin(RayStage, RayStageTask)


def ray_stage(kind: Kind) -> dict[str, Any]:
    """Returns the task options of a stage, on the smallest shape; see `RayStageTask.on`."""
    return {"task_config": RayStage(laptop(), kind)}


class _ByShape(TrackedInstance, TaskResolverMixin):
    """Resolves a stage on a shape in its container, by module, name and shape."""

    def name(self) -> str:
        return "by_shape"

    def loader_args(self, settings: SerializationSettings, task: RayStageTask) -> list[str]:
        lifetime = [] if task.lifetime == "stage" else ["lifetime", task.lifetime]
        loader = default_task_resolver.loader_args(settings, task)
        return [*loader, "shape", task.shape.name, *lifetime]

    def load_task(self, loader_args: list[str]) -> RayStageTask:
        _, module, _, name, _, shape, *lifetime = loader_args
        stage = getattr(importlib.import_module(module), name).on_shape(shape_named(shape))
        return stage.of_run() if lifetime else stage

    def get_all_tasks(self) -> list[RayStageTask]:
        """Returns no tasks: stages are registered with their declared shape."""
        return []


by_shape = _ByShape()


def check_offered(shape: Shape) -> None:
    """Raises if `NEMO_RL_CLUSTER_GPUS` is lower than the shape: KubeRay would wait forever."""
    offered = os.environ.get(CLUSTER_GPUS)
    if offered is not None:
        cluster = ResourceManager.of_ray({"GPU": float(offered)}, name="the cluster")
        cluster.check(
            {"GPU": shape.num_gpus},
            fix=f"choose a smaller cluster.shape, or correct {CLUSTER_GPUS} on the cluster",
        )


def await_workers(
    shape: Shape,
    found: Callable[[], Mapping[str, float]],
    *,
    wait_seconds: float = _WAIT_SECONDS,
    pause_seconds: float = 2.0,
) -> None:
    """Waits for the workers of the shape to join; raises after the time limit."""
    required: dict[Resource, float] = {"GPU": shape.num_gpus, "CPU": shape.num_nodes}
    deadline = time.monotonic() + wait_seconds
    while True:
        resources = ResourceManager.of_ray(found(), name="the stage's Ray cluster")
        if not resources.missing(required):
            return
        if time.monotonic() >= deadline:
            resources.check(
                required,
                fix="look at the pods of the RayCluster (kubectl describe pod): no node of that "
                "kind is free, or the image cannot be pulled",
            )
        time.sleep(pause_seconds)
