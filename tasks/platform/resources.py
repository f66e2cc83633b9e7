"""Resources of stages: Flyte's reservations per kind, and the shapes of Ray clusters.

A recipe names a shape (`cluster: {shape: node_8gpu}`); this module defines it on a cluster.
Resources do not change results and are not part of cache keys (`nemo_rl_core.store.source_digest`).
"""

from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from flytekit import ImageSpec, Resources
from flytekit.deck import DeckField

from nemo_rl_core.config.cluster import AcceleratorName, ClusterConfig
from nemo_rl_core.store.git import git_state
from tasks.platform import images

LIGHT = Resources(cpu="1", mem="2Gi")
"""Stages without workers: reading, checking, comparing."""

_CORES_PER_GPU, _GIB_PER_GPU = 11, 120
"""Eight of them leave some for the system on the smallest machine with eight A100 (96, 1,152)."""


@dataclass(frozen=True)
class Nodes:
    """Equal machines of a shape: one worker group of its Ray cluster.

    Attributes:
        count: Number of machines.
        num_gpus: GPUs of each machine; one worker per GPU.
        resources: Reserved resources of each machine.
        shared_memory_gib: The size of /dev/shm, part of the memory. Ray keeps objects there (30 %
            of the memory), and trainers and engines exchange tensors through it.
    """

    count: int
    num_gpus: int
    resources: Resources
    shared_memory_gib: int


@dataclass(frozen=True)
class Shape:
    """A Ray cluster for one stage.

    Attributes:
        name: Name of the recipe's shape without characters that a shell interprets, since it is an
            argument of the stage's container: `cluster:12:8:nvidia-h100`.
        nodes: Groups of equal machines; the head runs no workers.
        accelerator: The kind of GPU; None takes any.
    """

    name: str
    nodes: tuple[Nodes, ...]
    accelerator: AcceleratorName | None = None

    @property
    def num_gpus(self) -> int:
        """GPUs of all machines."""
        return sum(group.count * group.num_gpus for group in self.nodes)

    @property
    def num_nodes(self) -> int:
        """Number of machines, without the head."""
        return sum(group.count for group in self.nodes)

    @property
    def config(self) -> ClusterConfig:
        """The recipe's section for this shape; the number of threads is ignored."""
        name, num_workers, num_gpus_per_node, accelerator = self.name.split(":")
        return ClusterConfig.model_validate(
            {
                "shape": name,
                "num_workers": num_workers,
                "num_gpus_per_node": num_gpus_per_node,
                "accelerator": None if accelerator == "any" else accelerator,
            }
        )


def laptop(num_workers: int = 1) -> Shape:
    """No GPU: all workers share the cores of one pod."""
    return shape_of(ClusterConfig(shape="laptop", num_workers=num_workers))


def one_gpu(accelerator: AcceleratorName | None = None) -> Shape:
    """One worker, on one GPU."""
    return shape_of(ClusterConfig(shape="one_gpu", accelerator=accelerator))


def shape_of(config: ClusterConfig) -> Shape:
    """Returns the shape of a recipe's `cluster` section.

    Example:
        >>> shape = shape_of(ClusterConfig(shape="cluster", num_workers=12))
        >>> shape.name, [(group.count, group.num_gpus) for group in shape.nodes]
        ('cluster:12:8:any', [(1, 8), (1, 4)])
    """
    name = (
        f"{config.shape}:{config.num_workers}:{config.num_gpus_per_node}:"
        f"{config.accelerator or 'any'}"
    )
    if config.num_gpus == 0:
        pod = Nodes(1, 0, Resources(cpu="2", mem="16Gi", ephemeral_storage="50Gi"), 6)
        return Shape(name, (pod,))
    machines = Counter(config.bundles_per_node)
    nodes = tuple(_gpu_nodes(count, num_gpus) for num_gpus, count in machines.items())
    return Shape(name, nodes, config.accelerator)


def _gpu_nodes(count: int, num_gpus: int) -> Nodes:
    memory = num_gpus * _GIB_PER_GPU
    resources = Resources(
        cpu=str(num_gpus * _CORES_PER_GPU),
        mem=f"{memory}Gi",
        gpu=str(num_gpus),
        ephemeral_storage=f"{num_gpus * 100}Gi",
    )
    return Nodes(count, num_gpus, resources, shared_memory_gib=memory * 2 // 5)


@cache
def _commit() -> dict[str, str]:
    """The commit for manifests on a cluster, whose containers have no repository."""
    return git_state(Path(__file__).parent).as_environment


@dataclass(frozen=True)
class Kind:
    """Cluster settings of stages of one kind; not used in local runs.

    Attributes:
        requests: Resources of the stage's container. They are small for stages with workers, since
            they also apply to the head and the submitter.
        image: The container image.
        timeout: Time limit of each attempt.
        retries: New attempts after a failure of the system or of the stage.
        interruptible: Whether it may run on preemptible machines.
        serialize: Whether concurrent executions of the same stage wait for one result.
        on_ray: Whether it has workers, on a Ray cluster of the recipe's shape.
    """

    requests: Resources
    image: ImageSpec
    timeout: timedelta
    retries: int = 2
    interruptible: bool = True
    serialize: bool = True
    on_ray: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `flytekit.task`."""
        return {
            "requests": self.requests,
            "container_image": self.image,
            "retries": self.retries,
            "timeout": self.timeout,
            "interruptible": self.interruptible,
            "environment": _commit(),
        }

    def on(self, shape: Shape) -> "Kind":
        """Returns the kind on a shape; without a GPU, with an image without CUDA."""
        return self if shape.num_gpus else replace(self, image=images.LAPTOP)


DECK: dict[str, Any] = {
    "enable_deck": True,
    # All except the list of installed packages, for which flytekit starts pip in every task: it
    # takes seconds, and the manifest has the packages that a result depends on.
    "deck_fields": (
        DeckField.SOURCE_CODE,
        DeckField.TIMELINE,
        DeckField.INPUT,
        DeckField.OUTPUT,
    ),
}
"""Deck fields of a task, for `flytekit.task`."""

PLAIN = Kind(
    requests=LIGHT,
    image=images.LIGHT,
    timeout=timedelta(minutes=30),
    serialize=False,  # faster than waiting for another execution
)
"""Compares, decides, reports."""

DATA = Kind(
    requests=Resources(cpu="2", mem="16Gi"),
    image=images.LIGHT,
    timeout=timedelta(hours=4),
)
"""Reads, generates and checks rows."""

WEIGHTS = Kind(
    requests=Resources(cpu="8", mem="64Gi", ephemeral_storage="200Gi"),
    image=images.LIGHT,
    timeout=timedelta(hours=6),
)
"""Holds a whole model in memory, on CPUs: fetches, converts, exports."""

_DRIVER = Resources(cpu="2", mem="8Gi")

GENERATE = Kind(
    requests=_DRIVER,
    image=images.GENERATION,
    timeout=timedelta(hours=12),
    on_ray=True,
)
"""Samples from a model, or scores with one: hours at most, restarted when lost."""

TRAIN = Kind(
    requests=_DRIVER,
    image=images.TRAINING,
    timeout=timedelta(days=3),
    # The next attempt resumes from the last save, so a failing machine costs little.
    retries=5,
    # Losing one machine of a gang ends all of it, so preemptible machines are not used.
    interruptible=False,
    on_ray=True,
)
"""Trains, with or without sampling; resumes from its last save."""

SCORE = replace(GENERATE, image=images.TRAINING)
"""As `GENERATE`, with a training backend instead of an engine."""
