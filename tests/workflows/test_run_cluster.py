"""All stages of a run on one Ray cluster, over pods that share nothing: made, joined, given back.

The pods are those of `tests/workflows/cluster_bed`, and what makes the cluster is its Kubernetes
server.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workflows.cluster_bed import ClusterBed, why_no_pods
from tests.workflows.test_cluster_bed import SMALL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_no_pods() is not None, reason=f"{why_no_pods()}"),
]


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[ClusterBed]:
    with ClusterBed(tmp_path / "bed", pods_per_worker=2) as started:
        yield started


def test_two_stages_of_a_run_share_one_cluster(
    bed: ClusterBed, own_store: Path, tmp_path: Path
) -> None:
    from tasks.evaluate import evaluate
    from tasks.prepare_data import prepare_data
    from tasks.prepare_model import prepare_model
    from tasks.recipes.grpo import GRPORecipe, plan_grpo
    from tasks.train_sft import train_sft

    sft = {"num_steps": 4, "save_every_num_steps": 2, "global_batch_size": 16}
    stages = plan_grpo(config=GRPORecipe.model_validate({**SMALL, "sft": sft}))
    model = prepare_model(config=stages.model)
    data = prepare_data(config=stages.data, tokenizer=model.tokenizer)
    given = {"config": stages.sft, "base": model.base, "train": data.train}
    asked = {"config": stages.evaluation, "checkpoint": model.base, "validation": data.validation}
    trained = _of_run(bed, train_sft, given, tmp_path / "sft", "n0")
    raylets = _raylets(bed)
    measured = _of_run(bed, evaluate, asked, tmp_path / "evaluate", "n1")
    assert _raylets(bed) == raylets
    assert len(raylets) == 1 + 2
    assert len(bed.kubernetes.ray_jobs) == 1
    assert not bed.kubernetes.refused
    assert trained["content_hash"] == _here(train_sft, given)["content_hash"]
    assert measured["content_hash"] == _here(evaluate, asked)["content_hash"]
    # What is uploaded leaves the volume, and what was downloaded does.
    assert not any((bed.volume / "artifacts").iterdir())
    assert not any((bed.volume / "inputs").iterdir())


def _of_run(bed: ClusterBed, stage: Any, inputs: dict[str, Any], folder: Path, node: str) -> Any:
    from tasks.platform.shapes import shape_of
    from tests.workflows.cluster_bed.single_stage import SingleStage

    shape = shape_of(inputs["config"].cluster)
    return SingleStage(bed, stage.on_shape(shape).of_run(), inputs, folder, node=node).run()


def _raylets(bed: ClusterBed) -> list[int]:
    """Ray's process on each of the cluster's pods."""
    import ray

    job = bed.kubernetes.ray_jobs[-1].job
    assert job is not None
    program = str(Path(ray.__file__).parent / "core/src/ray/raylet/raylet")
    return [pid for pod in (job.head, *job.workers) for pid in pod.processes(program)]


def _here(stage: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The fields of the artifact of a local run."""
    from nemo_rl_core.distributed.session import shutdown

    try:
        return dict(stage(**inputs).model_dump())
    finally:
        shutdown()
