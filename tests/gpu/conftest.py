"""Checks that need one GPU, in the order of the files: `make test-gpu`.

Figures are recorded and not asserted, except for what must hold on any GPU: agreement with the CPU,
equal checksums, and memory that does not grow.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from nemo_rl_core.data.pretrained import load_tokenizer

SHAPE_1_5B = Qwen2Config(
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def model_1_5b(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a Qwen2 with 1.5 B random weights and the tokenizer of sums."""
    folder = tmp_path_factory.mktemp("large") / "model"
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(SHAPE_1_5B, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    load_tokenizer(tiny_model).save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return folder


@pytest.fixture(scope="session")
def on_device() -> Callable[..., Any]:
    """Returns a function that runs a program of this folder and returns its last line of output."""
    return _on_device


def _on_device(program: str, *arguments: str, gpu: bool) -> Any:
    """Runs a program of this folder with or without the GPU; returns its last line of output."""
    environment = os.environ if gpu else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / program, *arguments],
        env=dict(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
