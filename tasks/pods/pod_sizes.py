"""Requests of each kind of pod, for `docs/clusters.md` and `cluster-check`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal

from flytekit import PodTemplate, Resources

from nemo_rl_core.config.cluster import ClusterConfig
from tasks.pods import pods
from tasks.pods.resources import DATA, GENERATE, PLAIN, WEIGHTS
from tasks.pods.shapes import Nodes, Shape, shape_of

CPU, MEMORY, DISK = "cpu", "memory", "ephemeral-storage"
"""Kubernetes' names of resources that every machine has."""

_GIB = Decimal(2**30)
_RESOURCE_FIELDS = {CPU: "cpu", MEMORY: "mem", DISK: "ephemeral_storage"}
"""Fields of `flytekit.Resources` by Kubernetes' names."""
_SITE = "{}.container.resources in deployment/pods.yaml"
_KIND = "{} in tasks/pods/resources.py"


@dataclass(frozen=True)
class PodSize:
    """A kind of pod, with its requests.

    Attributes:
        requests: Amounts by Kubernetes' names of resources.
        setting: The setting that changes the size, with its file.
    """

    name: str
    requests: Mapping[str, Decimal]
    setting: str
    labels: Mapping[str, str]

    @property
    def num_gpus(self) -> int:
        """GPUs of one pod."""
        return int(self.requests.get(pods.GPU, 0))


def amounts(quantities: Mapping[str, str]) -> dict[str, Decimal]:
    """Returns Kubernetes' quantities as numbers, in cores and bytes.

    Example:
        >>> amounts({"cpu": "3920m", "memory": "14Gi"})
        {'cpu': Decimal('3.920'), 'memory': Decimal('15032385536')}
    """
    from kubernetes.utils import quantity

    parse: Callable[[str], Decimal] = quantity.parse_quantity
    return {name: parse(value) for name, value in quantities.items()}


def in_words(found: Mapping[str, Decimal]) -> str:
    """Formats amounts for a reader.

    Example:
        >>> in_words(amounts({"ephemeral-storage": "50Gi", "cpu": "4", "memory": "32Gi"}))
        '4 cores, 32 GiB, 50 GiB of disk'
    """
    words = []
    if CPU in found:
        words.append(f"{float(found[CPU]):.3g} core{'s' * (found[CPU] != 1)}")
    if MEMORY in found:
        words.append(f"{float(found[MEMORY] / _GIB):,.4g} GiB")
    if DISK in found:
        words.append(f"{float(found[DISK] / _GIB):,.4g} GiB of disk")
    others = sorted(found.keys() - {CPU, MEMORY, DISK})
    return ", ".join([*(f"{found[name]:f} x {name}" for name in others), *words])


def workers(shape: Shape, group: Nodes) -> PodSize:
    """Returns the size of the pods of one group of workers."""
    gpus = {0: "no GPU", 1: "1 GPU"}.get(group.num_gpus, f"{group.num_gpus} GPUs")
    group_name = "gpu_worker" if group.num_gpus else "worker"
    template = pods.worker_pod(shape, group)
    return _size_of_template(f"worker with {gpus}", template, _SITE.format(group_name))


def ray_pods(cluster: ClusterConfig) -> list[tuple[PodSize, int]]:
    """Returns the pods of a stage with Ray, which run all at once, and the number of each."""
    shape = shape_of(cluster)
    head = _size_of_template("head of a Ray cluster", pods.head_pod(), _SITE.format("head"))
    driver = _size_of_resources("submitter of a RayJob", GENERATE.requests, _KIND.format("_DRIVER"))
    if cluster.lifetime == "run":
        driver = _size_of_resources(
            "stage on a run's Ray cluster",
            pods.DRIVER_RESOURCES["requests"],
            "_HEAD in tasks/pods/pods.py",
        )
    return [(head, 1), (driver, 1), *((workers(shape, each), each.count) for each in shape.nodes)]


def other_pods() -> list[PodSize]:
    """Returns the pods of other stages, each of which runs by itself."""
    kinds = {
        "stage that holds full weights": (WEIGHTS, "weights in deployment/pods.yaml"),
        "stage that reads and checks data": (DATA, "data in deployment/pods.yaml"),
        "stage that compares, decides, reports": (PLAIN, _KIND.format("LIGHT")),
    }
    return [
        _size_of_resources(name, kind.requests, setting) for name, (kind, setting) in kinds.items()
    ]


def _size_of_template(name: str, template: PodTemplate, setting: str) -> PodSize:
    spec = template.pod_spec
    (main,) = [each for each in spec.containers if each.name == template.primary_container_name]
    return PodSize(name, amounts(main.resources.requests), setting, spec.node_selector or {})


def _size_of_resources(name: str, resources: Resources, setting: str) -> PodSize:
    quantities = {key: getattr(resources, attribute) for key, attribute in _RESOURCE_FIELDS.items()}
    requests = amounts({key: str(each) for key, each in quantities.items() if each})
    return PodSize(name, requests, setting, {})
