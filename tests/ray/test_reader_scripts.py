"""The utilities of the documents in scripts of a reader: no main guard, no set-up of tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reference.code_blocks import source

pytestmark = pytest.mark.thorough

INFRASTRUCTURE = """
import json
from pathlib import Path

import torch

from nemo_rl_core.infra.checkpointing import CheckpointManager
from nemo_rl_core.infra.logging import LoggerFacade
from nemo_rl_core.infra.resources import ResourceManager
from nemo_rl_core.utils.native_checkpoint import load_tensors, save_tensors


class Lines:
    def log_metrics(self, stage, step, metrics):
        with open("lines.jsonl", "a") as file:
            file.write(json.dumps([stage, step, metrics]))

    def close(self, outcome):
        print(outcome)


with LoggerFacade({"lines": Lines}) as log:
    log.log_metrics("train", 1, {"loss": 0.5})
print(Path("lines.jsonl").read_text())
print(ResourceManager.of_this_machine().missing({"CPU": 1, "GPU": 999}).keys())
manager = CheckpointManager("checkpoints", keep_latest=2)
for step in (1, 2, 3):
    tensors = {"w": torch.full((2,), float(step))}
    manager.save(step, lambda path: save_tensors(path / "w.safetensors", tensors))
step, folder = CheckpointManager("checkpoints").latest()
print(manager.steps(), step, load_tensors(folder / "w.safetensors")["w"].tolist())
"""

DIAGNOSTICS = """
from nemo_rl_core.models.validation import (
    test_generation_consistency,
    test_max_model_len_respected,
)

print("length", test_max_model_len_respected("model"))
print("error", round(test_generation_consistency("model"), 3))
"""

VALIDATION = """
import torch

from nemo_rl_core.algorithms import DPOLossFn
from nemo_rl_core.distributed import BatchedDataDict, RayVirtualCluster
from nemo_rl_core.models import HuggingFacePolicy
from nemo_rl_core.models.generation import VllmGeneration

cluster = RayVirtualCluster([1], use_gpus=False)
policy = HuggingFacePolicy("model", learning_rate=3e-3)
generator = VllmGeneration(cluster, {**vllm_config, "model_name": "model", "max_model_len": 64})
validation_batch = BatchedDataDict({"input_ids": torch.tensor([[1, 5, 6, 7], [1, 8, 9, 5]])})
validation_batch["attention_mask"] = torch.ones(2, 4, dtype=torch.long)
"""

AFTER_TRAINING = """
print("before", is_consistent)
pairs = {"pair_ids": torch.tensor([0, 0]), "is_chosen": torch.tensor([True, False])}
for _ in range(30):
    policy.train(BatchedDataDict({**validation_batch, **pairs}), DPOLossFn())
"""

CONVERTERS = """
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from nemo_rl_core.converters.megatron import hf_to_megatron, megatron_to_hf
from nemo_rl_core.converters.vllm_ready import vllm_ready

hf_to_megatron(Path("model"), Path("megatron"))
megatron_to_hf(Path("megatron"), Path("again"))
vllm_ready(Path("again"), Path("served"))
first, last, served = (
    AutoModelForCausalLM.from_pretrained(each).state_dict() for each in ("model", "again", "served")
)
print(all(torch.equal(first[name], last[name]) for name in first))
print(all(torch.equal(first[name].bfloat16(), served[name]) for name in first))
"""


@pytest.fixture
def reader(tmp_path: Path, tiny_model: Path) -> Path:
    """An empty folder with a link to a model."""
    (tmp_path / "model").symlink_to(tiny_model, target_is_directory=True)
    return tmp_path


def printed(folder: Path, script: str) -> list[str]:
    """Runs a script as `python script.py` in the folder, and returns its lines."""
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "NEMO_RL_HOME": str(folder / "store")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_logger_resources_and_checkpoints(reader: Path) -> None:
    assert printed(reader, INFRASTRUCTURE) == [
        "succeeded",
        '["train", 1, {"loss": 0.5}]',
        "dict_keys(['GPU'])",
        "[2, 3] 3 [3.0, 3.0]",
    ]


def test_diagnostics_of_a_model(reader: Path) -> None:
    lines = printed(reader, DIAGNOSTICS)
    assert [line for line in lines if line.startswith(("length", "error"))] == [
        "length 64",
        "error 1.0",
    ]


def test_validation_with_the_configuration_of_the_document(reader: Path) -> None:
    configuration, validation = source("004_L483"), source("004_L582")
    script = [configuration, VALIDATION, validation, AFTER_TRAINING, validation]
    lines = printed(reader, "\n".join(script))
    assert [line for line in lines if line.startswith(("before", "Warning"))] == [
        "before True",
        "Warning: Log probability consistency issues detected",
    ]


def test_converters_there_and_back(reader: Path) -> None:
    assert printed(reader, CONVERTERS)[-2:] == ["True", "True"]
