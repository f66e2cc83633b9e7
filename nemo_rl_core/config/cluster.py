"""The named sizes of cluster that a recipe may ask for."""

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.errors import ConfigError

ShapeName = Literal["laptop", "one_gpu", "gpus"]


class ClusterConfig(FrozenConfig):
    """A named shape, and how many ranks train on it.

    The number of threads is part of the result: floating-point sums are taken in another order
    with another number, so it is stated here, not read off the machine.

    Attributes:
        shape: `laptop` has no GPU, and its workers share the cores; `one_gpu` has one; `gpus` has
            one for each worker.
        num_threads: Cores that each worker computes with.
        num_workers: Ranks that train together: whole copies of the model, each over the ranks that
            `training` says.
        num_gpus_per_node: How many of the workers one machine holds, in the shape `gpus`.
    """

    shape: ShapeName = "laptop"
    num_threads: PositiveInt = 2
    num_workers: PositiveInt = 1
    num_gpus_per_node: PositiveInt = 8

    @property
    def num_gpus(self) -> int:
        """GPUs that the shape asks for, on all machines together."""
        return 0 if self.shape == "laptop" else self.num_workers

    @property
    def bundles_per_node(self) -> list[int]:
        """Workers on each machine, full machines first: 12 of at most 8 are `[8, 4]`."""
        if self.shape == "laptop":
            return [self.num_workers]
        full, rest = divmod(self.num_workers, self.num_gpus_per_node)
        return [self.num_gpus_per_node] * full + [rest] * bool(rest)

    @model_validator(mode="after")
    def _one_gpu_holds_one_worker(self) -> Self:
        if self.shape == "one_gpu" and self.num_workers > 1:
            raise ConfigError(
                "the shape 'one_gpu' has room for one worker",
                expected="cluster.num_workers: 1",
                got=str(self.num_workers),
                fix="set cluster.shape to gpus, which has one GPU a worker",
            )
        return self
