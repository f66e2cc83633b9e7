"""All stages of a run on one Ray cluster, which they create, join and release.

The pods and the Kubernetes server that creates the cluster are those of
`tests/workflows/cluster_bed`.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workflows.cluster_bed import ClusterBed, why_no_pods
from tests.workflows.test_cluster_bed import (
    KILLED_SFT,
    SMALL,
    attempt_of,
    contents,
    last_saved_step,
    launch,
    manifests,
    manifests_of,
    wait_for,
)

SHARED: dict[str, Any] = {
    **SMALL,
    "sft": KILLED_SFT,
    "cluster": {**SMALL["cluster"], "lifetime": "run"},
}

logger = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.experimental,
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
    from tasks.plan_tasks.grpo import plan_grpo
    from tasks.prepare_data import prepare_data
    from tasks.prepare_model import prepare_model
    from tasks.recipes.grpo import GRPORecipe
    from tasks.train_sft import train_sft

    sft = {"num_steps": 4, "save_every_num_steps": 2, "global_batch_size": 16}
    stages = plan_grpo(config=GRPORecipe.model_validate({**SMALL, "sft": sft}))
    model = prepare_model(config=stages.model)
    data = prepare_data(config=stages.data, tokenizer=model.tokenizer)
    sft_inputs = {"config": stages.sft, "base": model.base, "train": data.train}
    evaluate_inputs = {
        "config": stages.evaluation,
        "checkpoint": model.base,
        "validation": data.validation,
    }
    trained = _run_stage(bed, train_sft, sft_inputs, tmp_path / "sft", "n0")
    raylets = _raylets(bed)
    measured = _run_stage(bed, evaluate, evaluate_inputs, tmp_path / "evaluate", "n1")
    assert _raylets(bed) == raylets
    assert len(raylets) == 1 + 2
    assert len(bed.kubernetes.ray_jobs) == 1
    assert not bed.kubernetes.refused
    assert trained["content_hash"] == _run_locally(train_sft, sft_inputs)["content_hash"]
    assert measured["content_hash"] == _run_locally(evaluate, evaluate_inputs)["content_hash"]
    # Uploaded and downloaded files are removed from the volume.
    assert not any((bed.volume / "artifacts").iterdir())
    assert not any((bed.volume / "inputs").iterdir())


def test_a_pipeline_on_one_cluster_that_loses_driver_and_head_equals_a_local_run(
    bed: ClusterBed, tmp_path: Path, run_recipe: Callable[..., Any]
) -> None:
    launched = launch(bed, tmp_path, SHARED)

    first = attempt_of(bed, launched, "train_sft", 0)
    wait_for(lambda: last_saved_step(bed, first), launched.poll)
    raylets = _raylets(bed)
    bed.drivers[-1].kill()
    attempt_of(bed, launched, "train_sft", 1)
    training = attempt_of(bed, launched, "grpo_iteration", 0)
    assert _raylets(bed) == raylets, (
        "the second attempt of SFT, the evaluation and GRPO share the cluster"
    )
    wait_for(lambda: last_saved_step(bed, training), launched.poll)
    lost = bed.kubernetes.ray_jobs[-1].job
    assert lost is not None
    lost.head.kill()
    output, _ = launched.communicate(timeout=1500)
    (execution,) = bed.backend.executions.values()
    assert launched.returncode == 0, output[-2000:] + execution.error
    attempts = {each: execution.named(each)[0].attempts for each in ("train_sft", "grpo_iteration")}
    assert [len(each) for each in attempts.values()] == [2, 2]
    headless, remade = bed.kubernetes.ray_jobs
    assert [headless.how, remade.how] == ["Deleted", "Deleted"]
    assert headless.removed_at is not None
    assert headless.removed_at < remade.made_at, "the next attempt has noticed the lost head"
    assert remade.removed_at is not None, "released before the end of the run"
    assert not bed.jobs, "Flyte made no RayJob"
    assert not bed.kubernetes.refused
    _log_start_up(bed)

    local = run_recipe(SHARED, tmp_path / "local")
    assert local.exit_code == 0, local.output[-2000:]
    assert any(step["grad_norm"] > 0 for step in local.metrics("grpo_iteration 1"))
    made = contents(manifests(bed, execution))
    assert made == contents(manifests_of(local.store))

    # Artifacts of the shared cluster are cache hits for stages with separate clusters.
    separate = {**SHARED, "cluster": SMALL["cluster"]}
    output, _ = (again := launch(bed, tmp_path, separate)).communicate(timeout=600)
    assert again.returncode == 0, output[-2000:]
    assert not bed.jobs
    assert len(bed.kubernetes.ray_jobs) == 2


def _log_start_up(bed: ClusterBed) -> None:
    for made in bed.kubernetes.ray_jobs:
        assert made.running_at is not None
        seconds = made.running_at - made.made_at
        logger.info("the pods of %s ran and Ray had started after %.1f s", made.name, seconds)


def _run_stage(bed: ClusterBed, stage: Any, inputs: dict[str, Any], folder: Path, node: str) -> Any:
    from tasks.pods.shapes import shape_of
    from tests.workflows.cluster_bed.single_stage import SingleStage

    shape = shape_of(inputs["config"].cluster)
    return SingleStage(bed, stage.on_shape(shape).of_run(), inputs, folder, node=node).run()


def _raylets(bed: ClusterBed) -> list[int]:
    """Returns the process id of the raylet on each pod of the cluster."""
    import ray

    job = bed.kubernetes.ray_jobs[-1].job
    assert job is not None
    program = str(Path(ray.__file__).parent / "core/src/ray/raylet/raylet")
    return [pid for pod in (job.head, *job.workers) for pid in pod.processes(program)]


def _run_locally(stage: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Runs a stage on this machine and returns the fields of its artifact."""
    from nemo_rl_core.distributed.session import shutdown

    try:
        return dict(stage(**inputs).model_dump())
    finally:
        shutdown()
