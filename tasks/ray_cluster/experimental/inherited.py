"""Settings that the RayJob of a run inherits from the pod of the stage that creates it.

Flyte has given that pod variables, secrets and tolerations, which the pods of a stage's
own RayJob would also get. The templates of the pods have the site's settings already.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tasks.pods.pods import SPOT, driver_pod
from tasks.pods.site_pods import job_settings

_QUEUE_LABELS = "kueue.x-k8s.io/"  # labels of the execution, which Flyte passes on to its pods
_OF_KUBERNETES = "node.kubernetes.io/"  # prefix of tolerations that every pod gets
_KEPT = ("serviceAccountName", "imagePullSecrets")

Json = Mapping[str, Any]


def container_settings(own_pod: Json) -> dict[str, Any]:
    """Returns the image and the environment that Flyte has given to the stage."""
    main, template = own_pod["spec"]["containers"][0], _template()["containers"][0]
    return {
        "image": main["image"],
        "env": list(_additional(template.get("env"), main.get("env"), _variable)),
        "envFrom": list(_additional(template.get("envFrom"), main.get("envFrom"), _as_json)),
    }


def spec_settings(own_pod: Json) -> dict[str, Any]:
    """Returns the account, the image pull secrets, and the nodes that Flyte allows for the stage.

    They include spot nodes if the site's file allows them for training, since training is among
    the stages of a run.
    """
    spec, template = own_pod["spec"], _template()
    spot = () if job_settings().spot_training else (SPOT,)
    tolerated = [
        each
        for each in _additional(template.get("tolerations"), spec.get("tolerations"), _as_json)
        if not str(each.get("key")).startswith((_OF_KUBERNETES, *spot))
    ]
    selected = {
        key: value
        for key, value in (spec.get("nodeSelector") or {}).items()
        if key not in (template.get("nodeSelector") or {}) and key not in spot
    }
    fields = {key: spec[key] for key in _KEPT if key in spec}
    placement = {"tolerations": tolerated, "nodeSelector": selected}
    return fields | {key: value for key, value in placement.items() if value}


def job_metadata(own_pod: Json) -> dict[str, dict[str, str]]:
    """Returns the labels and annotations of `job` in the site's file, and the execution's queue.

    The labels of an execution have priority over those of the file.
    """
    job, labels = job_settings(), own_pod["metadata"].get("labels") or {}
    queue = {key: value for key, value in labels.items() if key.startswith(_QUEUE_LABELS)}
    job_labels = {key: labels.get(key, value) for key, value in job.labels.items()}
    return {"labels": {**job_labels, **queue}, "annotations": dict(job.annotations)}


def _template() -> dict[str, Any]:
    from kubernetes.client import ApiClient

    spec: dict[str, Any] = ApiClient().sanitize_for_serialization(driver_pod().pod_spec)  # type: ignore[no-untyped-call]
    return spec


def _variable(entry: Json) -> tuple[str, str]:
    """Normalizes a variable: Kubernetes adds `apiVersion` to references and omits empty values."""
    return entry["name"], entry.get("value") or ""


def _as_json(entry: Json) -> str:
    return json.dumps(entry, sort_keys=True)


def _additional(
    template: Iterable[Json] | None, found: Iterable[Json] | None, name: Callable[[Json], Any]
) -> Iterator[Json]:
    names = [name(each) for each in template or ()]
    for each in found or ():
        if name(each) in names:
            names.remove(name(each))
        else:
            yield each
