"""Both training backends on a GPU: agreement with the CPU, then speed and memory at 1.5 B."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

NUM_TOKENS = 8192
CASES: dict[str, dict[str, Any]] = {
    "dtensor bfloat16, recomputed": {"recompute": True},
    "dtensor bfloat16": {},
    "dtensor bfloat16, one sequence, recomputed": {"recompute": True, "lengths": [NUM_TOKENS]},
    "dtensor float32, recomputed": {"dtype": "float32", "recompute": True},
    "megatron bfloat16, recomputed": {"backend": "megatron", "recompute": True},
}


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_three_steps_match_the_cpu(
    tiny_model: Path, backend: str, on_device: Callable[..., Any]
) -> None:
    options = {"backend": backend, "dtype": "float32", "folder": str(tiny_model), "steps": 3}
    options |= {"lengths": [11, 4, 7, 2], "vocabulary": 16, "tokens": 24}
    actual, expected = (
        on_device("train.py", json.dumps(options), gpu=each)["losses"] for each in (True, False)
    )
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", list(CASES))
def test_speed_and_memory(model_1_5b: Path, case: str, on_device: Callable[..., Any]) -> None:
    options = {
        "backend": "dtensor",
        "dtype": "bfloat16",
        "folder": str(model_1_5b),
        "steps": 4,
        "lengths": [1024] * (NUM_TOKENS // 1024),
        "vocabulary": 151000,
        "tokens": NUM_TOKENS,
        **CASES[case],
    }
    actual = on_device("train.py", json.dumps(options), gpu=True)
    sys.stderr.write(f"\n{case}: {json.dumps(actual)}\n")
    assert actual["losses"] == sorted(actual["losses"], reverse=True)  # the batch is the same
