"""Tasks of `nemo-rl cluster-check`: what the stages need of a cluster, tested one by one.

They run once, uncached, in the images and pods of the stages. A task returns its results; if it
cannot run at all, the command reads Flyte's error instead.
"""

import hashlib
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from flytekit import current_context, dynamic, task
from flytekit.types.file import FlyteFile

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.errors import ConfigError, ResourceError
from nemo_rl_core.store import files, locks
from nemo_rl_core.store.store import Store
from nemo_rl_core.telemetry import notices
from tasks.flyte import local
from tasks.pods import pods
from tasks.pods.node_room import CheckLine, node_lines
from tasks.pods.resources import GENERATE, PLAIN, TRAIN, Kind
from tasks.pods.shapes import Shape, one_gpu, shape_of
from tasks.ray_cluster.experimental.ray_job_api import RayJobApi
from tasks.ray_cluster.kubernetes_api import KubernetesApi
from tasks.ray_cluster.ray_stage import CLUSTER_GPUS, ray_stage
from tasks.stage import literal_types

literal_types.register()
local.use_store()

NUM_BYTES = 16 * 2**20
"""Size of the file that goes through the bucket."""

_PAUSE_SECONDS = 0.2
_STEPS_AGREE = 1e-4  # relative; a GPU sums in another order than the head's CPU
_VOLUME = (
    f"make the claim {pods.STORE_CLAIM} with ReadWriteMany, on a storage class that several "
    "machines write at once (deployment/production/cluster.yaml)"
)
_DRIVER = (
    "where Kubernetes installs the driver, look at the GPU operator's pods on that machine "
    "(deployment/production/values-gpu-operator.yaml). Where a machine's image brings it, look at "
    "what mounts it: on GKE the pod has /usr/local/nvidia/lib64/libcuda.so.1, a folder that "
    "LD_LIBRARY_PATH of the image names and deployment/pods.yaml must not replace"
)


def _once(kind: Kind) -> Kind:
    return replace(
        kind, retries=0, interruptible=False, resumes=False, timeout=timedelta(minutes=30)
    )


_PLAIN = _once(PLAIN).options


@task(**_PLAIN)
def start_pod() -> list[CheckLine]:
    """Checks that a plain pod starts, has its image and gets the code."""
    gpus = os.environ.get(CLUSTER_GPUS, "not set")
    result = (
        f"a pod of {PLAIN.image.name} runs as user {os.getuid()} with Python "
        f"{platform.python_version()} and this code; {CLUSTER_GPUS} is {gpus}"
    )
    if os.getuid() == 0:
        return [
            CheckLine(
                name="pods",
                state="warn",
                found=result,
                fix="the images run as user 1000: leave runAsUser to them in Flyte's "
                "default-pod-security-context",
            )
        ]
    return [CheckLine(name="pods", state="ok", found=result)]


@task(**_PLAIN)
def write_to_bucket(key: str) -> FlyteFile:
    """Writes a file with a content that the reading pod can compute."""
    path = Path(current_context().working_directory) / f"{key}.bin"
    path.write_bytes(_content(key))
    return FlyteFile(str(path))


@task(**_PLAIN)
def read_from_bucket(written: FlyteFile, key: str) -> list[CheckLine]:
    """Compares the file byte by byte with the expected content."""
    began = time.monotonic()
    read = Path(written.download()).read_bytes()
    seconds = time.monotonic() - began
    if read == _content(key):
        result = (
            f"{len(read) / 2**20:.0f} MiB, written by one pod and read by another, are equal "
            f"({len(read) / 2**20 / seconds:.0f} MiB/s)"
        )
        return [CheckLine(name="bucket", state="ok", found=result)]
    return [
        CheckLine(
            name="bucket",
            state="fail",
            found=f"{NUM_BYTES} bytes were written, and {len(read)} others were read "
            f"(sha256 {hashlib.sha256(read).hexdigest()[:12]})",
            fix="look for a proxy or a gateway before the bucket that changes files",
        )
    ]


def _content(key: str) -> bytes:
    return random.Random(key).randbytes(NUM_BYTES)


@task(**_PLAIN, pod_template=pods.pod_with_store(spread_group="cluster-check"))
def share_volume(key: str, wait_seconds: float) -> list[CheckLine]:
    """Writes a note to the volume, holds locks there, and reads the other pod's note."""
    return check_volume_first(_notes_folder(key), wait_seconds)


@task(**_PLAIN, pod_template=pods.pod_with_store(spread_group="cluster-check"))
def join_volume(key: str, wait_seconds: float) -> list[CheckLine]:
    """Runs in the other pod: reads the note, and requests the locks that the first pod holds."""
    return check_volume_second(_notes_folder(key), wait_seconds)


def _notes_folder(key: str) -> Path:
    folder = Store.default().root / "cluster-check" / key
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_volume_first(folder: Path, wait_seconds: float) -> list[CheckLine]:
    """Leaves a note and holds both kinds of locks until the other pod has requested them."""
    name = "volume back"
    try:
        locks.share(folder / "marks", "a name")
        with locks.locked(folder / "lock", "cluster-check"):
            files.write_atomic(folder / "first", _machine())
            other = _note(folder / "second", wait_seconds)
            if other is None:
                return [_not_seen(name, wait_seconds)]
            _note(folder / "asked", wait_seconds)
    finally:
        locks.unshare(folder / "marks")
        files.discard(folder)
    return [_seen(name, written_on=other)]


def check_volume_second(folder: Path, wait_seconds: float) -> list[CheckLine]:
    """Reads the first pod's note, and requests its locks, which must be refused."""
    files.write_atomic(folder / "second", _machine())
    other = _note(folder / "first", wait_seconds)
    if other is None:
        return [_not_seen("volume", wait_seconds)]
    lines = [_seen("volume", written_on=other), _locks(folder)]
    files.write_atomic(folder / "asked", "")
    return lines


def _note(path: Path, wait_seconds: float) -> str | None:
    deadline = time.monotonic() + wait_seconds
    while time.monotonic() < deadline:
        if path in path.parent.iterdir():  # a listing makes NFS read the folder again
            return path.read_text()
        time.sleep(_PAUSE_SECONDS)
    return None


def _machine() -> str:
    return os.environ.get(pods.NODE, "a machine without a name")


def _seen(name: str, *, written_on: str) -> CheckLine:
    read_on = _machine()
    result = f"a file written on {written_on} is read on {read_on}"
    if written_on == read_on:
        return CheckLine(
            name=name,
            state="warn",
            found=f"{result}: the same machine, which says nothing of others",
            fix="none on a cluster of one machine; else try again when another one has room",
        )
    return CheckLine(name=name, state="ok", found=result)


def _not_seen(name: str, wait_seconds: float) -> CheckLine:
    return CheckLine(
        name=name,
        state="fail",
        found=f"{_machine()} has not seen the other pod's file within {wait_seconds:g} s",
        fix=_VOLUME,
    )


def _locks(folder: Path) -> CheckLine:
    fix = (
        "mount the volume with locks that machines share (NFS without nolock or local_lock); "
        "without them two runs of one stage at once may spoil each other's work"
    )
    try:
        with locks.locked_if_free(folder / "lock") as full_lock:
            pass
        with locks.exclusive(folder / "marks", "a name") as part:
            pass
    except OSError as error:
        result = f"the volume has no locks: {error}"
        return CheckLine(name="locks", state="warn", found=result, fix=fix)
    if full_lock or part:
        result = f"{_machine()} was given a lock that the other pod holds"
        return CheckLine(name="locks", state="warn", found=result, fix=fix)
    return CheckLine(name="locks", state="ok", found="a lock of one pod is refused to the other")


@task(**_PLAIN)
def find_nodes(cluster: ClusterConfig, autoscaled: bool = False) -> list[CheckLine]:
    """Looks for machines on which each kind of pod fits."""
    try:
        nodes = KubernetesApi().nodes()
    except ResourceError as error:
        result = f"the machines cannot be read: {error.in_one_line}"
        return [CheckLine(name="nodes", state="warn", found=result, fix=f"{error.fix}")]
    return node_lines(cluster, nodes, autoscaled=autoscaled)


@task(**_PLAIN)
def find_rights(cluster: ClusterConfig) -> list[CheckLine]:
    """Asks Kubernetes whether stages have the rights to share one Ray cluster per run."""
    return [rights_line(cluster)]


def rights_line(cluster: ClusterConfig) -> CheckLine:
    """Returns the line on these rights, which only recipes with `lifetime: run` need."""
    name, needed = "lifetime: run", cluster.lifetime == "run"
    fix = "apply deployment/production/cluster.yaml to the namespace (role nemo-rl-run-clusters)"
    try:
        missing = RayJobApi().missing_rights()
    except ResourceError as error:
        missing, fix = [error.in_one_line], f"{error.fix}"
    if not missing:
        result = "the account of stages may make, find and remove the RayJob that a run shares"
        return CheckLine(name=name, state="ok", found=result)
    result = f"the account of stages cannot {', '.join(missing)}"
    if not needed:
        result += ": recipes with `cluster: {lifetime: run}` would fail, and others run"
        fix += ", or leave that key out of recipes"
    return CheckLine(name=name, state="fail" if needed else "warn", found=result, fix=fix)


def _answer_of_ray(cluster: ClusterConfig, kind: Kind) -> list[CheckLine]:
    shape = shape_of(cluster)
    return worker_lines(shape, kind.on(shape).image.name)


@task(**_once(TRAIN).options, **ray_stage(_once(TRAIN)))
def answer_from_training(cluster: ClusterConfig) -> list[CheckLine]:
    """Takes one training step on every worker's pod, in the image of training stages."""
    return _answer_of_ray(cluster, TRAIN)


@task(**_once(GENERATE).options, **ray_stage(_once(GENERATE)))
def answer_from_generation(cluster: ClusterConfig) -> list[CheckLine]:
    """Takes the same step in the image of stages that sample."""
    return _answer_of_ray(cluster, GENERATE)


# Registered too: a dynamic stage knows only images of tasks that were registered with it.
answer_from_training.on_shape(one_gpu())
answer_from_generation.on_shape(one_gpu())


@dynamic(**_PLAIN)
def try_ray(cluster: ClusterConfig) -> list[CheckLine]:
    """Runs a RayJob of the shape, in the image of training stages."""
    return answer_from_training.on(cluster)(cluster=cluster)


@dynamic(**_PLAIN)
def try_engines(cluster: ClusterConfig) -> list[CheckLine]:
    """Runs a RayJob in the image of stages that sample; without GPUs it is the same image."""
    if not cluster.num_gpus:
        return []
    return answer_from_generation.on(cluster)(cluster=cluster)


def worker_lines(shape: Shape, image: str) -> list[CheckLine]:
    """Takes one training step on the machine of every worker, and compares it with the head's."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    machines = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    answers = ray.get(
        [
            ray.remote(_one_step)
            .options(
                num_cpus=1,
                num_gpus=machine["Resources"].get("GPU", 0),
                scheduling_strategy=NodeAffinitySchedulingStrategy(machine["NodeID"], soft=False),
            )
            .remote()
            for machine in machines
        ]
    )
    return lines_of_answers(answers, shape, image, expected=_loss_after_a_step("cpu"))


def lines_of_answers(
    answers: Sequence[dict[str, Any]], shape: Shape, image: str, *, expected: float
) -> list[CheckLine]:
    """Returns the lines on the answers of workers."""
    name = f"ray: {image.removeprefix('nemo-rl-')}"
    losses = [loss for answer in answers for loss in answer["losses"]]
    if not all(abs(loss - expected) <= _STEPS_AGREE * abs(expected) for loss in losses):
        result = f"a step's loss is {expected:.6g} on the head, and {losses} on workers"
        fix = "test that machine's memory and GPUs (dcgmi diag -r 3)"
        return [CheckLine(name=name, state="fail", found=result, fix=fix)]
    shared = min(answer["shared_memory_gib"] for answer in answers)
    expected_shared_gib = min(group.shared_memory_gib for group in shape.nodes)
    result = (
        f"a step of training on {len(answers)} worker pod{'s' * (len(answers) != 1)} equals the "
        f"head's; /dev/shm has {shared:.0f} GiB"
    )
    lines = [CheckLine(name=name, state="ok", found=result)]
    if shared < 0.9 * expected_shared_gib:
        fix = "remove the limit on memory volumes in the namespace (LimitRange, a policy)"
        result = f"{result}, not {expected_shared_gib}: Ray would keep its objects on disk"
        lines = [CheckLine(name=name, state="warn", found=result, fix=fix)]
    if shape.num_gpus:
        lines.append(_gpus([gpu for answer in answers for gpu in answer["gpus"]], shape, image))
    return lines


def _gpus(found: Sequence[str], shape: Shape, image: str) -> CheckLine:
    name = f"GPUs: {image.removeprefix('nemo-rl-')}"
    kinds = ", ".join(f"{found.count(kind)} x {kind}" for kind in sorted(set(found))) or "none"
    if len(found) != shape.num_gpus:
        mismatch = f"torch sees {kinds}, and the shape has {shape.num_gpus}"
        return CheckLine(name=name, state="fail", found=mismatch, fix=_DRIVER)
    return CheckLine(name=name, state="ok", found=f"torch computes on {kinds}")


def _one_step() -> dict[str, Any]:
    import torch

    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    memory = os.statvfs("/dev/shm")
    return {
        "losses": [_loss_after_a_step(device) for device in gpus or ["cpu"]],
        "gpus": [torch.cuda.get_device_name(device) for device in gpus],
        "shared_memory_gib": memory.f_blocks * memory.f_frsize / 2**30,
    }


def _loss_after_a_step(device: str) -> float:
    """Returns the loss after one step of SGD on a linear regression with fixed numbers."""
    import torch

    numbers = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 64, generator=numbers).to(device)
    weights = torch.zeros(64, 1, device=device, requires_grad=True)
    targets = inputs.sum(dim=1, keepdim=True)
    loss = ((inputs @ weights - targets) ** 2).mean()
    (gradient,) = torch.autograd.grad(loss, weights)
    with torch.no_grad():
        stepped = weights - 0.1 * gradient
        return float(((inputs @ stepped - targets) ** 2).mean())


@task(**_PLAIN)
def send_notices() -> list[CheckLine]:
    """Sends a notice to every address that receives notices of runs."""
    return notices_line(os.environ, notices.send)


def notices_line(
    environment: "os._Environ[str] | dict[str, str]", send: Callable[..., list[str]]
) -> list[CheckLine]:
    """Returns the line on notices."""
    name = "notices"
    secret = f"the secret {pods.SECRETS} (default-env-from-secrets in Flyte's values)"
    try:
        notices.check_addresses(environment)
    except ConfigError as error:
        return [CheckLine(name=name, state="fail", found=error.in_one_line, fix=f"{error.fix}")]
    hooks, addresses = notices.webhooks(environment), notices.mail_addresses(environment)
    if not hooks and not addresses:
        result = f"no pod has {notices.NOTIFY}: nobody is notified when runs end"
        fix = f"set it in {secret}, or leave it unset"
        return [CheckLine(name=name, state="warn", found=result, fix=fix)]
    if addresses and not environment.get(notices.SMTP):
        result = f"{len(addresses)} mail addresses, and no {notices.SMTP}: runs send no mail"
        fix = f"set {notices.SMTP} next to it in {secret}; Flyte's own mail needs `notifications`"
        return [CheckLine(name=name, state="fail", found=result, fix=fix)]
    subject, text = "nemo-rl: cluster-check", "This cluster can tell you how runs end."
    problems = send(subject, text, environment=environment)
    if problems:
        fix = "let pods reach that server (network policies, a proxy), and correct its account"
        return [CheckLine(name=name, state="fail", found="; ".join(problems), fix=fix)]
    result = f"sent to {len(hooks)} webhooks and {len(addresses)} mail addresses: look there"
    return [CheckLine(name=name, state="ok", found=result)]
