"""The record of the machine that made an artifact."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_rl_core.produce import StageInputs, StageResult, produce
from nemo_rl_core.store.machine import Machine, process_numerics, read_driver
from nemo_rl_core.store.manifest import Manifest
from nemo_rl_core.telemetry import usage

PROPRIETARY = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023
GCC version:  gcc version 12.2.0
"""
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"


@pytest.mark.parametrize(
    ("text", "version"), [(PROPRIETARY, "535.104.05"), (OPEN, "570.86.15"), ("", "")]
)
def test_the_driver_version_is_parsed(text: str, version: str) -> None:
    assert read_driver(text) == version


def test_variables_that_choose_kernels_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    variables = Machine.current().variables
    assert variables["NVIDIA_TF32_OVERRIDE"] == "0"
    assert "ATEN_CPU_CAPABILITY" not in variables


def test_a_record_of_an_earlier_version_lacks_processes_and_variables() -> None:
    assert Machine(cpu_model="any", cores=2) == Machine.model_validate(
        {"cpu_model": "any", "cores": 2, "driver": "", "variables": {}}
    )


def test_process_numerics_of_this_process() -> None:
    numerics = process_numerics()
    assert numerics["threads"] == str(torch.get_num_threads())
    assert numerics["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert numerics["float32_matmul_precision"] == "highest"
    assert "cuda" not in numerics
    torch.set_float32_matmul_precision("high")
    try:
        assert process_numerics()["float32_matmul_precision"] == "high"  # TF32
    finally:
        torch.set_float32_matmul_precision("highest")
    engine = SimpleNamespace(kernels=lambda: {"attention": "FLASH_ATTN"})
    assert process_numerics(engine) == {**numerics, "attention": "FLASH_ATTN"}


def test_variables_of_workers_are_recorded_if_they_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.delenv("NCCL_PROTO", raising=False)
    same = process_numerics()
    assert same["NVIDIA_TF32_OVERRIDE"] == "0"
    elsewhere = {**same, "NVIDIA_TF32_OVERRIDE": "1", "NCCL_PROTO": "LL"}
    del elsewhere["NCCL_ALGO"]
    recorded = Machine.current().with_processes({"training": elsewhere, "generation": same})
    assert recorded.process_variables == {
        "training": {"NCCL_ALGO": "", "NCCL_PROTO": "LL", "NVIDIA_TF32_OVERRIDE": "1"},
        "generation": {},
    }
    assert recorded.processes["training"] == recorded.processes["generation"]
    assert "NCCL_ALGO" not in recorded.processes["generation"]
    assert recorded.variable_in("training", "NVIDIA_TF32_OVERRIDE") == "1"
    assert recorded.variable_in("generation", "NVIDIA_TF32_OVERRIDE") == "0"
    assert recorded.variable_in("training", "NCCL_ALGO") == ""


@pytest.mark.slow
def test_the_capability_is_torchs_and_not_the_processors() -> None:
    program = (
        "import torch; from nemo_rl_core.store.machine import process_numerics; "
        "print(process_numerics()['cpu_capability'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "DEFAULT"


def test_without_torch_numerics_are_empty_and_nothing_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert process_numerics() == {}
    assert "torch" not in sys.modules


def _made(stage: str) -> Machine:
    def work(folder: Path) -> StageResult:
        if stage == "train":
            usage.saw_process("training", {"threads": "3", "DNNL_MAX_CPU_ISA": "AVX2"})
        (folder / "rows.txt").write_text(stage)
        return StageResult("dataset", "text")

    return Manifest.read(produce(StageInputs(stage, {}), work)).machine


@pytest.mark.usefixtures("own_store")
def test_a_manifest_records_the_numerics_of_its_workers() -> None:
    trained = _made("train")
    assert trained.processes == {"training": {"threads": "3"}}
    assert trained.process_variables is not None
    assert trained.process_variables["training"]["DNNL_MAX_CPU_ISA"] == "AVX2"
    # A later stage without workers computes in its own process.
    promoted = _made("promote")
    assert promoted.processes["stage"].items() <= process_numerics().items()
    assert promoted.processes["stage"]["threads"] == str(torch.get_num_threads())
    assert promoted.process_variables == {"stage": {}}
