"""A stage on the Ray cluster of its run: of the same name and so with the same cache key."""

from contextlib import ExitStack
from typing import Any, ClassVar

import ray
from flytekit.configuration import SerializationSettings
from flytekit.core.context_manager import ExecutionParameters, FlyteContext
from flytekit.models.literals import LiteralMap

from nemo_rl_core.config.cluster import Lifetime
from tasks.pods import images, pods
from tasks.ray_cluster.experimental.joining import joined, take_turn
from tasks.ray_cluster.experimental.ray_job_api import RayJobApi
from tasks.ray_cluster.experimental.run_cluster import RunCluster
from tasks.ray_cluster.ray_stage import RayStageTask


class RunStageTask(RayStageTask):
    """A stage on the Ray cluster of its run: a pod that joins it and drives its workers."""

    lifetime: ClassVar[Lifetime] = "run"

    def __init__(self, stage: RayStageTask) -> None:
        pod_options = {"pod_template": pods.driver_pod(), **pods.DRIVER_RESOURCES}
        super().__init__(
            task_config=stage.task_config,
            task_function=stage.task_function,
            **{**stage._options, **pod_options},
        )
        self._task_type = "python-task"
        self._name = stage._name
        self._turn: Any = None

    @property
    def cluster(self) -> RunCluster:
        """The cluster of its shape in the run that this container belongs to."""
        config = self.task_config
        return RunCluster(self.shape.name, config.head_node_config, config.worker_node_config)

    def get_image(self, settings: SerializationSettings) -> str:
        """Returns the image of training, since all stages of the run share the workers' image.

        A workflow without training has not registered it; there all stages have the same image.
        """
        training = settings.image_config.find_image(images.TRAINING.id)
        if self.shape.num_gpus and training is not None:
            return training.full
        return super().get_image(settings)

    def get_custom(self, settings: SerializationSettings) -> dict[str, Any]:
        """Returns nothing that Flyte's Ray plugin would read."""
        return {}

    def dispatch_execute(self, ctx: FlyteContext, input_literal_map: LiteralMap) -> Any:
        """Runs the stage as a node of the cluster."""
        api = RayJobApi()
        with ExitStack() as stack:
            stack.enter_context(joined(lambda: self.cluster.address(api)))
            stack.callback(ray.shutdown)
            return super().dispatch_execute(ctx, input_literal_map)

    def pre_execute(self, user_params: ExecutionParameters) -> ExecutionParameters:
        """Connects to Ray, and waits until the cluster is free."""
        params = super().pre_execute(user_params)
        self._turn = take_turn()
        return params
