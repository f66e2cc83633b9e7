"""Sizes of stages: what Flyte reserves, and how a stage gets its Ray."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flytekit import Resources
from flytekit.core.context_manager import ExecutionParameters, FlyteContextManager
from flytekit.extend import TaskPlugins
from flytekitplugins.ray import HeadNodeConfig, RayJobConfig, WorkerNodeConfig
from flytekitplugins.ray.task import RayFunctionTask

from nemo_rl_core.distributed.virtual_cluster import start_ray

LIGHT = Resources(cpu="1", mem="2Gi")
"""Stages without workers: reading, checking, comparing."""


@dataclass
class RayStage(RayJobConfig):
    """A Ray cluster for one stage; the shapes of a real cluster go into the worker groups."""


class RayStageTask(RayFunctionTask):
    """Ray's plugin, but for local runs: one small runtime that all stages of a run share."""

    def __init__(self, task_config: RayStage, task_function: Callable[..., Any], **kwargs: Any):
        super().__init__(task_config=task_config, task_function=task_function, **kwargs)

    def pre_execute(self, user_params: ExecutionParameters) -> ExecutionParameters:
        """Starts Ray, or joins the runtime that an earlier stage started."""
        state = FlyteContextManager.current_context().execution_state
        if state is None or not state.is_local_execution():
            return super().pre_execute(user_params)
        start_ray()
        return user_params


TaskPlugins.register_pythontask_plugin(RayStage, RayStageTask)


def ray_stage() -> RayStage:
    """One head without work of its own, and one worker node that trainer and engine share."""
    return RayStage(
        head_node_config=HeadNodeConfig(requests=Resources(cpu="1", mem="4Gi")),
        worker_node_config=[
            WorkerNodeConfig(
                group_name="workers", replicas=1, requests=Resources(cpu="2", mem="16Gi")
            )
        ],
        shutdown_after_job_finishes=True,
    )
