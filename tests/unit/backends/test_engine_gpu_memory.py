"""The GPU memory of an engine, with a recorded NVML."""

import inspect
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl_core.backends.generation.gpu_memory import engine_gpu_use, used_gpu_gib
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.produce import StageInputs, StageResult, _cost, cost_html
from nemo_rl_core.store.manifest import Cost
from nemo_rl_core.telemetry import usage
from nemo_rl_core.telemetry.tracking import _gpus
from tests.recorded_nvml import SIGNATURES, FakeNvml

GIB = 2**30
OTHER = 999_999_999  # not a process id


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeNvml], None]:
    """Installs a fake on a machine with one visible GPU, `GPU-b`; torch has used 3 GiB of it."""
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", uuid="b", total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    return lambda fake: monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]


def test_recorded_signatures_match_the_installed_module() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is installed with CUDA's torch")
    for name, recorded in SIGNATURES.items():
        assert str(inspect.signature(getattr(pynvml, name))) == recorded, name


def test_process_is_distinguished_from_others_on_its_gpu(
    library: Callable[[FakeNvml], None],
) -> None:
    fake = FakeNvml({"GPU-a": {OTHER: 70 * GIB}, "GPU-b": {os.getpid(): 40 * GIB, OTHER: 9 * GIB}})
    library(fake)
    assert used_gpu_gib() == 40.0
    assert fake.num_open == 0


@pytest.mark.parametrize("own", [{}, {os.getpid(): None}])
def test_unknown_process_counts_all_memory_of_its_gpu(
    own: dict[int, None], library: Callable[[FakeNvml], None]
) -> None:
    library(FakeNvml({"GPU-a": {OTHER: 70 * GIB}, "GPU-b": {OTHER: 9 * GIB, **own}}))
    assert used_gpu_gib() == 9.0


def test_nothing_is_reported_without_gpu_or_nvml(
    library: Callable[[FakeNvml], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    library(FakeNvml({}, is_installed=False))
    assert used_gpu_gib() == 0.0
    assert _gpus() == {}
    fake = FakeNvml({"MIG-c": {}})
    library(fake)
    assert used_gpu_gib() == 0.0
    assert fake.num_open == 0
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert used_gpu_gib() == 0.0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert engine_gpu_use(SimpleNamespace()) is None


def test_machine_is_sampled_through_the_same_library(
    library: Callable[[FakeNvml], None],
) -> None:
    fake = FakeNvml({"GPU-a": {OTHER: 10 * GIB}})
    library(fake)
    assert _gpus() == {
        "gpu0_memory_used_gib": 10.0,
        "gpu0_memory_total_gib": 80.0,
        "gpu0_percent": 97.0,
        "gpu0_celsius": 61.0,  # this one does not report its power
    }
    assert fake.num_open == 0


def test_peak_is_the_memory_before_sleep(library: Callable[[FakeNvml], None]) -> None:
    library(FakeNvml({"GPU-b": {os.getpid(): 5 * GIB}}))
    backend = SimpleNamespace(peak_gpu_gib=44.0)
    found = engine_gpu_use(backend)
    assert found is not None
    assert (found.name, found.peak_gib) == ("NVIDIA H100 80GB HBM3", 44.0)
    again = engine_gpu_use(backend, reset_peak=True)  # another stage
    assert again is not None
    assert (again.peak_gib, backend.peak_gpu_gib) == (5.0, 0.0)
    library(FakeNvml({}))
    unknown = engine_gpu_use(backend)
    assert unknown is not None
    assert unknown.peak_gib == 3.0  # torch's peak


def test_peak_is_reported_next_to_the_trainers(library: Callable[[FakeNvml], None]) -> None:
    library(FakeNvml({"GPU-b": {os.getpid(): 5 * GIB}}))
    backends = [SimpleNamespace(peak_gpu_gib=44.0), SimpleNamespace(peak_gpu_gib=45.5)]
    engine: Any = Generation.__new__(Generation)
    engine._session = SimpleNamespace(cluster=SimpleNamespace(use_gpus=True))

    def run(method: str, *args: Any) -> list[Any]:
        return [args[0](each) for each in backends] if args else [1.0, 2.0]

    engine._workers = SimpleNamespace(run_all_workers_single_data=run)
    with usage.measured() as spent:
        assert engine.peak_memory_gib() == 3.0
    assert (spent.peak_engine_gpu_gib, spent.peak_gpu_gib) == (45.5, 0.0)
    made = StageResult(kind="checkpoint", format="transformers")
    cost = _cost(StageInputs("sample", {}, {}), made, spent, wall_seconds=1.0)
    assert cost.peak_engine_gpu_gib == 45.5
    assert "peak GiB of an engine's GPU" in cost_html(cost).replace("&#x27;", "'")
    assert cost.plus(Cost(peak_engine_gpu_gib=50.0)).peak_engine_gpu_gib == 50.0
    with usage.measured() as later:
        pass
    assert later.peak_engine_gpu_gib == 0.0
    engine._session.cluster.use_gpus = False
    with usage.measured() as on_cpus:
        engine.peak_memory_gib()
    assert on_cpus.peak_engine_gpu_gib == 0.0
