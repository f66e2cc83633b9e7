"""A RayCluster for KubeRay with the shapes of stages, for work without Flyte.

`python deployment/ray/manifest.py node_8gpu > deployment/ray/node_8gpu.yaml` writes the files in
this folder; `cluster:16` has 16 machines. `deployment/fill.sh` fills in the image.
"""

import sys
from typing import Any

import yaml

from nemo_rl_core.config.cluster import ClusterConfig
from tasks.pods.ray_manifest import cluster_spec
from tasks.pods.resources import TRAIN
from tasks.pods.shapes import shape_of
from tasks.ray_cluster.ray_stage import RayStage


def manifest(config: ClusterConfig) -> dict[str, Any]:
    """Returns the pods that a stage gets, with an image and the labels that Flyte would add."""
    stage = RayStage(shape_of(config), TRAIN)
    image = "${TRAINING_IMAGE}" if stage.shape.num_gpus else "${LAPTOP_IMAGE}"
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": f"nemo-rl-{config.shape.replace('_', '-')}"},
        "spec": cluster_spec(
            stage.head_node_config, stage.worker_node_config, container={"image": image}
        ),
    }


def read_shape(words: str) -> ClusterConfig:
    """Parses `node_8gpu`, or `cluster:16` for 16 machines with eight GPUs."""
    name, _, num_nodes = words.partition(":")
    sized = {"num_workers": 8 * int(num_nodes)} if num_nodes else {}
    return ClusterConfig.model_validate({"shape": name, **sized})


def text(words: str) -> str:
    """Returns the manifest as the text of a file."""
    return (
        f"# Written by deployment/ray/manifest.py {words}\n"
        "#   deployment/fill.sh FILE | kubectl apply --namespace NAMESPACE --filename -\n"
        + yaml.safe_dump(manifest(read_shape(words)), sort_keys=False)
    )


if __name__ == "__main__":
    sys.stdout.write(text(sys.argv[1]))
