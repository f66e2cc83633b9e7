"""What the RayJob of a run takes over from the pod of the stage that asks for it.

Flyte has given that pod variables, secrets and tolerations, which the pods of a RayJob of its own
would have, too. What its template has (`driver_pod`) is not taken over: the templates of the
cluster's pods have what the site's file gives to their own groups.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tasks.platform.pods import SPOT, driver_pod
from tasks.platform.site_pods import of_jobs

_QUEUE_LABELS = "kueue.x-k8s.io/"  # of the execution: Flyte passes them on to its pods
_OF_KUBERNETES = "node.kubernetes.io/"  # tolerations that its admission gives to every pod
_KEPT = ("serviceAccountName", "imagePullSecrets")

Json = Mapping[str, Any]


def of_container(own_pod: Json) -> dict[str, Any]:
    """The image and the environment that Flyte has given to the stage.

    Args:
        own_pod: The stage's pod, as Kubernetes describes it.
    """
    main, template = own_pod["spec"]["containers"][0], _template()["containers"][0]
    return {
        "image": main["image"],
        "env": list(_besides(template.get("env"), main.get("env"), _variable)),
        "envFrom": list(_besides(template.get("envFrom"), main.get("envFrom"), _whole)),
    }


def of_spec(own_pod: Json) -> dict[str, Any]:
    """The account, the secrets for images, and the nodes that Flyte lets the stage run on.

    Spot nodes are among them where the site's file lets training run there, since training is
    among the stages of a run.

    Args:
        own_pod: The stage's pod, as Kubernetes describes it.
    """
    spec, template = own_pod["spec"], _template()
    spot = () if of_jobs().spot_training else (SPOT,)
    tolerated = [
        each
        for each in _besides(template.get("tolerations"), spec.get("tolerations"), _whole)
        if not str(each.get("key")).startswith((_OF_KUBERNETES, *spot))
    ]
    selected = {
        key: value
        for key, value in (spec.get("nodeSelector") or {}).items()
        if key not in (template.get("nodeSelector") or {}) and key not in spot
    }
    found = {key: spec[key] for key in _KEPT if key in spec}
    given = {"tolerations": tolerated, "nodeSelector": selected}
    return found | {key: value for key, value in given.items() if value}


def of_metadata(own_pod: Json) -> dict[str, dict[str, str]]:
    """The labels and annotations of `job` in the site's file, and the queue of the execution.

    An execution's labels come before those of the file.

    Args:
        own_pod: The stage's pod, as Kubernetes describes it.
    """
    job, labels = of_jobs(), own_pod["metadata"].get("labels") or {}
    queue = {key: value for key, value in labels.items() if key.startswith(_QUEUE_LABELS)}
    given = {key: labels.get(key, value) for key, value in job.labels.items()}
    return {"labels": {**given, **queue}, "annotations": dict(job.annotations)}


def _template() -> dict[str, Any]:
    from kubernetes.client import ApiClient

    spec: dict[str, Any] = ApiClient().sanitize_for_serialization(driver_pod().pod_spec)  # type: ignore[no-untyped-call]
    return spec


def _variable(entry: Json) -> tuple[str, str]:
    """Kubernetes adds an `apiVersion` to references, and leaves an empty value out."""
    return entry["name"], entry.get("value") or ""


def _whole(entry: Json) -> str:
    return json.dumps(entry, sort_keys=True)


def _besides(
    template: Iterable[Json] | None, found: Iterable[Json] | None, name: Callable[[Json], Any]
) -> Iterator[Json]:
    """The entries that are not the template's; of two that are equal one is."""
    own = [name(each) for each in template or ()]
    for each in found or ():
        if name(each) in own:
            own.remove(name(each))
        else:
            yield each
