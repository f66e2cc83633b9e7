"""The pipeline with Megatron-core on two tensor-parallel processes, and the conversion workflow."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

Run = Any

pytestmark = pytest.mark.thorough

PARALLEL = {
    "training": {"backend": "megatron", "tensor_parallel_size": 2},
    "cluster": {"num_workers": 2, "num_threads": 1},
}


@pytest.fixture(scope="module")
def megatron_run(
    recipe: dict[str, Any], run_recipe: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    grpo = {**recipe["grpo"], "num_steps_per_iteration": 3, "learning_rate": 1e-3}
    store = tmp_path_factory.mktemp("megatron") / "store"
    finished = run_recipe({**recipe, **PARALLEL, "grpo": grpo}, store)
    assert finished.exit_code == 0, finished.output[-3000:]
    return finished


def test_a_run_ends_with_the_conversion(megatron_run: Run) -> None:
    stages = megatron_run.stages("ran")
    assert stages[-5:] == ["convert", "evaluate", "promote", "export", "lineage_report"]
    proof = json.loads((megatron_run.artifact("convert") / "proof.json").read_text())
    assert proof["num_equal"] == proof["num_tensors"] > 0
    assert proof["num_rows"] > 0


def test_engine_and_trainer_agreed_at_every_step(megatron_run: Run) -> None:
    for iteration in (1, 2):
        steps = megatron_run.metrics(f"grpo_iteration {iteration}")
        assert len(steps) == 3
        assert all(1 <= step["token_mult_prob_error"] < 1.001 for step in steps)


def test_the_converted_model_equals_the_trained_one(megatron_run: Run) -> None:
    # Two ways to export from Megatron: streamed at the save, and read from the native checkpoint.
    streamed = load_folder(megatron_run.artifact("grpo_iteration 2") / "model")
    converted = load_folder(megatron_run.artifact("convert") / "model")
    assert streamed.keys() == converted.keys()
    assert all(streamed[name].equal(converted[name]) for name in streamed)
    started = load_folder(megatron_run.artifact("train_sft") / "model")
    assert any(not started[name].equal(converted[name]) for name in started)


def test_the_converted_model_loads_in_transformers(megatron_run: Run) -> None:
    # `evaluate`, which runs after the conversion, has shown that vLLM can load it.
    folder = megatron_run.artifact("convert") / "model"
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_the_same_command_again_runs_nothing(
    megatron_run: Run, recipe: dict[str, Any], run_recipe: Callable[..., Run]
) -> None:
    grpo = {**recipe["grpo"], "num_steps_per_iteration": 3, "learning_rate": 1e-3}
    again = run_recipe({**recipe, **PARALLEL, "grpo": grpo}, megatron_run.store)
    assert again.exit_code == 0, again.output[-3000:]
    assert again.stages("ran") == []
    assert "convert" in again.stages("CACHED")


def test_the_conversion_workflow_preserves_all_weights(
    run_recipe: Callable[..., Run], tmp_path: Path
) -> None:
    run = run_recipe(None, tmp_path / "store", ("convert", "convert_model"))
    assert run.exit_code == 0, run.output[-3000:]
    assert run.stages("ran") == ["prepare_model", "prepare_data", "to_megatron", "convert"]
    source = load_folder(run.artifact("prepare_model") / "model")
    back = load_folder(run.artifact("convert") / "model")
    assert source.keys() == back.keys()
    assert all(source[name].equal(back[name]) for name in source)


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all weights of a transformers folder."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
