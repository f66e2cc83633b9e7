import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_core.distributed.resources import ResourceManager, count_gpus, total_memory_gib
from nemo_rl_core.errors import ResourceError

CORES = os.cpu_count() or 1

NVIDIA_SMI = """#!/bin/sh
[ "$1" = --list-gpus ] || exit 1
echo "GPU 0: NVIDIA H200 (UUID: GPU-1)"
echo "GPU 1: NVIDIA H200 (UUID: GPU-2)"
"""


HERE = ResourceManager.of_this_machine()


def test_this_machine_fits_its_resources_and_no_more() -> None:
    has = {"CPU": CORES, "GPU": 0, "memory": total_memory_gib()}
    assert HERE.missing(has) == {}
    more = {"CPU": CORES + 1, "GPU": 0, "memory": 1.01 * total_memory_gib()}
    assert HERE.missing(more) == {"CPU": CORES, "memory": pytest.approx(total_memory_gib())}


def test_all_missing_resources_are_named_at_once() -> None:
    with pytest.raises(ResourceError) as caught:
        HERE.check({"CPU": CORES + 1, "GPU": 64, "memory": 2**20})
    text = str(caught.value)
    assert f"{CORES + 1} CPU cores, 64 GPUs, 1.04858e+06 GiB memory" in text
    assert "shape: laptop" in text
    assert len(text.splitlines()) < 10


def test_only_what_is_missing_is_named() -> None:
    with pytest.raises(ResourceError) as caught:
        HERE.check({"CPU": CORES + 1, "memory": 0.1})
    assert "GPUs" not in (caught.value.expected or "")
    assert "memory" not in (caught.value.expected or "")
    assert "larger machine" in (caught.value.fix or "")


def test_missing_resources_of_a_ray_cluster() -> None:
    cluster = ResourceManager.of_ray({"CPU": 4.0, "memory": 2.0**34}, name="the cluster")
    assert cluster.missing({"CPU": 4, "GPU": 0}) == {}
    assert cluster.missing({"CPU": 5, "GPU": 1}) == {"CPU": 4.0, "GPU": 0.0}
    assert cluster.missing({"memory": 17}) == {"memory": 16.0}
    with pytest.raises(ResourceError, match="the cluster is smaller") as caught:
        cluster.check({"CPU": 1, "GPU": 2}, fix="ask for none")
    assert caught.value.expected == "2 GPUs"
    assert caught.value.fix == "ask for none"


def test_memory_is_the_smaller_limit_of_kernel_and_container() -> None:
    (line,) = re.findall(r"MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text())
    installed = int(line) * 1024 / 2**30
    limit = Path("/sys/fs/cgroup/memory.max")
    bound = limit.read_text().strip() if limit.is_file() else "max"
    allowed = int(bound) / 2**30 if bound.isdecimal() else installed
    assert total_memory_gib() == pytest.approx(min(installed, allowed))


def test_an_imported_torch_is_queried() -> None:
    torch = pytest.importorskip("torch")
    assert count_gpus() == torch.cuda.device_count()
    if torch.version.cuda is None:
        with pytest.raises(ResourceError, match="built for CPUs only"):
            HERE.check({"CPU": 1, "GPU": 1})


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, "2"), ("0", "1"), ("0,1,2", "2"), ("", "0"), ("-1", "0")]
)
def test_without_torch_the_driver_is_queried(
    tmp_path: Path, visible: str | None, expected: str
) -> None:
    """A stand-in for the driver's program, since its answer needs the hardware."""
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    environment = dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}")
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    assert _count_in_child(environment) == [expected, "False"]


def test_without_a_driver_the_kernel_counts_gpus() -> None:
    environment = dict(os.environ, PATH="/nonexistent")
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    folder = Path("/proc/driver/nvidia/gpus")
    present = len(list(folder.iterdir())) if folder.is_dir() else 0
    assert _count_in_child(environment) == [str(present), "False"]


def _count_in_child(environment: dict[str, str]) -> list[str]:
    script = (
        "import sys; from nemo_rl_core.distributed.resources import count_gpus; "
        "print(count_gpus(), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()
