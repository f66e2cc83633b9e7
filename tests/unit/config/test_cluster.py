"""Shapes of clusters, whose workers hold complete copies of a model."""

import pytest

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.trainer import TrainerSettings
from nemo_rl_core.config.training import DTensorTraining, MegatronTraining
from nemo_rl_core.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "bundles", "num_gpus"),
    [
        (ClusterConfig(), [1], 0),
        (ClusterConfig(num_workers=12), [12], 0),
        (ClusterConfig(shape="one_gpu"), [1], 1),
        (ClusterConfig(shape="node_8gpu"), [8], 8),
        (ClusterConfig(shape="node_8gpu", num_workers=4), [4], 4),
        (ClusterConfig(shape="cluster", num_workers=12), [8, 4], 12),
        (ClusterConfig(shape="cluster", num_workers=8, num_gpus_per_node=4), [4, 4], 8),
    ],
)
def test_workers_are_placed_on_machines(
    config: ClusterConfig, bundles: list[int], num_gpus: int
) -> None:
    assert config.bundles_per_node == bundles
    assert config.num_gpus == num_gpus


def test_one_gpu_holds_one_worker() -> None:
    with pytest.raises(ConfigError, match="room for one worker") as caught:
        ClusterConfig(shape="one_gpu", num_workers=2)
    assert "cluster.shape to cluster" in caught.value.fix


@pytest.mark.parametrize(
    ("given", "message", "expected"),
    [
        ({"num_workers": 9}, "room for 8 workers", "cluster.num_workers: 8 or fewer"),
        ({"num_gpus_per_node": 4}, "eight GPUs", "cluster.num_gpus_per_node: 8, or not set"),
        ({"shape": "laptop", "accelerator": "nvidia-h100"}, "no GPU", "no cluster.accelerator"),
    ],
)
def test_bundles_that_do_not_fit_a_shape_are_refused(
    given: dict, message: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ClusterConfig(**{"shape": "node_8gpu", **given})
    assert caught.value.expected == expected


def test_a_size_is_the_same_after_a_round_trip() -> None:
    for config in (ClusterConfig(), ClusterConfig(shape="node_8gpu")):
        assert ClusterConfig.model_validate(config.model_dump()) == config


def test_workers_that_hold_part_of_a_copy_are_refused() -> None:
    parallel = {"tensor_parallel_size": 2, "context_parallel_size": 2}
    full = TrainerSettings(training=parallel, cluster={"num_workers": 8})
    assert full.cluster.num_workers == 8
    with pytest.raises(ConfigError, match="6 workers cannot hold complete copies") as caught:
        TrainerSettings(training=parallel, cluster={"num_workers": 6})
    assert caught.value.got == "cluster.num_workers: 6"
    assert "set cluster.num_workers to 8" in caught.value.fix


def test_copies_of_a_model_by_hand() -> None:
    assert DTensorTraining().data_parallel_size(3) == 3
    four = MegatronTraining(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert four.data_parallel_size(8) == 2
