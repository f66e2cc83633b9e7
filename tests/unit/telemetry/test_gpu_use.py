"""The GPU of the workers in the cost of a stage."""

from pathlib import Path

import pytest

from nemo_rl_core import produce
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.produce import StageInputs, StageResult
from nemo_rl_core.store.manifest import Cost
from nemo_rl_core.telemetry import usage
from nemo_rl_core.telemetry.model_flops import ModelFlops
from nemo_rl_core.telemetry.usage import GpuUse, gpu_use

H100 = "NVIDIA H100 80GB HBM3"


def test_a_cpu_has_no_gpu_use() -> None:
    assert gpu_use() is None


def test_device_and_peak_memory_are_reported_by_workers() -> None:
    usage.saw_gpu(GpuUse("another", 24.0, 90.0))  # of an earlier stage
    with usage.measured() as spent:
        usage.saw_gpu(GpuUse(H100, 79.1, 40.0))
        with usage.measured() as inner:
            usage.saw_gpu(GpuUse(H100, 79.1, 61.5))
            usage.saw_gpu(GpuUse(H100, 79.1, 30.0))
    assert (inner.device, inner.peak_gpu_gib) == (H100, 61.5)
    assert (spent.device, spent.peak_gpu_gib) == (H100, 61.5)
    with usage.measured() as later:
        pass
    assert (later.device, later.peak_gpu_gib) == ("", 0.0)


def test_mfu_needs_no_gpu_on_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a head without a GPU, nvidia-smi fails."""
    monkeypatch.setattr(produce, "gpu_name", lambda: "")
    settings = {
        "cluster": ClusterConfig(shape="node_8gpu").model_dump(mode="json"),
        "dtype": "bfloat16",
    }
    inputs = StageInputs("train_sft", settings, {"data": Path("unused")})
    with usage.measured() as spent:
        usage.count("training", ModelFlops(7e9, 28, 3584), [4096])
        usage.saw_gpu(GpuUse(H100, 79.1, 61.5))
    made = StageResult(kind="checkpoint", format="transformers")
    cost = produce._cost(inputs, made, spent, wall_seconds=10.0)
    assert cost.device == H100
    assert cost.mfu == pytest.approx(spent.flops / (80 * 989e12))
    assert cost.peak_gpu_gib == 61.5
    assert "peak GiB of a GPU" in produce.cost_html(cost)
    assert cost.plus(Cost(peak_gpu_gib=70.0)).peak_gpu_gib == 70.0
