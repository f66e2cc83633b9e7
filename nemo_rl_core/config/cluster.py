"""Named cluster sizes that a recipe can request."""

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.placement import DedicatedBundles, with_dedicated_bundles
from nemo_rl_core.errors import ConfigError

ShapeName = Literal["laptop", "one_gpu", "node_8gpu", "cluster"]
AcceleratorName = Literal[
    "nvidia-a10g",
    "nvidia-l4",
    "nvidia-l40s",
    "nvidia-tesla-t4",
    "nvidia-tesla-a100",
    "nvidia-a100-80gb",
    "nvidia-h100",
    "nvidia-h200",
]
Lifetime = Literal["stage", "run"]
_GPUS_OF_A_NODE = 8
_ROOM = {"one_gpu": 1, "node_8gpu": _GPUS_OF_A_NODE}
"""Number of GPUs of single-machine shapes; the others have no fixed number."""


class ClusterConfig(FrozenConfig):
    """A named shape, and the number of ranks that train on it.

    Everything except `lifetime` affects results: the order of floating-point sums depends on the
    number of threads and ranks and on the device. So it is configured here, not detected. Settings
    that do not affect results (memory, disks, node pools) are in `tasks/pods/shapes.py`.

    Attributes:
        shape: `laptop` has no GPU, and its workers share the cores; `one_gpu` has one GPU;
            `node_8gpu` is one machine with eight GPUs; `cluster` has one GPU per worker, on as many
            machines of `num_gpus_per_node` as needed.
        num_threads: Number of threads per worker.
        num_workers: Number of ranks that train together, a multiple of the ranks over which
            `training` spreads one copy of the model. Eight by default in the shape `node_8gpu`,
            else one. Dedicated GPUs of engines, judges and reward models
            (`generation.placement: {own: 4}`) are additional.
        num_gpus_per_node: Number of workers per machine in the shape `cluster`.
        accelerator: Kind of GPU; None takes any that the cluster has.
        collective_timeout_seconds: Time after which ranks stop waiting for another rank, on every
            axis of a layout. Ranks wait at least 30 minutes for a save to be written.
        lifetime: Lifetime of a Ray cluster on Flyte: `stage` creates one for each stage, `run` one
            that all stages of the run share. It is not part of any cache key.
    """

    shape: ShapeName = "laptop"
    num_threads: PositiveInt = 2
    num_workers: PositiveInt = 1
    num_gpus_per_node: PositiveInt = _GPUS_OF_A_NODE
    accelerator: AcceleratorName | None = None
    collective_timeout_seconds: PositiveFloat = 600.0
    # The default is not dumped, so that cache keys from before the setting stay valid.
    lifetime: Lifetime = Field(default="stage", exclude_if=lambda value: value == "stage")

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of the workers on all machines, without dedicated ones."""
        return 0 if self.shape == "laptop" else self.num_workers

    @property
    def bundles_per_node(self) -> list[int]:
        """Workers on each machine, full machines first: 12 with at most 8 each are `[8, 4]`."""
        if self.shape == "laptop":
            return [self.num_workers]
        full, rest = divmod(self.num_workers, self.num_gpus_per_node)
        return [self.num_gpus_per_node] * full + ([rest] if rest else [])

    def num_gpus_with(self, bundles: Sequence[DedicatedBundles]) -> int:
        """Returns the GPUs of the workers plus dedicated ones; 0 for a cluster without GPUs."""
        return self.num_gpus and self.num_gpus + sum(each.number for each in bundles)

    def bundles_with(self, bundles: Sequence[DedicatedBundles]) -> list[int]:
        """Returns the bundles of the workers plus dedicated ones on each machine.

        Example:
            >>> engines = DedicatedBundles("generation", 12)
            >>> ClusterConfig(shape="cluster", num_workers=12).bundles_with([engines])
            [8, 8, 8]
        """
        limit = self.num_gpus_per_node if self.num_gpus else None
        return with_dedicated_bundles(self.bundles_per_node, bundles, num_gpus_per_node=limit)

    def refuse_unplaced(self, bundles: Sequence[DedicatedBundles]) -> None:
        """Refuses dedicated bundles for which the shape has no GPU."""
        room, num_dedicated = _ROOM.get(self.shape), sum(each.number for each in bundles)
        if not bundles or room is None or self.num_workers + num_dedicated <= room:
            return
        fits = room - num_dedicated
        paths = ["cluster.num_workers", *(each.path for each in bundles)]
        raise ConfigError(
            f"the shape {self.shape!r} has no GPU left for dedicated {_users(bundles)}",
            expected=f"{_listed(paths)} of at most {room} together",
            got=_listed([str(self.num_workers), *(str(each.number) for each in bundles)]),
            fix=(f"set cluster.num_workers to {fits}, or " if fits > 0 else "")
            + "set cluster.shape to cluster, which has as many GPUs as requested",
        )

    @model_validator(mode="before")
    @classmethod
    def _full_node_by_default(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("shape") == "node_8gpu":
            return {"num_workers": _GPUS_OF_A_NODE, **values}
        return values

    @model_validator(mode="after")
    def _workers_fit_the_shape(self) -> Self:
        room = _ROOM.get(self.shape)
        if room is not None and self.num_workers > room:
            workers = "one worker" if room == 1 else f"{room} workers"
            raise ConfigError(
                f"the shape {self.shape!r} has room for {workers}",
                expected=f"cluster.num_workers: {room}" + (" or fewer" if room > 1 else ""),
                got=str(self.num_workers),
                fix="set cluster.shape to cluster, which has one GPU per worker",
            )
        return self

    @model_validator(mode="after")
    def _full_nodes_have_eight_gpus(self) -> Self:
        if self.shape == "node_8gpu" and self.num_gpus_per_node != _GPUS_OF_A_NODE:
            raise ConfigError(
                "the shape 'node_8gpu' is a machine with eight GPUs",
                expected=f"cluster.num_gpus_per_node: {_GPUS_OF_A_NODE}, or not set",
                got=str(self.num_gpus_per_node),
                fix="set cluster.shape to cluster for machines of another size",
            )
        return self

    @model_validator(mode="after")
    def _a_laptop_has_no_accelerator(self) -> Self:
        if self.shape == "laptop" and self.accelerator is not None:
            raise ConfigError(
                "the shape 'laptop' has no GPU",
                expected="no cluster.accelerator",
                got=self.accelerator,
                fix="set cluster.shape to one_gpu, node_8gpu or cluster, or remove it",
            )
        return self


def _users(bundles: Sequence[DedicatedBundles]) -> str:
    kinds = ["engines" if each.name == "generation" else "scoring models" for each in bundles]
    return _listed(list(dict.fromkeys(kinds)))


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
