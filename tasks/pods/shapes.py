"""Machines of a Ray cluster, by the name of a shape in a recipe (`cluster: {shape: node_8gpu}`).

Shapes do not change results and are not part of cache keys (`nemo_rl_core.store.digest_scope`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flytekit import Resources

from nemo_rl_core.config.cluster import AcceleratorName, ClusterConfig
from nemo_rl_core.config.placement import DedicatedBundles

_CORES_PER_GPU, _GIB_PER_GPU = 11, 120
"""Requests that leave some for the system on Amazon's machines with eight A100 (96 cores,
1,152 GiB). Machines with less memory, such as Google's with A100 of 40 GB (96 cores, 680 GiB), need
less in `deployment/pods.yaml`."""


@dataclass(frozen=True)
class Nodes:
    """Equal machines of a shape: one worker group of its Ray cluster.

    Attributes:
        num_gpus: GPUs of each machine; one worker per GPU.
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
            argument of the stage's container: `cluster:12:8:nvidia-h100`. If engines have dedicated
            GPUs, the machines by their number of GPUs follow: `cluster:12:8:any:8x2`.
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
        name, num_workers, num_gpus_per_node, accelerator = self.name.split(":")[:4]
        return ClusterConfig.model_validate(
            {
                "shape": name,
                "num_workers": int(num_workers),
                "num_gpus_per_node": int(num_gpus_per_node),
                "accelerator": None if accelerator == "any" else accelerator,
            }
        )


def laptop(num_workers: int = 1) -> Shape:
    """Returns a shape without GPUs: all workers share the cores of one pod."""
    return shape_of(ClusterConfig(shape="laptop", num_workers=num_workers))


def one_gpu(accelerator: AcceleratorName | None = None) -> Shape:
    """Returns a shape with one worker, on one GPU."""
    return shape_of(ClusterConfig(shape="one_gpu", accelerator=accelerator))


def shape_of(config: ClusterConfig, dedicated: Sequence[DedicatedBundles] = ()) -> Shape:
    """Returns the shape of a recipe's `cluster` section, and of dedicated bundles.

    Example:
        >>> shape = shape_of(ClusterConfig(shape="cluster", num_workers=12))
        >>> shape.name, [(group.count, group.num_gpus) for group in shape.nodes]
        ('cluster:12:8:any', [(1, 8), (1, 4)])
        >>> engines = DedicatedBundles("generation", 4)
        >>> shape = shape_of(ClusterConfig(shape="cluster", num_workers=12), [engines])
        >>> shape.name, [(group.count, group.num_gpus) for group in shape.nodes]
        ('cluster:12:8:any:8x2', [(2, 8)])
    """
    name = (
        f"{config.shape}:{config.num_workers}:{config.num_gpus_per_node}:"
        f"{config.accelerator or 'any'}"
    )
    if config.num_gpus == 0:
        pod = Nodes(1, 0, Resources(cpu="2", mem="16Gi", ephemeral_storage="50Gi"), 6)
        return Shape(name, (pod,))
    machines = config.bundles_per_node
    if dedicated:
        config.refuse_unplaced(dedicated)
        machines = config.bundles_with(dedicated)
        name += ":" + "-".join(f"{gpus}x{count}" for gpus, count in Counter(machines).items())
    return _shape_of_machines(name, Counter(machines), config.accelerator)


def shape_named(name: str) -> Shape:
    """Returns the shape of that name, as in the argument of a container."""
    config = Shape(name, ()).config
    machines = name.split(":")[4:]
    if not machines:
        return shape_of(config)
    counts = [each.split("x") for each in machines[0].split("-")]
    return _shape_of_machines(name, {int(g): int(n) for g, n in counts}, config.accelerator)


def _shape_of_machines(
    name: str, machines: Mapping[int, int], accelerator: AcceleratorName | None
) -> Shape:
    nodes = tuple(_gpu_nodes(count, num_gpus) for num_gpus, count in machines.items())
    return Shape(name, nodes, accelerator)


def _gpu_nodes(count: int, num_gpus: int) -> Nodes:
    memory = num_gpus * _GIB_PER_GPU
    resources = Resources(
        cpu=str(num_gpus * _CORES_PER_GPU),
        mem=f"{memory}Gi",
        gpu=str(num_gpus),
        ephemeral_storage=f"{num_gpus * 100}Gi",
    )
    return Nodes(count, num_gpus, resources, shared_memory_gib=memory * 2 // 5)
