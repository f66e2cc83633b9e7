"""The named sizes of cluster that a recipe may ask for."""

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from nemo_rl_core.config.base import FrozenConfig
from nemo_rl_core.config.placement import OwnBundles, with_own_bundles
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
"""GPUs of the shapes that are one machine; the others grow."""


class ClusterConfig(FrozenConfig):
    """A named shape, and how many ranks train on it.

    All of it but `lifetime` is part of the result: floating-point sums are taken in another order
    with another number of threads or ranks, or on another device, so it is stated here, not read
    off the machine. What is not (memory, disks, node pools) stands in `tasks/platform/shapes.py`.

    Attributes:
        shape: `laptop` has no GPU, and its workers share the cores; `one_gpu` has one; `node_8gpu`
            is one machine with eight; `cluster` has one GPU for each worker, on as many machines
            of `num_gpus_per_node` as that takes.
        num_threads: Cores that each worker computes with.
        num_workers: Ranks that train together: whole copies of the model, each over the ranks that
            `training` says. Eight by default in the shape `node_8gpu`, else one. Engines, judges
            and reward models with a placement of their own (`generation.placement: {own: 4}`) come
            on top.
        num_gpus_per_node: How many of the workers one machine holds, in the shape `cluster`.
        accelerator: The kind of GPU; None takes any that the cluster has.
        collective_timeout_seconds: After which ranks that wait for another one give up, on every
            axis of a layout. Those that wait for a save to be written wait for 30 minutes at least.
        lifetime: How long a Ray cluster lives on Flyte: `stage` makes one for each stage, `run` one
            that all stages of the run share. It is in no cache key.
    """

    shape: ShapeName = "laptop"
    num_threads: PositiveInt = 2
    num_workers: PositiveInt = 1
    num_gpus_per_node: PositiveInt = _GPUS_OF_A_NODE
    accelerator: AcceleratorName | None = None
    collective_timeout_seconds: PositiveFloat = 600.0
    # Left out by default, so that inputs of stages are what they were without it.
    lifetime: Lifetime = Field(default="stage", exclude_if=lambda said: said == "stage")

    @property
    def num_gpus(self) -> int:
        """GPUs of the workers, on all machines together; `num_gpus_with` has others' besides."""
        return 0 if self.shape == "laptop" else self.num_workers

    @property
    def bundles_per_node(self) -> list[int]:
        """Workers on each machine, full machines first: 12 of at most 8 are `[8, 4]`."""
        if self.shape == "laptop":
            return [self.num_workers]
        full, rest = divmod(self.num_workers, self.num_gpus_per_node)
        return [self.num_gpus_per_node] * full + [rest] * bool(rest)

    def num_gpus_with(self, own: Sequence[OwnBundles]) -> int:
        """GPUs of the workers, and of what has some of its own; 0 for a cluster without GPUs."""
        return self.num_gpus and self.num_gpus + sum(each.number for each in own)

    def bundles_with(self, own: Sequence[OwnBundles]) -> list[int]:
        """Bundles on each machine: those of the workers, and those beside them.

        Example:
            >>> engines = OwnBundles("generation", 12)
            >>> ClusterConfig(shape="cluster", num_workers=12).bundles_with([engines])
            [8, 8, 8]
        """
        limit = self.num_gpus_per_node if self.num_gpus else None
        return with_own_bundles(self.bundles_per_node, own, num_gpus_per_node=limit)

    def refuse_unplaced(self, own: Sequence[OwnBundles]) -> None:
        """Refuses own bundles for which the shape has no GPU.

        Args:
            own: Bundles besides those of the workers.

        Raises:
            ConfigError: Says how many workers leave room for them, where any do.
        """
        room, wanted = _ROOM.get(self.shape), sum(each.number for each in own)
        if not own or room is None or self.num_workers + wanted <= room:
            return
        fits = room - wanted
        paths = ["cluster.num_workers", *(each.path for each in own)]
        raise ConfigError(
            f"the shape {self.shape!r} has no GPU left for {_named(own)} of their own",
            expected=f"{_listed(paths)} of at most {room} together",
            got=_listed([str(self.num_workers), *(str(each.number) for each in own)]),
            fix=(f"set cluster.num_workers to {fits}, or " if fits > 0 else "")
            + "set cluster.shape to cluster, which has as many GPUs as are asked for",
        )

    @model_validator(mode="before")
    @classmethod
    def _a_whole_node_by_default(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("shape") == "node_8gpu":
            return {"num_workers": _GPUS_OF_A_NODE, **values}
        return values

    @model_validator(mode="after")
    def _workers_fit_the_shape(self) -> Self:
        room = _ROOM.get(self.shape)
        if room is not None and self.num_workers > room:
            raise ConfigError(
                f"the shape {self.shape!r} has room for {_counted(room)}",
                expected=f"cluster.num_workers: {room}" + (" or fewer" if room > 1 else ""),
                got=str(self.num_workers),
                fix="set cluster.shape to cluster, which has one GPU a worker",
            )
        return self

    @model_validator(mode="after")
    def _whole_nodes_have_eight_gpus(self) -> Self:
        if self.shape == "node_8gpu" and self.num_gpus_per_node != _GPUS_OF_A_NODE:
            raise ConfigError(
                "the shape 'node_8gpu' is a machine with eight GPUs",
                expected=f"cluster.num_gpus_per_node: {_GPUS_OF_A_NODE}, or not said",
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
                fix="set cluster.shape to one_gpu, node_8gpu or cluster, or leave it out",
            )
        return self


def _named(own: Sequence[OwnBundles]) -> str:
    """Who wants bundles, for a message."""
    kinds = ["engines" if each.name == "generation" else "models that score" for each in own]
    return _listed(list(dict.fromkeys(kinds)))


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _counted(room: int) -> str:
    return "one worker" if room == 1 else f"{room} workers"
