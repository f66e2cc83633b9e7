"""What is recorded of the machine that made an artifact."""

import pytest

from nemo_rl_core.store.machine import Machine, read_driver

PROPRIETARY = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023
GCC version:  gcc version 12.2.0
"""
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"


@pytest.mark.parametrize(
    ("text", "version"), [(PROPRIETARY, "535.104.05"), (OPEN, "570.86.15"), ("", "")]
)
def test_the_version_of_the_driver(text: str, version: str) -> None:
    assert read_driver(text) == version


def test_variables_that_choose_kernels_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    found = Machine.current().variables
    assert found["NVIDIA_TF32_OVERRIDE"] == "0"
    assert "ATEN_CPU_CAPABILITY" not in found


def test_a_record_of_an_earlier_version_has_neither() -> None:
    assert Machine(cpu_model="any", cores=2) == Machine.model_validate(
        {"cpu_model": "any", "cores": 2, "driver": "", "variables": {}}
    )
