"""Resource requests that are refused or time out, and the regression check."""

from pathlib import Path

import pytest
from flytekit import dynamic
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.types.directory import FlyteDirectory

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.errors import DataError, ResourceError
from tasks.artifacts import CompareReport
from tasks.evaluate import evaluate
from tasks.pods.shapes import Shape, laptop, one_gpu, shape_of
from tasks.ray_cluster.ray_stage import CLUSTER_GPUS, await_workers, check_offered
from tasks.refuse_regression import refuse_worse

SETTINGS = SerializationSettings(image_config=ImageConfig())


def nodes(count: int) -> Shape:
    """Machines with eight GPUs each."""
    return shape_of(ClusterConfig(shape="cluster", num_workers=8 * count))


def test_shapes_beyond_the_cluster_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLUSTER_GPUS, "16")
    check_offered(nodes(2))
    with pytest.raises(ResourceError, match="smaller than the requested cluster") as caught:
        check_offered(nodes(3))
    assert (caught.value.expected, caught.value.got) == ("24 GPUs", "16 GPUs")
    assert CLUSTER_GPUS in caught.value.fix
    monkeypatch.setenv(CLUSTER_GPUS, "0")
    check_offered(laptop())
    with pytest.raises(ResourceError):
        check_offered(one_gpu())
    monkeypatch.delenv(CLUSTER_GPUS)
    check_offered(nodes(100))


def test_workers_may_come_late() -> None:
    joined = iter([{"CPU": 0.0}, {"CPU": 88.0, "GPU": 7.0}, {"CPU": 88.0, "GPU": 8.0}])
    await_workers(nodes(1), lambda: next(joined), wait_seconds=5, pause_seconds=0)
    assert next(joined, None) is None


def test_workers_that_never_start_are_given_up_on() -> None:
    with pytest.raises(ResourceError, match="the stage's Ray cluster") as caught:
        await_workers(nodes(1), lambda: {"CPU": 88.0}, wait_seconds=0.05, pause_seconds=0.01)
    assert caught.value.expected == "8 GPUs"
    assert "kubectl describe pod" in caught.value.fix


def report(difference: float, high: float, folder: Path) -> CompareReport:
    metrics = {"difference": difference, "low": -0.1, "high": high, "confidence": 0.95}
    return CompareReport(
        directory=FlyteDirectory(str(folder)), stage="compare", content_hash="0", metrics=metrics
    )


def test_a_regression_is_refused_only_if_it_is_certain(tmp_path: Path) -> None:
    unsure = report(-0.02, 0.01, tmp_path)
    assert refuse_worse([unsure]) is unsure
    with pytest.raises(DataError, match="worse than its baseline") as caught:
        refuse_worse([report(-0.05, -0.01, tmp_path)])
    assert caught.value.got == "-5.0 points [-10.0, -1.0]"


@dynamic
def name_on(shape: str) -> str:
    """The task of a workflow's choice of a shape in a local run."""
    config = ClusterConfig.model_validate({"shape": shape})
    return str(evaluate.on(config).name)


def test_a_local_run_keeps_one_task_whatever_the_shape() -> None:
    for shape in ("laptop", "one_gpu", "node_8gpu"):
        assert name_on(shape=shape) == evaluate.name == "tasks.evaluate.evaluate"


def hand_back_seconds(ttl: int) -> float:
    """The longest time from the submitter's end to the removal of pods, by KubeRay's reconciler.

    It is notified when the submitter ends, and otherwise checks a RayJob every 3 s. After the job
    has ended it checks again, and 2 s after that if its time to live is not over.
    """
    look = 3
    left = ttl - look
    return look + look + (left + 2 if left > 0 else 0)


def test_gpus_are_given_back_within_ten_seconds() -> None:
    custom = evaluate.on_shape(nodes(1)).get_custom(SETTINGS)
    assert custom["shutdownAfterJobFinishes"] is True
    assert hand_back_seconds(300) > 300
    assert hand_back_seconds(10) == 15
    assert hand_back_seconds(int(custom.get("ttlSecondsAfterFinished", 0))) <= 10
