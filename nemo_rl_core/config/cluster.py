"""The named sizes of cluster that a recipe may ask for."""

from typing import Literal

from pydantic import PositiveInt

from nemo_rl_core.config.base import FrozenConfig

ShapeName = Literal["laptop", "one_gpu"]


class ClusterConfig(FrozenConfig):
    """A named shape; `num_threads` is how many cores each worker computes with.

    The number of threads is part of the result: floating-point sums are taken in another order
    with another number, so it is stated here, not read off the machine.
    """

    shape: ShapeName = "laptop"
    num_threads: PositiveInt = 2

    @property
    def num_gpus(self) -> int:
        """GPUs that the shape asks for."""
        return {"laptop": 0, "one_gpu": 1}[self.shape]
