"""A RayCluster for KubeRay of the shapes that stages ask for, to work on without Flyte.

`python deployment/ray/manifest.py node_8gpu > deployment/ray/node_8gpu.yaml` writes the files that
lie beside this one; `cluster:16` is 16 machines. The image is for `deployment/fill.sh` to fill in.
"""

import sys
from typing import Any

import yaml

from nemo_rl_core.config.cluster import ClusterConfig
from tasks.platform.ray_manifest import cluster_spec
from tasks.platform.ray_stage import RayStage
from tasks.platform.resources import TRAIN
from tasks.platform.shapes import shape_of


def manifest(config: ClusterConfig) -> dict[str, Any]:
    """The same pods that a stage gets, with an image and the labels that Flyte would add."""
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
    """`node_8gpu`, or `cluster:16` for 16 machines of eight GPUs."""
    name, _, num_nodes = words.partition(":")
    sized = {"num_workers": 8 * int(num_nodes)} if num_nodes else {}
    return ClusterConfig.model_validate({"shape": name, **sized})


def text(words: str) -> str:
    """The manifest as a file."""
    return (
        f"# Written by deployment/ray/manifest.py {words}\n"
        "#   deployment/fill.sh FILE | kubectl apply --namespace NAMESPACE --filename -\n"
        + yaml.safe_dump(manifest(read_shape(words)), sort_keys=False)
    )


if __name__ == "__main__":
    sys.stdout.write(text(sys.argv[1]))
