"""Checks whether the machines of a cluster have room for the pods of stages: the line `nodes`.

A machine's allocatable resources, in use or not, are compared with the requests of one pod.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from flytekit import PodTemplate, Resources
from pydantic import BaseModel, ConfigDict

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.maintenance.doctor.check import State
from tasks.pods import pods
from tasks.pods.pods import GPU
from tasks.pods.resources import DATA, GENERATE, PLAIN, WEIGHTS
from tasks.pods.shapes import Nodes, Shape, shape_of
from tasks.pods.site_pods import ACCELERATOR_LABEL

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


class CheckLine(BaseModel):
    """One line of the check."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    state: State
    found: str
    fix: str = ""


_KINDS_OF_GPUS = (
    ACCELERATOR_LABEL,
    "nvidia.com/gpu.product",  # by the GPU operator
    "cloud.google.com/gke-accelerator",
)

_KEEPS_OUT = "NoSchedule", "NoExecute"
_CONTROL_PLANE = "node-role.kubernetes.io/control-plane"
_SIZE = CPU, MEMORY, DISK
_NAMES = {CPU: "cores", MEMORY: "memory", DISK: "disk"}
_ADD = "add machines, unless an autoscaler does when pods wait; until then a RayJob waits"
Node = dict[str, Any]


def node_lines(
    cluster: ClusterConfig, nodes: Sequence[Node], *, autoscaled: bool = False
) -> list[CheckLine]:
    """Returns the lines on machines, for the pods of a recipe's `cluster` and of other stages.

    If `autoscaled` machines are added for waiting pods, the lack of a large one is only a warning.
    """
    shape = shape_of(cluster)
    lines = [
        gpu_node_line(shape, group, nodes, autoscaled=autoscaled)
        for group in shape.nodes
        if group.num_gpus
    ]
    gang = ray_pods(cluster)
    others = [size for size, _ in gang if not size.num_gpus] + other_pods()
    small = [
        _too_small(size, _open_to(size, nodes), autoscaled=autoscaled)
        for size in others
        if not any(_number_on(node, size) for node in _open_to(size, nodes))
    ]
    if small or any(line.state != "ok" for line in lines):
        return [*lines, *small]
    return [*lines, _together(gang, others, nodes)]


def gpu_node_line(
    shape: Shape, group: Nodes, nodes: Sequence[Node], *, autoscaled: bool = False
) -> CheckLine:
    """Returns the line on machines for one group of workers with GPUs."""
    size = workers(shape, group)
    labels = ", ".join(f"{key}={value}" for key, value in size.labels.items())
    large = [node for node in nodes if _gpus_of(node) >= group.num_gpus]
    chosen = [node for node in large if size.labels.items() <= node["metadata"]["labels"].items()]
    pods_per_machine = [number for node in chosen if (number := _number_on(node, size))]
    requests = f"{group.num_gpus} x {GPU}" + (f" and {labels}" if labels else "")
    result = (
        f"room for {sum(pods_per_machine)} pods with {requests}, "
        f"on {len(pods_per_machine)} of {len(nodes)} machines"
    )
    if sum(pods_per_machine) >= group.count:
        return CheckLine(name="nodes", state="ok", found=result)
    if large and not chosen:
        return _line_on_other_kinds(size, large, result, autoscaled=autoscaled)
    if chosen and not pods_per_machine:
        return _too_small(size, chosen, autoscaled=autoscaled)
    result = f"{result}; the shape has {group.count}"
    return CheckLine(name="nodes", state="warn", found=result, fix=_ADD)


def _line_on_other_kinds(
    size: PodSize, nodes: Sequence[Node], found: str, *, autoscaled: bool
) -> CheckLine:
    """Returns the line on machines with enough GPUs but without the labels that pods select.

    A machine with another label may have another kind of GPU, and must not get this label.
    """
    keys = {*_KINDS_OF_GPUS, *size.labels}
    kinds = [
        {f"{key}={value}" for key, value in node["metadata"]["labels"].items() if key in keys}
        for node in nodes
    ]
    kind_labels = sorted(set().union(*kinds))
    labels = " ".join(f"{key}={value}" for key, value in size.labels.items())
    found = f"{found}; those with GPUs have {', '.join(kind_labels) or 'no label of a kind'}"
    fixes = ["add machines of the kind that the recipe asks for"]
    if kind_labels:
        fixes.append(
            "if one of these labels is that kind's, name it (gpu_worker.accelerators in "
            "deployment/pods.yaml)"
        )
    if not all(kinds):
        fixes.append(
            "if those without a label are of that kind, give them this one (kubectl label nodes "
            f"NODE {labels})"
        )
    if autoscaled:
        fixes[0] = f"let the group of machines that is added have the label {labels}"
    else:
        fixes.append("--autoscaled, if such machines are added when pods wait")
    state: State = "warn" if autoscaled else "fail"
    return CheckLine(name="nodes", state=state, found=found, fix="; ".join(fixes))


def _too_small(size: PodSize, nodes: Sequence[Node], *, autoscaled: bool) -> CheckLine:
    result = f"no machine is large enough for a {size.name}: it asks for {in_words(size.requests)}"
    largest = max((_has(node) for node in nodes), key=_largest_for(size), default={})
    lacks = [name for name, amount in size.requests.items() if largest.get(name, 0) < amount]
    if nodes:
        largest_size = in_words({name: largest[name] for name in _SIZE if name in largest})
        result = f"{result}, and the largest has {largest_size}"
    more = " and ".join(_NAMES.get(name, name) for name in lacks)
    fix = (
        f"use machines with more {more} than the pod requests, as a pod cannot get all of it, or "
        f"lower {size.setting} and register again"
    )
    if not autoscaled:
        fix += "; --autoscaled, if such machines are added when pods wait"
    return CheckLine(name="nodes", state="warn" if autoscaled else "fail", found=result, fix=fix)


def _largest_for(size: PodSize) -> Any:
    def share(has: Mapping[str, Decimal]) -> tuple[Decimal, Decimal]:
        least = min(has.get(name, Decimal(0)) / amount for name, amount in size.requests.items())
        return least, has.get(MEMORY, Decimal(0))

    return share


def _together(
    gang: Sequence[tuple[PodSize, int]], others: Sequence[PodSize], nodes: Sequence[Node]
) -> CheckLine:
    names = ", ".join(f"{count} x {size.name}" for size, count in gang)
    left = _unplaced([size for size, count in gang for _ in range(count)], nodes)
    if left:
        first = left[0]
        result = (
            f"the pods of a stage with Ray run all at once ({names}), and next to the others there "
            f"is not enough room for a {first.name} with {in_words(first.requests)}"
        )
        return CheckLine(name="nodes", state="warn", found=result, fix=_ADD)
    largest = max(others, key=lambda size: size.requests[MEMORY])
    result = (
        f"{len(nodes)} machines have room for {names}; the largest pod without a GPU is a "
        f"{largest.name} with {in_words(largest.requests)}"
    )
    return CheckLine(name="nodes", state="ok", found=result)


def _unplaced(pods: Sequence[PodSize], nodes: Sequence[Node]) -> list[PodSize]:
    """Returns pods without room if each, the largest first, gets the fullest machine that fits.

    This is not a proof: another order might fit them all.
    """
    free = {index: _has(node) for index, node in enumerate(nodes)}
    left = []
    for size in sorted(pods, key=lambda each: (-each.num_gpus, -each.requests[MEMORY])):
        machines = [
            index
            for index, node in enumerate(nodes)
            if _is_open(node, size) and _number_in(free[index], size)
        ]
        if not machines:
            left.append(size)
            continue
        index = min(machines, key=lambda each: (free[each].get(GPU, 0), free[each][MEMORY]))
        for name, amount in size.requests.items():
            free[index][name] -= amount
    return left


def _open_to(size: PodSize, nodes: Iterable[Node]) -> list[Node]:
    return [node for node in nodes if _is_open(node, size)]


def _is_open(node: Node, size: PodSize) -> bool:
    """Whether the machine accepts such pods at all, if it is large enough.

    Only taints that no pod without a GPU tolerates count: the further tolerations of pods in
    Flyte's values are not known here.
    """
    shut = {_CONTROL_PLANE} if size.num_gpus else {_CONTROL_PLANE, GPU}
    taints = node["spec"].get("taints") or []
    keys = [each["key"] for each in taints if each["effect"] in _KEEPS_OUT]
    labels = node["metadata"].get("labels") or {}
    is_shut = node["spec"].get("unschedulable") or shut.intersection(keys)
    return not is_shut and size.labels.items() <= labels.items()


def _number_on(node: Node, size: PodSize) -> int:
    return _number_in(_has(node), size) if _is_open(node, size) else 0


def _number_in(has: Mapping[str, Decimal], size: PodSize) -> int:
    return int(min(has.get(name, Decimal(0)) // amount for name, amount in size.requests.items()))


def _has(node: Node) -> dict[str, Decimal]:
    return amounts(node["status"]["allocatable"])


def _gpus_of(node: Node) -> int:
    if node["spec"].get("unschedulable"):
        return 0
    return int(node["status"]["allocatable"].get(GPU, 0))
