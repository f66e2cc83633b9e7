"""A RayCluster for KubeRay of the shapes that stages ask for, to work on without Flyte.

`python deployment/ray/manifest.py node_8gpu > deployment/ray/node_8gpu.yaml` writes the files that
lie beside this one; `cluster:16` is 16 machines. The image is for envsubst to fill in.
"""

import sys
from typing import Any

import yaml
from flytekit import PodTemplate
from kubernetes.client import ApiClient

from nemo_rl_core.config.cluster import ClusterConfig
from tasks.platform.ray_stage import RayStage
from tasks.platform.resources import TRAIN
from tasks.platform.shapes import shape_of


def manifest(config: ClusterConfig) -> dict[str, Any]:
    """The same pods that a stage gets, with an image and the labels that Flyte would add."""
    stage = RayStage(shape_of(config), TRAIN)
    image = "${TRAINING_IMAGE}" if stage.shape.num_gpus else "${LAPTOP_IMAGE}"
    head = stage.head_node_config
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": f"nemo-rl-{config.shape.replace('_', '-')}"},
        "spec": {
            "enableInTreeAutoscaling": False,
            "headGroupSpec": {
                "rayStartParams": {**head.ray_start_params, "dashboard-host": "0.0.0.0"},
                "template": _pod(head.pod_template, image),
            },
            "workerGroupSpecs": [
                {
                    "groupName": group.group_name,
                    "replicas": group.replicas,
                    "minReplicas": group.replicas,
                    "maxReplicas": group.replicas,
                    "rayStartParams": {},
                    "template": _pod(group.pod_template, image),
                }
                for group in stage.worker_node_config
            ],
        },
    }


def _pod(template: PodTemplate, image: str) -> dict[str, Any]:
    template.pod_spec.containers[0].image = image
    spec: dict[str, Any] = ApiClient().sanitize_for_serialization(template.pod_spec)
    return {"metadata": {"labels": template.labels}, "spec": spec}


def read_shape(words: str) -> ClusterConfig:
    """`node_8gpu`, or `cluster:16` for 16 machines of eight GPUs."""
    name, _, num_nodes = words.partition(":")
    sized = {"num_workers": 8 * int(num_nodes)} if num_nodes else {}
    return ClusterConfig.model_validate({"shape": name, **sized})


def text(words: str) -> str:
    """The manifest as a file."""
    return (
        f"# Written by deployment/ray/manifest.py {words}\n"
        "#   envsubst < FILE | kubectl apply --namespace NAMESPACE --filename -\n"
        + yaml.safe_dump(manifest(read_shape(words)), sort_keys=False)
    )


if __name__ == "__main__":
    sys.stdout.write(text(sys.argv[1]))
