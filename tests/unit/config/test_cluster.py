"""Shapes of clusters, and that their workers hold whole copies of a model."""

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
        (ClusterConfig(shape="gpus", num_workers=12), [8, 4], 12),
        (ClusterConfig(shape="gpus", num_workers=8, num_gpus_per_node=4), [4, 4], 8),
    ],
)
def test_workers_lie_on_machines(config: ClusterConfig, bundles: list[int], num_gpus: int) -> None:
    assert config.bundles_per_node == bundles
    assert config.num_gpus == num_gpus


def test_one_gpu_holds_one_worker() -> None:
    with pytest.raises(ConfigError, match="room for one worker") as caught:
        ClusterConfig(shape="one_gpu", num_workers=2)
    assert "cluster.shape to gpus" in caught.value.fix


def test_workers_that_hold_part_of_a_copy_are_refused() -> None:
    parallel = {"tensor_parallel_size": 2, "context_parallel_size": 2}
    whole = TrainerSettings(training=parallel, cluster={"num_workers": 8})
    assert whole.cluster.num_workers == 8
    with pytest.raises(ConfigError, match="6 workers cannot hold whole copies") as caught:
        TrainerSettings(training=parallel, cluster={"num_workers": 6})
    assert caught.value.got == "cluster.num_workers: 6"
    assert "set cluster.num_workers to 8" in caught.value.fix


def test_copies_by_hand() -> None:
    assert DTensorTraining().data_parallel_size(3) == 3
    four = MegatronTraining(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert four.data_parallel_size(8) == 2
