"""The main job on pods that share nothing but a volume and an S3 server, and are killed.

Everything of `tests/workflows/cluster_bed`; what that is, and what it is not, is said there.
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
from tasks.platform.pods import STORE_FOLDER
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
    # Two ranks train and two engines sample, one of each in a pod: half of all weights cross.
    "generation": {"backend": "hf", "max_new_tokens": 3, "num_engines": 2},
    "cluster": {"num_workers": 2, "num_threads": 1},
}

# Steps that take longer than a save does to reach the bucket, so that each attempt is killed long
# before its end, on quick machines, too.
SFT = {"num_steps": 400, "save_every_num_steps": 40, "global_batch_size": 64}
LARGER_MODEL = {"num_layers": 4, "hidden_size": 128, "intermediate_size": 256}
KILLED_SFT = {
    **SMALL["sft"],
    "num_steps": 600,
    "save_every_num_steps": 100,
    "global_batch_size": 64,
    "learning_rate": 0.0002,  # rewards still differ after as many steps
}
# With its moments it takes 80 MB, which are too much for the head.
LARGE_MODEL = {"hidden_size": 512, "intermediate_size": 1024, "num_layers": 3, "num_heads": 8}


@dataclass(frozen=True)
class _Left:
    """What an attempt has left to the next one."""

    step: int
    metrics: list[str]
    shards: dict[str, str]


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[ClusterBed]:
    with ClusterBed(tmp_path / "bed", pods_per_worker=2) as started:
        yield started


def test_pods_share_the_volume_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir(mode=0o777)
    (tmp_path / "volume").chmod(0o777)
    folders = ["/tmp", "/dev/shm", "/home/nemo", "/var/nemo_rl"]
    writes = " && ".join(f"echo here > {folder}/note" for folder in folders)
    reads = f"cat {' '.join(f'{folder}/note' for folder in folders)}; ls {REPOSITORY}"
    serve = "python -c 'import http.server as s; s.test(s.SimpleHTTPRequestHandler, port=8000)'"
    with Network() as network:
        logs = {name: tmp_path / name for name in ("one", "two")}
        given = {"volume": tmp_path / "volume"}
        command = ["sh", "-c", f"{writes}; cd /var/nemo_rl; exec {serve}"]
        one = Pod(network, "one", command, {}, log=logs["one"], **given)
        wait_for((tmp_path / "volume/note").exists, one.poll)
        look = f"{reads}; id -u; hostname -i; touch /etc/x; touch {sys.prefix}/x; "
        look += "python -c 'import nemo_rl_core'; "
        look += "until python -c \"import urllib.request as u; u.urlopen('http://$ADDRESS:8000')\" "
        look += "2> /dev/null; do sleep 0.2; done; echo reached; "
        look += "python -c \"import urllib.request as u; u.urlopen('http://127.0.0.1:8000')\""
        look = look.replace("$ADDRESS", one.address)
        two = Pod(network, "two", ["sh", "-c", look], {}, log=logs["two"], **given)
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


def test_a_stage_across_two_nodes_equals_a_local_one(
    bed: ClusterBed, own_store: Path, tmp_path: Path
) -> None:
    sft = {"num_steps": 4, "save_every_num_steps": 2, "global_batch_size": 16}
    inputs = inputs_of_sft(sft, model=LARGE_MODEL)
    stage = _stage(bed, inputs, tmp_path)
    there = stage.run()
    assert there["content_hash"] == trained_here(inputs).content_hash
    # Each machine has sent its own shards, and the head none.
    sent = {name: _clients(bed, "PUT", at) for name, at in _shards(bed, stage.attempts[0]).items()}
    (job,) = bed.jobs
    assert sorted(sent.values()) == sorted([worker.address] for worker in job.workers)
    assert _clients(bed, "PUT", f"{stage.attempts[0].checkpoint}/save.json") == [job.head.address]
    _assert_machines_made_the_artifact(bed, there["directory"]["path"])
    # What is uploaded leaves the volume, and what was downloaded does.
    assert not any((bed.volume / "artifacts").iterdir())
    assert not any((bed.volume / "inputs").iterdir())


@pytest.mark.thorough
def test_a_second_stage_of_pods_with_one_node_s_cache_downloads_nothing(
    own_store: Path, tmp_path: Path
) -> None:
    # The cache lies on the volume here, since all pods of the bed are on one machine.
    kept = {FOLDER: f"{STORE_FOLDER}/node", GIB: "1"}
    with ClusterBed(tmp_path / "bed", at_once=True, secrets=kept) as bed:
        for num_steps, downloads in ((3, True), (4, False)):
            sft = {"num_steps": num_steps, "save_every_num_steps": 4, "global_batch_size": 16}
            inputs = inputs_of_sft(sft, model=LARGE_MODEL)
            stage = _stage(bed, inputs, tmp_path / f"{num_steps}", node=f"n{num_steps}")
            bed.bucket.sent.clear()
            there = stage.run()
            sent = {
                Path(path).name: num_bytes
                for path, num_bytes in bed.bucket.sent.items()
                if path.startswith("single/given/") and num_bytes
            }
            assert "manifest.json" in sent, "each stage has its inputs in a place of its own"
            assert ({"model.safetensors", "rows.parquet"} <= sent.keys()) == downloads
            assert sum(sent.values()) > 2**20 if downloads else sum(sent.values()) < 2**17
            assert there["content_hash"] == trained_here(inputs).content_hash
        names = {path.name for path in (bed.volume / "node" / "files").iterdir()}
        weights = inputs["base"].model_folder / "model.safetensors"
        assert hash_file(weights) in names


def _assert_machines_made_the_artifact(bed: ClusterBed, address: str) -> None:
    """The server has copied what the last save has: each machine's shards, at its request."""
    (job,) = bed.jobs
    place = f"{bed.bucket.path(address)}/"
    sizes = {path: len(bed.bucket.read(path) or b"") for path in bed.bucket.list(place)}
    assert sum(sizes.values()) > 64 * 2**20
    large = {path for path in sizes if sizes[path] > 2**20}
    shards = {path for path in large if "/trainer/shard-" in path}
    assert len(shards) == 2
    assert f"{place}model/model.safetensors" in large
    assert large <= set(bed.bucket.copied)
    clients = [bed.bucket.clients["PUT", path] for path in shards]
    assert sorted(map(sorted, clients)) == sorted([worker.address] for worker in job.workers)
    sent: Counter[str] = Counter()
    for (client, path), num_bytes in bed.bucket.received.items():
        sent[client] += num_bytes * path.startswith(place)
    total = sum(sizes.values())
    logger.info("of an artifact of %d bytes the head has sent %d", total, sent[job.head.address])
    assert sent.total() == sent[job.head.address] < total / 100


@pytest.mark.thorough
def test_a_stage_goes_on_from_s3_after_a_worker_a_node_and_heads_were_lost(
    bed: ClusterBed, own_store: Path, tmp_path: Path
) -> None:
    inputs = inputs_of_sft(SFT, model=LARGER_MODEL)
    stage = _stage(bed, inputs, tmp_path)
    losses = (_kill_a_worker, _kill_a_node, _evict_the_head, _kill_the_head)
    saved, left = [], []  # of each attempt: its first save, and the last before it was lost
    with ThreadPoolExecutor(1) as background:
        running = background.submit(stage.run)

        def ended() -> int | None:
            return 0 if running.done() else None

        def left_behind(number: int) -> _Left:
            wait_for(lambda: len(stage.attempts) > number + 1, ended)
            attempt = stage.attempts[number]
            return _Left(
                handed_over(bed, attempt), _metrics_of_save(bed, attempt), _shards(bed, attempt)
            )

        for number, lose in enumerate(losses):
            wait_for(lambda n=number: len(stage.attempts) > n, ended)
            attempt = stage.attempts[number]
            # Until the first save of its own it has what it was given.
            given = left[-1].step if left else 0
            saved.append(
                wait_for(lambda a=attempt, n=given: (s := handed_over(bed, a)) > n and s, ended)
            )
            lose(bed)
            left.append(left_behind(number))
        there = running.result()
    attempts = stage.attempts
    assert [each.may_retry for each in attempts] == [True, True, None, None, None], attempts
    assert "WorkerLostError" in attempts[0].error
    assert [each.exit_code for each in attempts[2:]] == [143, -signal.SIGKILL, 0]
    # The evicted one has saved the step that it was in.
    assert left[2].step > saved[2]
    # Lines have durations: those of a step that ran again would be others.
    metrics = _lines(bed, there["directory"]["path"])
    assert len(metrics) == SFT["num_steps"]
    for each, job in zip(left, bed.jobs[1:], strict=True):
        assert each.metrics == metrics[: each.step]
        # The workers of the next attempt have asked for a shard each, and its head for none.
        asked = [_clients(bed, "GET", at) for at in each.shards.values()]
        assert sorted(asked) == sorted([worker.address] for worker in job.workers)
    # Nothing is left of attempts before the last but one, and of that one what the last needs.
    assert [bool(_last_save(bed, each)) for each in attempts] == [False] * 4 + [True]
    assert there["content_hash"] == trained_here(inputs).content_hash


@pytest.mark.thorough
def test_a_local_run_does_not_join_what_ray_start_has_left(tmp_path: Path) -> None:
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
def test_a_pipeline_that_lost_a_worker_a_node_and_a_head_equals_a_local_run(
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
    """Takes something from each attempt of a stage, once that has handed on a save of its own."""
    given = 0
    for number, lose in enumerate(losses):
        attempt = attempt_of(bed, launched, stage, number)
        given = wait_for(
            lambda a=attempt, n=given: (s := handed_over(bed, a)) > n and s, launched.poll
        )
        lose(bed)
    attempt_of(bed, launched, stage, len(losses))


def attempt_of(
    bed: ClusterBed, launched: "subprocess.Popen[str]", stage: str, number: int
) -> Attempt:
    """An attempt of the first node of a stage, when it has started."""

    def found() -> Attempt | None:
        for execution in bed.backend.executions.values():
            for node in execution.named(stage):
                return node.attempts[number] if len(node.attempts) > number else None
        return None

    return cast(Attempt, wait_for(found, launched.poll))


def _assert_optimizers_stayed_in_the_bucket(bed: ClusterBed) -> None:
    """GRPO began from SFT's weights, and what followed from GRPO's: no stage went on."""
    sent = dict(bed.bucket.sent)  # what is read here is counted, too
    stored = {path for path in bed.bucket.list("") if "/trainer/" in path}
    assert {path.rpartition("/")[2] for path in stored} >= {"state.json"}
    read = {path.rpartition("/")[2] for path in stored & sent.keys()}
    assert read <= {"state.json"}
    (state,) = [path for path in stored if "train_sft" in _stage_at(bed, path)][:1]
    folder = state.partition("/trainer/")[0]
    sizes = {path: len(bed.bucket.read(path) or b"") for path in bed.bucket.list(f"{folder}/")}
    manifest = f"{folder}/manifest.json"
    times = sent[manifest] // sizes[manifest]
    there, whole = sum(sent.get(path, 0) for path in sizes), times * sum(sizes.values())
    logger.info("of train_sft's checkpoint %d bytes in %d downloads, not %d", there, times, whole)
    assert times >= 3
    assert there < whole / 2


def _stage_at(bed: ClusterBed, path: str) -> str:
    """The stage that made the artifact which a file of its `trainer/` is of."""
    manifest = bed.bucket.read(f"{path.partition('/trainer/')[0]}/manifest.json")
    return str(json.loads(manifest or b"{}").get("stage", ""))


def inputs_of_sft(sft: dict[str, Any], *, model: dict[str, Any] | None = None) -> dict[str, Any]:
    """Of `train_sft` from an untrained model, over two ranks."""
    from tasks.prepare_data import prepare_data
    from tasks.prepare_model import prepare_model
    from tasks.recipes.grpo import GRPORecipe, plan_grpo

    changed = {"sft": sft, "model": {**SMALL["model"], **(model or {})}}
    stages = plan_grpo(config=GRPORecipe.model_validate({**SMALL, **changed}))
    model = prepare_model(config=stages.model)
    data = prepare_data(config=stages.data, tokenizer=model.tokenizer)
    return {"config": stages.sft, "base": model.base, "train": data.train}


def _stage(
    bed: ClusterBed, inputs: dict[str, Any], folder: Path, *, node: str = "n0"
) -> "SingleStage":
    from tasks.platform.shapes import shape_of
    from tasks.train_sft import train_sft
    from tests.workflows.cluster_bed.single_stage import SingleStage

    stage = train_sft.on_shape(shape_of(inputs["config"].cluster))
    return SingleStage(bed, stage, inputs, folder / "stage", node=node)


def trained_here(inputs: dict[str, Any]) -> Any:
    """The artifact of a local run."""
    from nemo_rl_core.distributed.session import shutdown
    from tasks.train_sft import train_sft

    try:
        return train_sft(**inputs)
    finally:
        shutdown()


def launch(bed: ClusterBed, home: Path, config: dict[str, Any]) -> "subprocess.Popen[str]":
    """`pyflyte run --remote`, as a user has it."""
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
        found = what()
        if found:
            return found
        assert ended() is None, "it ended before that"
        time.sleep(0.05)
    raise TimeoutError("it did not come")


def _saved_steps(bed: ClusterBed, attempt: Attempt) -> set[int]:
    """Steps of the checkpoints that Flyte would give the next attempt."""
    return {int(found) for found in re.findall(r"step-(\d+)/", " ".join(_last_save(bed, attempt)))}


def handed_over(bed: ClusterBed, attempt: Attempt) -> int:
    """The last of them; 0 before any."""
    return max(_saved_steps(bed, attempt), default=0)


def _last_save(bed: ClusterBed, attempt: Attempt) -> dict[str, dict[str, Any]]:
    """Its files by their paths in the work folder; none before any."""
    manifest = bed.bucket.read(f"{bed.bucket.path(attempt.checkpoint)}/save.json")
    found: dict[str, dict[str, Any]] = json.loads(manifest or b'{"files": {}}')["files"]
    return found


def _shards(bed: ClusterBed, attempt: Attempt) -> dict[str, str]:
    """Addresses of the ranks' own files in an attempt's last save."""
    save = _last_save(bed, attempt)
    return {name: save[name]["address"] for name in save if "/trainer/shard-" in name}


def _clients(bed: ClusterBed, method: str, address: str) -> list[str]:
    """Pods that have sent an object, or asked for it."""
    found = bed.bucket.clients.get((method, bed.bucket.path(address)), set())
    pods = {pod.address for job in bed.jobs for pod in (job.head, *job.workers)}
    return sorted(found & pods)


def _metrics_of_save(bed: ClusterBed, attempt: Attempt) -> list[str]:
    """A line a step, up to the last save that was handed to Flyte."""
    save = _last_save(bed, attempt)
    content = bed.bucket.read(bed.bucket.path(save["metrics.jsonl"]["address"]))
    assert content is not None
    return content.decode().splitlines()[: max(_saved_steps(bed, attempt))]


def _lines(bed: ClusterBed, folder: str) -> list[str]:
    content = bed.bucket.read(f"{bed.bucket.path(folder)}/metrics.jsonl")
    assert content is not None
    return content.decode().splitlines()


def _kill_a_worker(bed: ClusterBed) -> None:
    """One of the two ranks that train."""
    worker = bed.jobs[-1].workers[1]
    # A rank that begins or ends a call has no name while Ray writes the other one.
    (rank,) = wait_for(lambda: worker.processes("ray::DTensorBackend"), lambda: None)
    os.kill(rank, signal.SIGKILL)


def _kill_a_node(bed: ClusterBed) -> None:
    bed.jobs[-1].workers[1].kill()


def _evict_the_head(bed: ClusterBed) -> None:
    bed.jobs[-1].evict_head()


def _kill_the_head(bed: ClusterBed) -> None:
    bed.jobs[-1].head.kill()


def manifests(bed: ClusterBed, execution: ExecutionRecord) -> list[dict[str, Any]]:
    """Of each artifact in the bucket."""
    paths = [p for p in bed.bucket.list(f"{execution.name}/") if p.endswith("/manifest.json")]
    return [json.loads(bed.bucket.read(path) or b"") for path in paths]


def contents(manifests: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    """What each stage made: the digest of weights, rows, completions and figures."""
    return sorted((each["stage"], each["content_hash"]) for each in manifests)


def manifests_of(store: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in store.glob("artifacts/*/manifest.json")]
