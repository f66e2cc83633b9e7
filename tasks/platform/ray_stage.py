"""A stage that drives workers: Ray's plugin, with one task a shape.

A task's resources are fixed when it is registered, and the recipe that says how many GPUs are
wanted comes later. So a stage is declared once, on the smallest shape, and `stage.on(cluster)`
gives the same stage on another: a task of its own, made where the recipe is known, inside a
`@dynamic`. Its container finds it again by the shape's name.
"""

import importlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flytekit.configuration import SerializationSettings
from flytekit.core.base_task import TaskResolverMixin
from flytekit.core.context_manager import ExecutionParameters, FlyteContextManager
from flytekit.core.python_auto_container import default_task_resolver
from flytekit.core.tracker import TrackedInstance
from flytekit.extend import TaskPlugins
from flytekitplugins.ray import HeadNodeConfig, WorkerNodeConfig
from flytekitplugins.ray.task import RayFunctionTask

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.distributed.resources import Resource, ResourceManager
from nemo_rl_core.distributed.virtual_cluster import start_ray
from nemo_rl_core.errors import ConfigError
from tasks.platform import pods
from tasks.platform.resources import Kind, Shape, laptop, shape_of

CLUSTER_GPUS = "NEMO_RL_CLUSTER_GPUS"
"""The variable in which a cluster tells its pods how many GPUs it has, or may grow to."""

_WAIT_SECONDS = 900.0
"""For worker pods that come after the head: an image of 10 GB on a new machine takes minutes."""


@dataclass(frozen=True)
class RayStage:
    """What `RayFunctionTask` reads of a `RayJobConfig`, from a shape; pods are made when asked for.

    Attributes:
        shape: The size of the cluster.
        kind: What the stage has in common with others.
    """

    shape: Shape
    kind: Kind
    address: str | None = None
    runtime_env: dict[str, Any] | None = None
    enable_autoscaling: bool = False  # a gang needs all of its workers from the first step on
    autoscaler_options: None = None
    shutdown_after_job_finishes: bool = True
    ttl_seconds_after_finished: int = 300

    @property
    def head_node_config(self) -> HeadNodeConfig:
        """The head has no work of its own."""
        return HeadNodeConfig(ray_start_params={"num-cpus": "0"}, pod_template=pods.head_pod())

    @property
    def worker_node_config(self) -> list[WorkerNodeConfig]:
        """A group for each size of machine."""
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

    def __init__(self, task_config: RayStage, task_function: Callable[..., Any], **options: Any):
        self._options = options
        image = task_config.kind.on(task_config.shape).image
        super().__init__(
            task_config=task_config,
            task_function=task_function,
            **{**options, "container_image": image},
        )
        self._others: dict[str, RayStageTask] = {}

    @property
    def shape(self) -> Shape:
        """Of the cluster that is reserved for it."""
        return self.task_config.shape

    def on(self, config: ClusterConfig) -> "RayStageTask":
        """This stage on the cluster that a recipe asks for; to be called inside a `@dynamic`.

        In a local run there is one runtime, whatever the shape.

        Raises:
            ConfigError: If the recipe is not known where this is called.
            ResourceError: If the cluster says that it never has so many GPUs.
        """
        if not isinstance(config, ClusterConfig):
            raise ConfigError(
                f"the size of {self.name} is asked for before its recipe is known",
                expected="a ClusterConfig, as there is one inside a @dynamic",
                got=type(config).__name__,
                fix="call the stage in a @dynamic that has its config as an input",
            )
        state = FlyteContextManager.current_context().execution_state
        if state is not None and state.is_local_execution():
            return self
        shape = shape_of(config)
        check_offered(shape)
        return self.on_shape(shape)

    def on_shape(self, shape: Shape) -> "RayStageTask":
        """The task for that shape, the same at every call."""
        if shape == self.shape:
            return self
        if shape.name not in self._others:
            config = RayStage(shape, self.task_config.kind)
            options = {**self._options, "task_resolver": by_shape}
            other = RayStageTask(config, self.task_function, **options)
            other._name = f"{self.name}.{shape.name.replace(':', '_')}"
            self._others[shape.name] = other
        return self._others[shape.name]

    def pre_execute(self, user_params: ExecutionParameters) -> ExecutionParameters:
        """Starts Ray, or joins the runtime that an earlier stage started; on a cluster, its own."""
        state = FlyteContextManager.current_context().execution_state
        if state is not None and not state.is_local_execution():
            params = super().pre_execute(user_params)
            import ray

            await_workers(self.shape, ray.cluster_resources)
            return params
        start_ray()
        return user_params


TaskPlugins.register_pythontask_plugin(RayStage, RayStageTask)


def ray_stage(kind: Kind) -> dict[str, Any]:
    """What a stage is declared with: the smallest shape, from which it is moved to others."""
    return {"task_config": RayStage(laptop(), kind)}


class _ByShape(TrackedInstance, TaskResolverMixin):
    """Finds a stage on a shape again in its container, by the module, the name and the shape."""

    def name(self) -> str:
        return "by_shape"

    def loader_args(self, settings: SerializationSettings, task: RayStageTask) -> list[str]:
        return [*default_task_resolver.loader_args(settings, task), "shape", task.shape.name]

    def load_task(self, loader_args: list[str]) -> RayStageTask:
        _, module, _, name, _, shape = loader_args
        stage = getattr(importlib.import_module(module), name)
        return stage.on_shape(shape_of(Shape(shape, ()).config))

    def get_all_tasks(self) -> list[RayStageTask]:
        """None: stages are registered with the shape that they are declared with."""
        return []


by_shape = _ByShape()


def check_offered(shape: Shape) -> None:
    """Refuses what the cluster can never give: KubeRay would wait for it without an end.

    Raises:
        ResourceError: If `NEMO_RL_CLUSTER_GPUS` says that there are fewer GPUs.
    """
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
    """Waits for the workers of the shape to join, and gives up on those that do not.

    Args:
        shape: What was reserved.
        found: What Ray has by now, as `ray.cluster_resources`.
        wait_seconds: How long to wait.
        pause_seconds: Between two looks.

    Raises:
        ResourceError: Names what is missing at the end.
    """
    wanted: dict[Resource, float] = {"GPU": shape.num_gpus, "CPU": shape.num_nodes}
    deadline = time.monotonic() + wait_seconds
    while True:
        there = ResourceManager.of_ray(found(), name="the stage's Ray cluster")
        if not there.missing(wanted):
            return
        if time.monotonic() >= deadline:
            there.check(
                wanted,
                fix="look at the pods of the RayCluster (kubectl describe pod): no node of the "
                "asked kind is free, or the image cannot be pulled",
            )
        time.sleep(pause_seconds)
