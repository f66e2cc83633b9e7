"""A site's settings for stages, their RayJobs and pods: `deployment/pods.yaml`.

The file is part of the registered code, so a `@dynamic` reads the same as the registration.
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
"""A laptop's installation without the project's folder has no such file, and needs none."""

_POD_KEYS = ("labels", "annotations", "spec", "container")
_JOB_KEYS = ("labels", "annotations", "spot_training")
_STAGE_RESOURCES = {"cpu": "cpu", "memory": "mem", "ephemeral-storage": "ephemeral_storage"}
"""Resource names of Kubernetes, and those of `flytekit.Resources`."""
GROUPS = {
    "all": _POD_KEYS,
    "head": _POD_KEYS,
    "worker": _POD_KEYS,
    "gpu_worker": (*_POD_KEYS, "accelerators"),
    "job": _JOB_KEYS,
    "weights": tuple(_STAGE_RESOURCES),
    "data": tuple(_STAGE_RESOURCES),
    "node_cache": ("folder", "gib"),
}
"""The groups of the file, and the allowed keys of each."""

ACCELERATOR_LABEL = "k8s.amazonaws.com/accelerator"
"""Node label of the kind of GPU, where the file has no `accelerators`."""

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label of a RayJob that waits in a queue of Kueue."""


@dataclass(frozen=True)
class JobSettings:
    """A site's settings for the RayJobs themselves, and whether training may run on spot nodes."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spot_training: bool


@dataclass(frozen=True)
class NodeCacheSettings:
    """The folder of every node in which stages keep downloads."""

    folder: str
    gib: float


def node_cache_settings() -> NodeCacheSettings | None:
    """Returns the file's settings of the nodes' caches; None if there are none."""
    patch = _patches(FILE).get("node_cache")
    if not patch:
        return None
    folder, gib = patch.get("folder"), patch.get("gib")
    if not isinstance(gib, int | float) or isinstance(gib, bool):
        gib = 0
    is_below_root = str(folder).startswith("/") and bool(str(folder).strip("/"))
    if not isinstance(folder, str) or not is_below_root or not 0 < gib < math.inf:
        raise _refused(
            "node_cache is not a folder with a size",
            expected="folder, a path below / on the nodes, and gib, a number above 0",
            got=repr(patch),
            fix="write node_cache: {folder: /mnt/disks/ssd0/nemo_rl, gib: 500}",
        )
    return NodeCacheSettings(folder, float(gib))


def job_settings() -> JobSettings:
    """Returns the file's settings of RayJobs."""
    job = _patches(FILE).get("job", {})
    return JobSettings(
        labels=_texts(job.get("labels") or {}),
        annotations=_texts(job.get("annotations") or {}),
        spot_training=bool(job.get("spot_training")),
    )


def nodes_with(accelerator: str) -> dict[str, str]:
    """Returns the labels of nodes with a kind of GPU; refuses a kind that the file lacks."""
    accelerator_labels = _patches(FILE).get("gpu_worker", {}).get("accelerators")
    if not accelerator_labels:
        return {ACCELERATOR_LABEL: accelerator}
    if accelerator not in accelerator_labels:
        raise _refused(
            f"gpu_worker.accelerators has no {accelerator}, which the recipe asks for",
            expected=f"one of {', '.join(map(str, accelerator_labels))}",
            got=f"cluster.accelerator: {accelerator}",
            fix="add the labels of nodes with such GPUs to the file, or choose another kind",
        )
    return _texts(accelerator_labels[accelerator])


def requests_of(group: str, requests: Resources) -> Resources:
    """Returns the requests of pods of the group `weights` or `data`, with the file's changes."""
    patch = _patches(FILE).get(group, {})
    return replace(requests, **{_STAGE_RESOURCES[key]: str(value) for key, value in patch.items()})


def with_site_settings(template: PodTemplate, *groups: str) -> PodTemplate:
    """Returns the template with the file's settings of all pods, and then of these groups."""
    for group in ("all", *groups):
        if patch := _patches(FILE).get(group):
            template = _patched(template, patch, group)
    return template


def _patched(template: PodTemplate, patch: Mapping[str, Any], group: str) -> PodTemplate:
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
        for name in ("requests", "limits"):  # 8 is the same as "8", as in kubectl
            quantities = container.get("resources", {}).get(name, {})
            quantities.update(_texts(quantities))
    try:
        pod_spec = client.deserialize(json.dumps(spec), "V1PodSpec", "application/json")
    except ValueError as error:
        raise _refused(
            f"{group}: not a valid part of a pod",
            expected="values of the types that Kubernetes has for the keys",
            got=" ".join(str(error).split()),
            fix="correct the value; numbers in `env` are texts there, in quotes",
        ) from error
    kept = client.sanitize_for_serialization(pod_spec)  # type: ignore[no-untyped-call]
    if unknown := list(_unknown(spec, kept)):
        raise _refused(
            f"{group}: Kubernetes knows no {', '.join(unknown)}",
            expected="keys of a PodSpec, or of a Container under `container`, as in Kubernetes",
            got=", ".join(unknown),
            fix="correct the spelling, or leave the key out",
        )
    metadata = {
        part: {**(getattr(template, part) or {}), **_texts(patch.get(part) or {})} or None
        for part in ("labels", "annotations")
    }
    return replace(template, pod_spec=pod_spec, **metadata)


def _texts(found: Mapping[Any, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in found.items()}


@cache
def _patches(file: Path) -> Mapping[str, Mapping[str, Any]]:
    if not file.exists():
        return {}
    try:
        groups = yaml.safe_load(file.read_text()) or {}
    except yaml.YAMLError as error:
        raise _refused(
            "it cannot be read",
            expected="YAML",
            got=" ".join(str(error).split()),
            fix="correct the file",
        ) from error
    _check_keys(groups, tuple(GROUPS), "")
    for group, patch in groups.items():
        _check_keys(patch, GROUPS[group], f"{group}.")
        for part in patch or {}:
            if part in _STAGE_RESOURCES:
                _check_quantity(patch[part], f"{group}.{part}")
            elif part == "spot_training":
                _check_flag(patch[part], f"{group}.{part}")
            elif group == "node_cache":
                continue  # `node_cache_settings` checks both keys together
            else:
                names = get_args(AcceleratorName) if part == "accelerators" else None
                _check_keys(patch[part], names, f"{group}.{part}.")
    for name, labels in ((groups.get("gpu_worker") or {}).get("accelerators") or {}).items():
        _check_labels(labels, f"gpu_worker.accelerators.{name}")
    return {group: patch or {} for group, patch in groups.items()}


def _check_keys(found: Any, known: tuple[str, ...] | None, path: str) -> None:
    if found is None:  # all lines of the key are comments
        return
    is_map = isinstance(found, dict)
    unknown = [str(key) for key in found if known and key not in known] if is_map else []
    if unknown or not is_map:
        raise _refused(
            f"{path}{unknown[0]} is not known" if unknown else path.rstrip("."),
            expected=f"a map of {', '.join(known)}" if known else "a map",
            got=", ".join(unknown) if unknown else repr(found),
        )


def _check_labels(found: Any, path: str) -> None:
    is_map = isinstance(found, dict) and found
    if not is_map or not all(isinstance(each, str) for each in found.values()):
        raise _refused(
            f"{path} is not a map of labels",
            expected="labels of nodes, such as {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}",
            got=repr(found),
            fix="see the comment at the beginning of the file; kubectl get nodes --show-labels",
        )


def _check_flag(found: Any, path: str) -> None:
    if found is not None and not isinstance(found, bool):
        raise _refused(
            f"{path} is neither true nor false", expected="true or false", got=repr(found)
        )


def _check_quantity(found: Any, path: str) -> None:
    from kubernetes.utils import parse_quantity

    try:
        is_quantity = not isinstance(found, bool) and parse_quantity(str(found)) > 0  # type: ignore[no-untyped-call]
    except ValueError:
        is_quantity = False
    if not is_quantity:
        raise _refused(
            f"{path} is not a quantity",
            expected="one of Kubernetes, such as 8, 64Gi or 440Gi",
            got=repr(found),
        )


def _merged(template: Any, patch: Any) -> Any:
    if isinstance(template, dict) and isinstance(patch, dict):
        return {
            **template,
            **{key: _merged(template.get(key), value) for key, value in patch.items()},
        }
    if isinstance(template, list) and isinstance(patch, list):
        return [*template, *patch]
    return patch


def _unknown(fields: Any, kept: Any, path: str = "") -> Iterator[str]:
    if isinstance(fields, dict):
        for key, value in fields.items():
            key_path = f"{path}.{key}".lstrip(".")
            if not isinstance(kept, dict) or key not in kept:
                yield key_path
            else:
                yield from _unknown(value, kept[key], key_path)
    elif isinstance(fields, list):
        for number, value in enumerate(fields):
            if isinstance(kept, list) and number < len(kept):
                yield from _unknown(value, kept[number], f"{path}[{number}]")


def _refused(
    message: str,
    *,
    expected: str,
    got: str,
    fix: str = "see the comment at the beginning of the file",
) -> ConfigError:
    return ConfigError(f"deployment/pods.yaml: {message}", expected=expected, got=got, fix=fix)
