"""Attention kernels over packed rows, compared with a dense float32 mask; then their speed."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.backends.experimental.flash_attention import GENERATIONS, NEWER, installed

USABLE = [
    version
    for version in NEWER
    if installed(version)
    and torch.cuda.is_available()
    and torch.cuda.get_device_capability()[0] in GENERATIONS[version]
]
"""Installed versions of FlashAttention for this GPU other than torch's built-in one."""

AGREEING: list[dict[str, Any]] = [
    {"model": model, "attention": attention}
    for attention in ("varlen", "flex")
    for model in ("llama", "qwen2", "qwen3", "gemma3")
]
AGREEING += [
    {"model": "qwen2", "attention": "varlen", "recompute": True},
    {"model": "qwen2", "attention": "varlen", "compile": True},
    {"model": "qwen2", "attention": "varlen", "flash_attention": 2, "deterministic": False},
    {"model": "qwen2", "attention": "flex", "recompute": True},
    {"model": "qwen2", "attention": "flex", "dtype": "float32"},
]
AGREEING += [
    {"model": model, "attention": "varlen", "flash_attention": version, "deterministic": False}
    for version in USABLE
    for model in ("llama", "qwen2", "qwen3", "gemma3")
]
TIMED: list[dict[str, Any]] = [
    {"attention": attention, "lengths": lengths}
    for attention in ("sdpa", "varlen", "flex")
    for lengths in ("64 x 128", "64 to 4096")
]
TIMED += [
    {
        "attention": "varlen",
        "flash_attention": version,
        "lengths": lengths,
        "deterministic": False,
    }
    for version in (2, *USABLE)
    for lengths in ("64 x 128", "64 to 4096")
]


def named(options: dict[str, Any]) -> str:
    return " ".join(
        value if isinstance(value, str) else f"{key}={value}" for key, value in options.items()
    )


def _kernel(options: dict[str, Any]) -> tuple[str, int | None]:
    return options["attention"], options.get("flash_attention")


@cache
def figures(attention: str, version: int | None) -> tuple[dict[str, dict[str, Any]], str]:
    """Returns the figures of all cases of a kernel, from a separate process, and its stderr."""
    cases = [each for each in [*AGREEING, *TIMED] if _kernel(each) == (attention, version)]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("attention.py"), json.dumps(cases)],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    results = [json.loads(line) for line in lines]
    return dict(zip(map(named, cases), results, strict=False)), done.stderr[-4000:]


def figures_of(options: dict[str, Any]) -> dict[str, Any]:
    every, output = figures(*_kernel(options))
    assert named(options) in every, f"the process ended early: {output}"
    actual = every[named(options)]
    assert "error" not in actual, actual["error"]
    sys.stderr.write(f"\n{json.dumps(actual)}\n")
    return actual


@pytest.mark.parametrize("options", AGREEING, ids=named)
def test_kernel_agrees_with_dense_mask(options: dict[str, Any]) -> None:
    actual = figures_of(options)
    kernel, dense = actual["kernel"], actual["dense"]
    assert kernel["finite"], actual
    if options.get("dtype") == "float32":
        assert kernel["largest"] < 1e-3, actual
        assert kernel["gradient"] < 1e-3, actual
    else:
        # As far from float32 as the dense mask in 16 bits, up to chance.
        assert kernel["mean"] < 2 * dense["mean"] + 1e-3, actual
        assert kernel["gradient"] < 2 * dense["gradient"] + 1e-2, actual


@pytest.mark.parametrize("options", TIMED, ids=named)
def test_speed(options: dict[str, Any]) -> None:
    actual = figures_of(options)
    dense = figures_of({"attention": "sdpa", "lengths": options["lengths"]})
    # A mask of all pairs costs more than separate sequences.
    assert options["attention"] == "sdpa" or actual["median_ms"] < dense["median_ms"], (
        actual,
        dense,
    )


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_three_steps_match_a_dense_mask(
    tiny_model: Path, backend: str, on_device: Callable[..., Any]
) -> None:
    options = {"backend": backend, "dtype": "bfloat16", "folder": str(tiny_model), "steps": 3}
    options |= {"lengths": [11, 4, 7, 2], "vocabulary": 16, "tokens": 24, "recompute": True}
    actual, expected = (
        on_device("train.py", json.dumps({**options, "attention": each}), gpu=True)["losses"]
        for each in ("varlen", "sdpa")
    )
    sys.stderr.write(f"\n{backend}: varlen {actual}, sdpa {expected}\n")
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=2e-2, atol=2e-2)
