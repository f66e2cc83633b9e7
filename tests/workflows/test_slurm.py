"""Runs in a Slurm allocation of two machines: slurmctld and two slurmd on this one."""

import hashlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.commands import RECIPE, REPOSITORY

SCRIPT = REPOSITORY / "deployment/slurm/run.sbatch"
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{preemption}
NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=1
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=120
PartitionName=high Nodes=ALL State=UP PriorityTier=2 PreemptMode=OFF
"""
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("slurmctld") or not shutil.which("munged"),
        reason="needs root, and slurm-wlm and munge of Debian",
    ),
]


def wait_for(condition: Callable[[], object], what: Callable[[], str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.5)


class Slurm:
    """A running Slurm, and its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self, preemption: str) -> None:
        folder = self.folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        names = {"host": socket.gethostname().split(".")[0], "folder": folder, "port": port}
        ports = {"first": port + 1, "last": port + 2}
        (folder / "slurm.conf").write_text(CONFIG.format(**names, **ports, preemption=preemption))
        for name in ("state", "spool-node1", "spool-node2"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        wait_for((folder / "munge.socket").exists, lambda: "munged did not start", 10)
        self._start("slurmctld", "-D")
        for node in ("node1", "node2"):
            self._start("slurmd", "-D", "-N", node)
        wait_for(lambda: self("sinfo", "--noheader").count(" 2 ") == 2, self.log, 60)

    def _start(self, *command: str) -> None:
        with (self.folder / "daemons.log").open("a") as log:
            daemon = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        self._daemons.append(daemon)

    def log(self) -> str:
        return (self.folder / "daemons.log").read_text()[-2000:]

    def __call__(self, *command: str, **environment: str) -> str:
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        fields = self("scontrol", "show", "job", number).split()
        return dict(each.split("=", 1) for each in fields if "=" in each)

    def close(self) -> None:
        self("scancel", "--user", "root")
        wait_for(lambda: not self("squeue", "--noheader"), self.log, 60)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(30)


@pytest.fixture
def slurm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path)
    try:
        cluster.start(getattr(request, "param", ""))
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "mine.yaml"
    path.write_text(yaml.safe_dump({"recipe": "grpo_arithmetic", **RECIPE}))
    return path


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the weights of the same recipe without Slurm."""
    store = tmp_path_factory.mktemp("undisturbed")
    subprocess.run(
        [Path(sys.executable).with_name("nemo-rl"), "run", "grpo", str(recipe)],
        cwd=REPOSITORY,
        env={**os.environ, "NEMO_RL_HOME": str(store)},
        check=True,
        capture_output=True,
    )
    return digest(store)


def digest(store: Path) -> str:
    (weights,) = store.glob("artifacts/export-*/model/model.safetensors")
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def submit(slurm: Slurm, recipe: Path, log: Path) -> str:
    options = ["--parsable", "--nodes", "2", "--output", str(log)]
    return slurm(
        *("sbatch", *options, str(SCRIPT), "grpo", str(recipe)),
        NEMO_RL_HOME=str(slurm.folder / "store"),
        NEMO_RL_BIN=str(Path(sys.executable).parent),
    ).strip()


def wait_for_step(log: Path) -> None:
    def text() -> str:
        return log.read_text() if log.exists() else ""

    wait_for(lambda: re.search(r"grpo_iteration 1 [3-9]/12", text()), text, 300)


@pytest.mark.parametrize(
    "slurm",
    ["SlurmctldParameters=preempt_send_user_signal", ""],
    indirect=True,
    ids=["signal", "default"],
)
def test_a_preempted_job_ends_with_the_same_bits(
    slurm: Slurm, recipe: Path, undisturbed: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    job = submit(slurm, recipe, log)
    wait_for_step(log)
    options = ["--partition", "high", "--nodes", "2", "--output", "/dev/null"]
    slurm("sbatch", *options, "--wrap", "sleep 3")
    wait_for(lambda: slurm.job(job)["JobState"] == "COMPLETED", log.read_text, 400)
    assert slurm.job(job)["Restarts"] == "1", log.read_text()
    assert digest(slurm.folder / "store") == undisturbed
    assert log.read_text().count("prepare_data  ran") == 1
    assert not processes_of(slurm)


def test_a_job_is_requeued_before_its_time_limit(
    slurm: Slurm, recipe: Path, undisturbed: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    job = submit(slurm, recipe, log)
    wait_for_step(log)
    slurm("scancel", "--batch", "--signal", "USR1", job)  # as Slurm does 120 s before the limit
    wait_for(lambda: slurm.job(job)["Restarts"] == "1", log.read_text, 60)
    wait_for(lambda: slurm.job(job)["JobState"] == "COMPLETED", log.read_text, 400)
    assert digest(slurm.folder / "store") == undisturbed


def test_a_refused_recipe_fails_once_and_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    recipe, log = tmp_path / "mine.yaml", tmp_path / "log"
    recipe.write_text("recipe: grpo_arithmetic\ngrpo: {num_step: 3}\n")
    job = submit(slurm, recipe, log)
    wait_for(lambda: slurm.job(job)["JobState"] == "FAILED", slurm.log, 120)
    assert "num_step" in log.read_text()
    assert slurm.job(job)["Restarts"] == "0"
    assert not processes_of(slurm)


def processes_of(slurm: Slurm) -> list[str]:
    """Returns the commands of Ray and of runs that have the store of this Slurm."""
    store = f"NEMO_RL_HOME={slurm.folder / 'store'}".encode()
    commands = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if store in (folder / "environ").read_bytes().split(b"\0"):
                commands.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return commands
