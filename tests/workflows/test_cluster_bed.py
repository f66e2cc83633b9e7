"""The main job on pods that are killed and share only a volume and an S3 server.

`tests/workflows/cluster_bed` describes what the bed covers and what it does not.
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from nemo_rl_core.store.files import hash_file
from nemo_rl_core.store.node_cache import FOLDER, GIB
from tasks.pods.pods import STORE_FOLDER
from tests.commands import RECIPE, REPOSITORY
from tests.workflows.cluster_bed import ClusterBed, Network, Pod, why_no_pods
from tests.workflows.flyte_backend import Attempt, ExecutionRecord

if TYPE_CHECKING:
    from tests.workflows.cluster_bed.single_stage import SingleStage

logger = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_no_pods() is not None, reason=f"{why_no_pods()}"),
]

NUM_STEPS, SAVE_EVERY = 8, 2
SMALL: dict[str, Any] = {
    **RECIPE,
    "sft": {"num_steps": 100, "global_batch_size": 32, "learning_rate": 0.003},
    "grpo": {
        **RECIPE["grpo"],
        "num_iterations": 1,
        "num_steps_per_iteration": NUM_STEPS,
        "save_every_num_steps": SAVE_EVERY,
    },
    # Two ranks train and two engines sample, one of each per pod: half of all weights cross pods.
    "generation": {"backend": "hf", "max_new_tokens": 3, "num_engines": 2},
    "cluster": {"num_workers": 2, "num_threads": 1},
}

# The steps take longer than the upload of a save, so that each attempt is killed long before its
# end, even on fast machines.
SFT = {"num_steps": 400, "save_every_num_steps": 40, "global_batch_size": 64}
LARGER_MODEL = {"num_layers": 4, "hidden_size": 128, "intermediate_size": 256}
KILLED_SFT = {
    **SMALL["sft"],
    "num_steps": 600,
    "save_every_num_steps": 100,
    "global_batch_size": 64,
    "learning_rate": 0.0002,  # rewards still differ after this many steps
}
# With its moments it takes 80 MB, too much for the head.
LARGE_MODEL = {"hidden_size": 512, "intermediate_size": 1024, "num_layers": 3, "num_heads": 8}


@dataclass(frozen=True)
class _Left:
    """State that an attempt has left for the next one."""

    step: int
    metrics: list[str]
    shards: dict[str, str]


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[ClusterBed]:
    with ClusterBed(tmp_path / "bed", pods_per_worker=2) as started:
        yield started


def test_pods_share_only_the_volume(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir(mode=0o777)
    (tmp_path / "volume").chmod(0o777)
    folders = ["/tmp", "/dev/shm", "/home/nemo", "/var/nemo_rl"]
    writes = " && ".join(f"echo here > {folder}/note" for folder in folders)
    reads = f"cat {' '.join(f'{folder}/note' for folder in folders)}; ls {REPOSITORY}"
    serve = "python -c 'import http.server as s; s.test(s.SimpleHTTPRequestHandler, port=8000)'"
    with Network() as network:
        logs = {name: tmp_path / name for name in ("one", "two")}
        volume = tmp_path / "volume"
        command = ["sh", "-c", f"{writes}; cd /var/nemo_rl; exec {serve}"]
        one = Pod(network, "one", command, {}, log=logs["one"], volume=volume)
        wait_for((tmp_path / "volume/note").exists, one.poll)
        look = f"{reads}; id -u; hostname -i; touch /etc/x; touch {sys.prefix}/x; "
        look += "python -c 'import nemo_rl_core'; "
        look += "until python -c \"import urllib.request as u; u.urlopen('http://$ADDRESS:8000')\" "
        look += "2> /dev/null; do sleep 0.2; done; echo reached; "
        look += "python -c \"import urllib.request as u; u.urlopen('http://127.0.0.1:8000')\""
        look = look.replace("$ADDRESS", one.address)
        two = Pod(network, "two", ["sh", "-c", look], {}, log=logs["two"], volume=volume)
        try:
            wait_for(lambda: two.poll() is not None, lambda: None)
        finally:
            two.remove()
            one.remove()
    seen = logs["two"].read_text()
    assert seen.count("here\n") == 1
    assert seen.count("No such file or directory") == 3
    assert "No module named 'nemo_rl_core'" in seen
    assert f"1000\n{two.address}\n" in seen
    assert seen.count("Read-only file system") == 2
    assert "reached\n" in seen
    assert "Connection refused" in seen.partition("reached\n")[2]


@pytest.mark.thorough
def test_a_stage_on_two_nodes_equals_a_local_one(
    bed: ClusterBed, own_store: Path, tmp_path: Path
) -> None:
    sft = {"num_steps": 4, "save_every_num_steps": 2, "global_batch_size": 16}
    inputs = inputs_of_sft(sft, model=LARGE_MODEL)
    stage = _stage(bed, inputs, tmp_path)
    artifact = stage.run()
    assert artifact["content_hash"] == train_locally(inputs).content_hash
    # Each machine has sent its shards, and the head none.
    sent = {name: _clients(bed, "PUT", at) for name, at in _shards(bed, stage.attempts[0]).items()}
    (job,) = bed.jobs
    assert sorted(sent.values()) == sorted([worker.address] for worker in job.workers)
    assert _clients(bed, "PUT", f"{stage.attempts[0].checkpoint}/save.json") == [job.head.address]
    _assert_machines_made_the_artifact(bed, artifact["directory"]["path"])
    # Uploaded and downloaded files are removed from the volume.
    assert not any((bed.volume / "artifacts").iterdir())
    assert not any((bed.volume / "inputs").iterdir())


@pytest.mark.thorough
def test_a_second_stage_with_the_cache_of_one_node_downloads_nothing(
    own_store: Path, tmp_path: Path
) -> None:
    # The cache is on the volume here, since all pods of the bed run on one machine.
    secrets = {FOLDER: f"{STORE_FOLDER}/node", GIB: "1"}
    with ClusterBed(tmp_path / "bed", at_once=True, secrets=secrets) as bed:
        for num_steps, downloads in ((3, True), (4, False)):
            sft = {"num_steps": num_steps, "save_every_num_steps": 4, "global_batch_size": 16}
            inputs = inputs_of_sft(sft, model=LARGE_MODEL)
            stage = _stage(bed, inputs, tmp_path / f"{num_steps}", node=f"n{num_steps}")
            bed.bucket.sent.clear()
            artifact = stage.run()
            sent = {
                Path(path).name: num_bytes
                for path, num_bytes in bed.bucket.sent.items()
                if path.startswith("single/given/") and num_bytes
            }
            assert "manifest.json" in sent, "each stage has a separate copy of its inputs"
            assert ({"model.safetensors", "rows.parquet"} <= sent.keys()) == downloads
            assert sum(sent.values()) > 2**20 if downloads else sum(sent.values()) < 2**17
            assert artifact["content_hash"] == train_locally(inputs).content_hash
        names = {path.name for path in (bed.volume / "node" / "files").iterdir()}
        weights = inputs["base"].model_folder / "model.safetensors"
        assert hash_file(weights) in names


def _assert_machines_made_the_artifact(bed: ClusterBed, address: str) -> None:
    """Asserts that each machine had the server copy its shards from the last save."""
    (job,) = bed.jobs
    folder = f"{bed.bucket.path(address)}/"
    sizes = {path: len(bed.bucket.read(path) or b"") for path in bed.bucket.list(folder)}
    assert sum(sizes.values()) > 64 * 2**20
    large = {path for path in sizes if sizes[path] > 2**20}
    shards = {path for path in large if "/trainer/shard-" in path}
    assert len(shards) == 2
    assert f"{folder}model/model.safetensors" in large
    assert large <= set(bed.bucket.copied)
    clients = [bed.bucket.clients["PUT", path] for path in shards]
    assert sorted(map(sorted, clients)) == sorted([worker.address] for worker in job.workers)
    sent: Counter[str] = Counter()
    for (client, path), num_bytes in bed.bucket.received.items():
        sent[client] += num_bytes * path.startswith(folder)
    total = sum(sizes.values())
    logger.info("the head sent %d bytes of an artifact of %d bytes", sent[job.head.address], total)
    assert sent.total() == sent[job.head.address] < total / 100


@pytest.mark.thorough
def test_a_stage_resumes_from_s3_after_losing_a_worker_a_node_and_two_heads(
    bed: ClusterBed, own_store: Path, tmp_path: Path
) -> None:
    inputs = inputs_of_sft(SFT, model=LARGER_MODEL)
    stage = _stage(bed, inputs, tmp_path)
    losses = (_kill_a_worker, _kill_a_node, _evict_the_head, _kill_the_head)
    saved, left = [], []  # the first and the last save of each lost attempt
    with ThreadPoolExecutor(1) as background:
        running = background.submit(stage.run)

        def ended() -> int | None:
            return 0 if running.done() else None

        def left_behind(number: int) -> _Left:
            wait_for(lambda: len(stage.attempts) > number + 1, ended)
            attempt = stage.attempts[number]
            return _Left(
                last_saved_step(bed, attempt), _metrics_of_save(bed, attempt), _shards(bed, attempt)
            )

        for number, lose in enumerate(losses):
            wait_for(lambda n=number: len(stage.attempts) > n, ended)
            attempt = stage.attempts[number]
            # Before its first save it has the save of the attempt before.
            start = left[-1].step if left else 0
            saved.append(
                wait_for(lambda a=attempt, n=start: (s := last_saved_step(bed, a)) > n and s, ended)
            )
            lose(bed)
            left.append(left_behind(number))
        artifact = running.result()
    attempts = stage.attempts
    assert [each.may_retry for each in attempts] == [True, True, None, None, None], attempts
    assert "WorkerLostError" in attempts[0].error
    assert [each.exit_code for each in attempts[2:]] == [143, -signal.SIGKILL, 0]
    # The evicted attempt has saved its current step.
    assert left[2].step > saved[2]
    # Lines contain durations, so they differ for a step that ran again.
    metrics = _lines(bed, artifact["directory"]["path"])
    assert len(metrics) == SFT["num_steps"]
    for each, job in zip(left, bed.jobs[1:], strict=True):
        assert each.metrics == metrics[: each.step]
        # Each worker of the next attempt has requested one shard, and its head none.
        clients = [_clients(bed, "GET", at) for at in each.shards.values()]
        assert sorted(clients) == sorted([worker.address] for worker in job.workers)
    # Only the save of the last attempt is left.
    assert [bool(_last_save(bed, each)) for each in attempts] == [False] * 4 + [True]
    assert artifact["content_hash"] == train_locally(inputs).content_hash


@pytest.mark.thorough
def test_a_local_run_does_not_join_a_cluster_that_ray_start_has_left(tmp_path: Path) -> None:
    ask = "from nemo_rl_core.distributed.virtual_cluster import start_ray; start_ray(); "
    ask += "import ray; print('cores', ray.cluster_resources()['CPU'])"
    both = "ray start --head --num-cpus=7 --include-dashboard=false --disable-usage-stats && "
    command = ["sh", "-c", f'{both} python -c "{ask}"']
    code = {"PYTHONPATH": "/var/nemo_rl", "NEMO_RL_HOME": "/home/nemo/store"}
    with Network() as network:
        pod = Pod(network, "laptop", command, code, log=tmp_path / "log", volume=REPOSITORY)
        try:
            wait_for(lambda: pod.poll() is not None, lambda: None)
        finally:
            pod.remove()
    assert f"cores {float(os.cpu_count() or 0)}" in (tmp_path / "log").read_text()


@pytest.mark.thorough
def test_a_pipeline_that_loses_a_worker_a_node_and_a_head_equals_a_local_run(
    bed: ClusterBed, tmp_path: Path, run_recipe: Callable[..., Any]
) -> None:
    recipe = {**SMALL, "sft": KILLED_SFT}
    launched = launch(bed, tmp_path, recipe)
    lose_after_a_save(bed, launched, "train_sft", _kill_a_worker)
    lose_after_a_save(bed, launched, "grpo_iteration", _kill_a_node, _kill_the_head)
    output, _ = launched.communicate(timeout=1500)
    (execution,) = bed.backend.executions.values()
    assert launched.returncode == 0, output[-2000:] + execution.error
    attempts = {each: execution.named(each)[0].attempts for each in ("train_sft", "grpo_iteration")}
    assert [len(each) for each in attempts.values()] == [2, 3]
    local = run_recipe(recipe, tmp_path / "local")
    assert local.exit_code == 0, local.output[-2000:]
    assert any(step["grad_norm"] > 0 for step in local.metrics("grpo_iteration 1"))
    assert contents(manifests(bed, execution)) == contents(manifests_of(local.store))
    _assert_optimizers_stayed_in_the_bucket(bed)


def lose_after_a_save(
    bed: ClusterBed,
    launched: "subprocess.Popen[str]",
    stage: str,
    *losses: Callable[[ClusterBed], None],
) -> None:
    """Applies one loss to each attempt of a stage, once the attempt has uploaded a save."""
    step = 0
    for number, lose in enumerate(losses):
        attempt = attempt_of(bed, launched, stage, number)
        step = wait_for(
            lambda a=attempt, n=step: (s := last_saved_step(bed, a)) > n and s, launched.poll
        )
        lose(bed)
    attempt_of(bed, launched, stage, len(losses))


def attempt_of(
    bed: ClusterBed, launched: "subprocess.Popen[str]", stage: str, number: int
) -> Attempt:
    """Waits for an attempt of the first node of a stage to start, and returns it."""

    def started() -> Attempt | None:
        for execution in bed.backend.executions.values():
            for node in execution.named(stage):
                return node.attempts[number] if len(node.attempts) > number else None
        return None

    return cast(Attempt, wait_for(started, launched.poll))


def _assert_optimizers_stayed_in_the_bucket(bed: ClusterBed) -> None:
    """Asserts that stages started from earlier stages' weights without their optimizer state."""
    sent = dict(bed.bucket.sent)  # a copy, as reads below are counted too
    stored = {path for path in bed.bucket.list("") if "/trainer/" in path}
    assert {path.rpartition("/")[2] for path in stored} >= {"state.json"}
    read = {path.rpartition("/")[2] for path in stored & sent.keys()}
    assert read <= {"state.json"}
    (state,) = [path for path in stored if "train_sft" in _stage_at(bed, path)][:1]
    folder = state.partition("/trainer/")[0]
    sizes = {path: len(bed.bucket.read(path) or b"") for path in bed.bucket.list(f"{folder}/")}
    manifest = f"{folder}/manifest.json"
    times = sent[manifest] // sizes[manifest]
    total, full = sum(sent.get(path, 0) for path in sizes), times * sum(sizes.values())
    logger.info("%d of %d bytes in %d downloads of train_sft's checkpoint", total, full, times)
    assert times >= 3
    assert total < full / 2


def _stage_at(bed: ClusterBed, path: str) -> str:
    """Returns the stage that made the artifact with this file in `trainer/`."""
    manifest = bed.bucket.read(f"{path.partition('/trainer/')[0]}/manifest.json")
    return str(json.loads(manifest or b"{}").get("stage", ""))


def inputs_of_sft(sft: dict[str, Any], *, model: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns inputs of `train_sft` with an untrained model and two ranks."""
    from tasks.plan_tasks.grpo import plan_grpo
    from tasks.prepare_data import prepare_data
    from tasks.prepare_model import prepare_model
    from tasks.recipes.grpo import GRPORecipe

    changed = {"sft": sft, "model": {**SMALL["model"], **(model or {})}}
    stages = plan_grpo(config=GRPORecipe.model_validate({**SMALL, **changed}))
    model = prepare_model(config=stages.model)
    data = prepare_data(config=stages.data, tokenizer=model.tokenizer)
    return {"config": stages.sft, "base": model.base, "train": data.train}


def _stage(
    bed: ClusterBed, inputs: dict[str, Any], folder: Path, *, node: str = "n0"
) -> "SingleStage":
    from tasks.pods.shapes import shape_of
    from tasks.train_sft import train_sft
    from tests.workflows.cluster_bed.single_stage import SingleStage

    stage = train_sft.on_shape(shape_of(inputs["config"].cluster))
    return SingleStage(bed, stage, inputs, folder / "stage", node=node)


def train_locally(inputs: dict[str, Any]) -> Any:
    """Returns the artifact of a local run."""
    from nemo_rl_core.distributed.session import shutdown
    from tasks.train_sft import train_sft

    try:
        return train_sft(**inputs)
    finally:
        shutdown()


def launch(bed: ClusterBed, home: Path, config: dict[str, Any]) -> "subprocess.Popen[str]":
    """Starts `pyflyte run --remote` as a user would."""
    flags = ["--remote", "--wait", "--poll-interval", "1", "--copy", "all"]
    recipe = ["--config", json.dumps(config)]
    return subprocess.Popen(
        [
            *(Path(sys.executable).with_name("pyflyte"), "--config", bed.backend.config, "run"),
            *(*flags, "workflows/grpo.py", "grpo", *recipe),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "NEMO_RL_HOME": str(home / "store"), "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(what: Callable[[], Any], ended: Callable[[], int | None]) -> Any:
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline:
        result = what()
        if result:
            return result
        assert ended() is None, "the process ended first"
        time.sleep(0.05)
    raise TimeoutError("the condition was not met in time")


def _saved_steps(bed: ClusterBed, attempt: Attempt) -> set[int]:
    """Returns steps of the checkpoints that Flyte would give the next attempt."""
    return {int(step) for step in re.findall(r"step-(\d+)/", " ".join(_last_save(bed, attempt)))}


def last_saved_step(bed: ClusterBed, attempt: Attempt) -> int:
    """Returns the step of the last save in the bucket; 0 if there is none."""
    return max(_saved_steps(bed, attempt), default=0)


def _last_save(bed: ClusterBed, attempt: Attempt) -> dict[str, dict[str, Any]]:
    """Returns the files of the last save by path in the work folder; empty if there is none."""
    manifest = bed.bucket.read(f"{bed.bucket.path(attempt.checkpoint)}/save.json")
    files: dict[str, dict[str, Any]] = json.loads(manifest or b'{"files": {}}')["files"]
    return files


def _shards(bed: ClusterBed, attempt: Attempt) -> dict[str, str]:
    """Returns addresses of the ranks' shards in an attempt's last save."""
    save = _last_save(bed, attempt)
    return {name: save[name]["address"] for name in save if "/trainer/shard-" in name}


def _clients(bed: ClusterBed, method: str, address: str) -> list[str]:
    """Returns the pods that have sent or requested an object."""
    clients = bed.bucket.clients.get((method, bed.bucket.path(address)), set())
    pods = {pod.address for job in bed.jobs for pod in (job.head, *job.workers)}
    return sorted(clients & pods)


def _metrics_of_save(bed: ClusterBed, attempt: Attempt) -> list[str]:
    """Returns one line per step, up to the last save in the bucket."""
    save = _last_save(bed, attempt)
    content = bed.bucket.read(bed.bucket.path(save["metrics.jsonl"]["address"]))
    assert content is not None
    return content.decode().splitlines()[: max(_saved_steps(bed, attempt))]


def _lines(bed: ClusterBed, folder: str) -> list[str]:
    content = bed.bucket.read(f"{bed.bucket.path(folder)}/metrics.jsonl")
    assert content is not None
    return content.decode().splitlines()


def _kill_a_worker(bed: ClusterBed) -> None:
    """Kills one of the two ranks that train."""
    worker = bed.jobs[-1].workers[1]
    # A rank has no name for a moment at the start and end of a call, while Ray replaces it.
    (rank,) = wait_for(lambda: worker.processes("ray::DTensorBackend"), lambda: None)
    os.kill(rank, signal.SIGKILL)


def _kill_a_node(bed: ClusterBed) -> None:
    bed.jobs[-1].workers[1].kill()


def _evict_the_head(bed: ClusterBed) -> None:
    bed.jobs[-1].evict_head()


def _kill_the_head(bed: ClusterBed) -> None:
    bed.jobs[-1].head.kill()


def manifests(bed: ClusterBed, execution: ExecutionRecord) -> list[dict[str, Any]]:
    """Returns the manifest of each artifact in the bucket."""
    paths = [p for p in bed.bucket.list(f"{execution.name}/") if p.endswith("/manifest.json")]
    return [json.loads(bed.bucket.read(path) or b"") for path in paths]


def contents(manifests: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    """Returns each stage with the digest of its weights, rows, completions and metrics."""
    return sorted((each["stage"], each["content_hash"]) for each in manifests)


def manifests_of(store: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in store.glob("artifacts/*/manifest.json")]
