"""The checks of a run against the Ray cluster that RAY_ADDRESS names."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import REPOSITORY

NODE_SECONDS = 120.0
TOKEN = "0123456789abcdef" * 2
# Ray resolves loopback to the address of the network where it starts clusters of machines.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}


@pytest.fixture(scope="module")
def head() -> Iterator[dict[str, str]]:
    """The environment for a Ray cluster on loopback that says it has 16 GPUs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        environment = {
            **os.environ,
            **LOOPBACK,
            "RAY_TMPDIR": folder,
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_ADDRESS": f"127.0.0.1:{port}",
        }
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        options = [f"--port={port}", "--node-ip-address=127.0.0.1", "--num-gpus=16"]
        quiet = ["--include-dashboard=false", "--disable-usage-stats"]
        log = Path(folder) / "log"
        with log.open("w") as file:
            node = subprocess.Popen(
                [*command, *options, *quiet],
                env={**environment, "RAY_ADDRESS": ""},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + NODE_SECONDS
        while "Ray runtime started" not in log.read_text():
            assert node.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield environment
        node.send_signal(signal.SIGTERM)
        node.wait(60)


def dry_run(environment: dict[str, str], store: Path, *settings: str) -> str:
    nemo_rl = str(Path(sys.executable).with_name("nemo-rl"))
    command = [nemo_rl, "run", "grpo", "grpo_moe_30b_a3b_2nodes"]
    done = subprocess.run(
        [*command, *settings, "--dry-run"],
        cwd=REPOSITORY,
        env={**environment, "NEMO_RL_HOME": str(store), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_recipe_for_two_nodes_is_checked_against_the_cluster(
    head: dict[str, str], tmp_path: Path
) -> None:
    output = dry_run(head, tmp_path)
    # The next check is of the model, which no machine here has.
    assert "GPUs" not in output, output
    assert "Qwen/Qwen3-30B-A3B" in output
    assert "without a network, name a folder on this machine" in output
    output = dry_run(head, tmp_path, "cluster.num_workers=24", "generation.num_engines=12")
    assert "the Ray cluster is smaller than the requested cluster" in output
    assert "expected: 24 GPUs" in output
    assert "got: 16 GPUs" in output


@pytest.mark.slow
def test_an_address_without_a_listener_is_named_immediately(tmp_path: Path) -> None:
    started = time.monotonic()
    output = dry_run({**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}, tmp_path)
    assert "the Ray cluster at 127.0.0.1:1 cannot be joined" in output
    assert "unset RAY_ADDRESS to run on this machine" in output
    assert time.monotonic() - started < 100
