"""What a site asks of stages, their RayJobs and pods: `deployment/pods.yaml`.

The file is read where stages are registered, and again inside a `@dynamic`, which makes the tasks
of a recipe's shape. It is part of the registered code, so that both read the same.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import yaml
from flytekit import PodTemplate, Resources

from nemo_rl_core.config.cluster import AcceleratorName
from nemo_rl_core.errors import ConfigError

FILE = Path(__file__).resolve().parents[2] / "deployment/pods.yaml"
"""A laptop's installation without the project's folder has none, and needs none."""

_OF_PODS = ("labels", "annotations", "spec", "container")
_OF_JOBS = ("labels", "annotations", "spot_training")
_OF_STAGES = {"cpu": "cpu", "memory": "mem", "ephemeral-storage": "ephemeral_storage"}
"""Kubernetes' words, and those of `flytekit.Resources`."""
GROUPS = {
    "all": _OF_PODS,
    "head": _OF_PODS,
    "worker": _OF_PODS,
    "gpu_worker": (*_OF_PODS, "accelerators"),
    "job": _OF_JOBS,
    "weights": tuple(_OF_STAGES),
    "data": tuple(_OF_STAGES),
    "node_cache": ("folder", "gib"),
}
"""The groups of the file, and the parts that each may have."""

ACCELERATOR_LABEL = "k8s.amazonaws.com/accelerator"
"""Node label of the kind of GPU, where the file has no `accelerators`."""

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label of a RayJob that waits in a queue of Kueue."""


@dataclass(frozen=True)
class JobSettings:
    """What a site asks of the RayJobs themselves.

    Attributes:
        labels: For Kueue: the queue, and the priority in it.
        annotations: Likewise.
        spot_training: Whether stages that go on from their last save may run on spot nodes.
    """

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spot_training: bool


@dataclass(frozen=True)
class NodeCacheSettings:
    """The folder of every node in which stages keep what they have downloaded.

    Attributes:
        folder: On the node.
        gib: The size that it may have.
    """

    folder: str
    gib: float


def of_node_cache() -> NodeCacheSettings | None:
    """Returns what the file says of the nodes' caches; None where it says nothing.

    Raises:
        ConfigError: If the file is not what its comment describes.
    """
    patch = _patches(FILE).get("node_cache")
    if not patch:
        return None
    folder, gib = patch.get("folder"), patch.get("gib")
    if not isinstance(gib, int | float) or isinstance(gib, bool):
        gib = 0
    if not isinstance(folder, str) or not _is_below_root(folder) or not 0 < gib < math.inf:
        raise _refused(
            "node_cache is no folder with a size",
            expected="folder, a path below / on the nodes, and gib, a number above 0",
            got=repr(patch),
            fix="write node_cache: {folder: /mnt/disks/ssd0/nemo_rl, gib: 500}",
        )
    return NodeCacheSettings(folder, float(gib))


def _is_below_root(folder: str) -> bool:
    return folder.startswith("/") and bool(folder.strip("/"))


def of_jobs() -> JobSettings:
    """What the file says of RayJobs.

    Raises:
        ConfigError: If the file is not what its comment describes.
    """
    job = _patches(FILE).get("job", {})
    return JobSettings(
        labels=_texts(job.get("labels") or {}),
        annotations=_texts(job.get("annotations") or {}),
        spot_training=bool(job.get("spot_training")),
    )


def nodes_with(accelerator: str) -> dict[str, str]:
    """The labels of nodes with a kind of GPU.

    Args:
        accelerator: As recipes name it.

    Raises:
        ConfigError: If the file names the labels of other kinds alone.
    """
    named = _patches(FILE).get("gpu_worker", {}).get("accelerators")
    if not named:
        return {ACCELERATOR_LABEL: accelerator}
    if accelerator not in named:
        raise _refused(
            f"gpu_worker.accelerators has no {accelerator}, which the recipe asks for",
            expected=f"one of {', '.join(map(str, named))}",
            got=f"cluster.accelerator: {accelerator}",
            fix="add the labels of nodes with such GPUs to the file, or choose another kind",
        )
    return _texts(named[accelerator])


def requests_of(group: str, requests: Resources) -> Resources:
    """What the pods of stages without Ray ask for, with what the file says of them.

    Args:
        group: `weights` or `data`.
        requests: Of the project.

    Raises:
        ConfigError: If the file is not what its comment describes.
    """
    patch = _patches(FILE).get(group, {})
    return replace(requests, **{_OF_STAGES[key]: str(value) for key, value in patch.items()})


def laid_over(template: PodTemplate, *groups: str) -> PodTemplate:
    """The template with what the file says of all pods, and then of these groups.

    Raises:
        ConfigError: If the file is not what its comment describes, or has a key that Kubernetes
            does not know.
    """
    for group in ("all", *groups):
        if patch := _patches(FILE).get(group):
            template = _laid_over(template, patch, group)
    return template


def _laid_over(template: PodTemplate, patch: Mapping[str, Any], group: str) -> PodTemplate:
    from kubernetes.client import ApiClient

    client = ApiClient()
    spec = client.sanitize_for_serialization(template.pod_spec)  # type: ignore[no-untyped-call]
    spec = _merged(spec, patch.get("spec") or {})
    spec["containers"] = [
        _merged(each, patch.get("container") or {})
        if each["name"] == template.primary_container_name
        else each
        for each in spec["containers"]
    ]
    for container in spec["containers"]:
        for name in ("requests", "limits"):  # 8 is as good as "8", as in kubectl
            quantities = container.get("resources", {}).get(name, {})
            quantities.update(_texts(quantities))
    try:
        known = client.deserialize(json.dumps(spec), "V1PodSpec", "application/json")
    except ValueError as error:
        raise _refused(
            f"{group}: no pod is like this",
            expected="values of the types that Kubernetes has for the keys",
            got=" ".join(str(error).split()),
            fix="correct the value; numbers in `env` are texts there, in quotes",
        ) from error
    kept = client.sanitize_for_serialization(known)  # type: ignore[no-untyped-call]
    if unknown := list(_unknown(spec, kept)):
        raise _refused(
            f"{group}: Kubernetes knows no {', '.join(unknown)}",
            expected="keys of a PodSpec, or of a Container under `container`, in Kubernetes' words",
            got=", ".join(unknown),
            fix="correct the spelling, or leave the key out",
        )
    named = {
        part: {**(getattr(template, part) or {}), **_texts(patch.get(part) or {})} or None
        for part in ("labels", "annotations")
    }
    return replace(template, pod_spec=known, **named)


def _texts(found: Mapping[Any, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in found.items()}


@cache
def _patches(file: Path) -> Mapping[str, Mapping[str, Any]]:
    if not file.exists():
        return {}
    try:
        found = yaml.safe_load(file.read_text()) or {}
    except yaml.YAMLError as error:
        raise _refused(
            "it cannot be read",
            expected="YAML",
            got=" ".join(str(error).split()),
            fix="correct the file",
        ) from error
    _check_keys(found, tuple(GROUPS), "")
    for group, patch in found.items():
        _check_keys(patch, GROUPS[group], f"{group}.")
        for part in patch or {}:
            if part in _OF_STAGES:
                _check_quantity(patch[part], f"{group}.{part}")
            elif part == "spot_training":
                _check_flag(patch[part], f"{group}.{part}")
            elif group == "node_cache":
                continue  # `of_node_cache` checks them together
            else:
                names = get_args(AcceleratorName) if part == "accelerators" else None
                _check_keys(patch[part], names, f"{group}.{part}.")
    for name, labels in ((found.get("gpu_worker") or {}).get("accelerators") or {}).items():
        _check_labels(labels, f"gpu_worker.accelerators.{name}")
    return {group: patch or {} for group, patch in found.items()}


def _check_keys(found: Any, known: tuple[str, ...] | None, path: str) -> None:
    if found is None:  # a key whose lines are all comments
        return
    is_map = isinstance(found, dict)
    unknown = [str(key) for key in found if known and key not in known] if is_map else []
    if unknown or not is_map:
        raise _refused(
            f"{path}{unknown[0] if unknown else ''}".rstrip(".") + " is not known" * bool(unknown),
            expected=f"a map of {', '.join(known)}" if known else "a map",
            got=", ".join(unknown) if unknown else repr(found),
            fix="see the comment at the beginning of the file",
        )


def _check_labels(found: Any, path: str) -> None:
    is_map = isinstance(found, dict) and found
    if not is_map or not all(isinstance(each, str) for each in found.values()):
        raise _refused(
            f"{path} is no map of labels",
            expected="labels of nodes, such as {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}",
            got=repr(found),
            fix="see the comment at the beginning of the file; kubectl get nodes --show-labels",
        )


def _check_flag(found: Any, path: str) -> None:
    if found is not None and not isinstance(found, bool):
        raise _refused(
            f"{path} is neither true nor false",
            expected="true or false",
            got=repr(found),
            fix="see the comment at the beginning of the file",
        )


def _check_quantity(found: Any, path: str) -> None:
    from kubernetes.utils import parse_quantity

    try:
        is_quantity = not isinstance(found, bool) and parse_quantity(str(found)) > 0  # type: ignore[no-untyped-call]
    except ValueError:
        is_quantity = False
    if not is_quantity:
        raise _refused(
            f"{path} is no quantity",
            expected="one of Kubernetes, such as 8, 64Gi or 440Gi",
            got=repr(found),
            fix="see the comment at the beginning of the file",
        )


def _merged(ours: Any, theirs: Any) -> Any:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return {
            **ours,
            **{key: _merged(ours.get(key), value) for key, value in theirs.items()},
        }
    if isinstance(ours, list) and isinstance(theirs, list):
        return [*ours, *theirs]
    return theirs


def _unknown(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """The paths of keys that Kubernetes' model of a pod has dropped."""
    if isinstance(given, dict):
        for key, value in given.items():
            here = f"{path}.{key}".lstrip(".")
            if not isinstance(kept, dict) or key not in kept:
                yield here
            else:
                yield from _unknown(value, kept[key], here)
    elif isinstance(given, list):
        for number, value in enumerate(given):
            if isinstance(kept, list) and number < len(kept):
                yield from _unknown(value, kept[number], f"{path}[{number}]")


def _refused(message: str, *, expected: str, got: str, fix: str) -> ConfigError:
    return ConfigError(f"deployment/pods.yaml: {message}", expected=expected, got=got, fix=fix)
