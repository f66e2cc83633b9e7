"""Environment variables of workers."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from nemo_rl_core.config.generation import VllmGenerationConfig
from nemo_rl_core.distributed.session import (
    gang_environment,
    memory_environment,
    thread_environment,
)
from nemo_rl_core.distributed.worker_group import RayWorkerGroup, _with_records
from nemo_rl_core.errors import WorkerLostError
from nemo_rl_core.models.generation.engine_environment import engine_environment


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    prefixes = ("OMP_", "GOMP_", "MALLOC_", "PYTORCH_")
    for name in [name for name in os.environ if name.startswith(prefixes)]:
        monkeypatch.delenv(name)


def test_threads_that_wait_sleep_unless_the_user_decides(monkeypatch):
    assert thread_environment(2) == {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    assert thread_environment(2) == {"OMP_NUM_THREADS": "2"}


def test_freed_memory_is_kept_on_cpus_unless_the_user_decides(monkeypatch):
    on_cpus = SimpleNamespace(use_gpus=False)
    assert memory_environment(on_cpus)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "100000000")
    assert not memory_environment(on_cpus)


def test_only_trainers_use_expandable_segments(monkeypatch):
    on_gpus = SimpleNamespace(use_gpus=True)
    assert memory_environment(on_gpus) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert not [name for name in engine_environment(VllmGenerationConfig()) if "ALLOC" in name]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert not memory_environment(on_gpus)


def test_no_engine_compiles_kernels_of_flashinfer(monkeypatch):
    """By vLLM's own choice on a CUDA machine; without the variable it uses FlashInfer."""
    from vllm import envs
    from vllm.v1.sample.ops import topk_topp_sampler

    for name, value in engine_environment(VllmGenerationConfig()).items():
        monkeypatch.setenv(name, value)
    on_cuda = SimpleNamespace(is_cuda=lambda: True)
    monkeypatch.setattr(topk_topp_sampler, "current_platform", on_cuda)
    assert topk_topp_sampler.flashinfer_sampler_supported() is False
    assert not envs.VLLM_ALLREDUCE_USE_FLASHINFER
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER")
    with pytest.raises((ImportError, AttributeError)):
        topk_topp_sampler.flashinfer_sampler_supported()


_FAULTS = """
import resource
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(b"1") * 2**26
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the settings are glibc's")
def test_freed_memory_is_not_cleared_again():
    def page_faults(environment):
        command = [sys.executable, "-c", _FAULTS]
        error = {**os.environ, **environment}
        return int(subprocess.run(command, env=error, capture_output=True, check=True).stdout)

    kept = page_faults(memory_environment(SimpleNamespace(use_gpus=False)))
    given_back = page_faults({})
    pages = 2**26 // os.sysconf("SC_PAGE_SIZE")
    # Large pages, where the system has them, make fewer faults, but no fewer than a kept page.
    assert kept < pages / 100, (kept, given_back, pages)
    assert kept < given_back, (kept, given_back, pages)


def test_ranks_on_gpus_record_their_collectives_unless_the_user_decides(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    result = gang_environment(name="policy", use_gpus=True, timeout_seconds=90.0, folder=tmp_path)
    assert result["NEMO_RL_COLLECTIVE_TIMEOUT"] == "90"
    assert result["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert result["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/policy-rank_"
    assert gang_environment(
        name="policy", use_gpus=False, timeout_seconds=90.0, folder=tmp_path
    ) == {"NEMO_RL_COLLECTIVE_TIMEOUT": "90"}
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    assert "TORCH_FR_BUFFER_SIZE" not in gang_environment(
        name="policy", use_gpus=True, folder=tmp_path
    )


def test_an_error_names_the_records_that_ranks_have_written(tmp_path):
    group = object.__new__(RayWorkerGroup)
    group._records, group._started = str(tmp_path / "policy-rank_"), time.time() - 5
    assert group.records() == []
    written, old = tmp_path / "policy-rank_1", tmp_path / "policy-rank_0"
    (tmp_path / "reference-rank_1").write_bytes(b"1")  # of another group
    written.write_bytes(b"1")
    old.write_bytes(b"1")
    os.utime(old, (0, 0))  # of a run before
    assert group.records() == [written]
    error = _with_records(WorkerLostError("worker 1 died", got="SIGABRT"), [str(written)])
    assert isinstance(error, WorkerLostError)
    assert error.got == f"SIGABRT; the last collectives of each rank are recorded in {written}"


def test_records_of_all_engines_of_a_group_are_found(tmp_path):
    group = object.__new__(RayWorkerGroup)
    group._records, group._started = str(tmp_path / "engine-rank_"), time.time() - 5
    written = [tmp_path / f"engine-engine_{each}-rank_0" for each in (0, 1)]
    for path in (*written, tmp_path / "policy-rank_0"):
        path.write_bytes(b"1")
    assert group.records() == written
