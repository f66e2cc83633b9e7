"""A recipe whose model and tokenizer have Python code, dry and real, with one command each."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from nemo_rl_core.checkpoints.model_code import code_files
from nemo_rl_core.store.manifest import Manifest
from tests.model_with_code import write_model

_RECIPE = """
recipe: grpo_arithmetic
model: {{name: {folder}, trust_remote_code: true}}
data: {{num_train: 64, num_validation: 8}}
sft: {{num_steps: 2, global_batch_size: 8, num_warmup_steps: 0}}
grpo: {{num_steps_per_iteration: 1, num_iterations: 1, num_prompts_per_step: 4}}
generation: {{backend: hf, max_new_tokens: 4}}
"""


@pytest.mark.thorough
def test_only_workers_of_a_recipe_run_the_code(tmp_path: Path) -> None:
    folder, runs, store = tmp_path / "toy", tmp_path / "runs", tmp_path / "store"
    folder.mkdir()
    write_model(folder, with_tokenizer_code=True)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(_RECIPE.format(folder=folder))
    command = [Path(sys.executable).with_name("nemo-rl"), "run", "grpo", str(recipe)]
    environment = {**os.environ, "NEMO_RL_HOME": str(store), "TOY_LOG": str(runs)}

    def called(*options: str) -> tuple[int, str]:
        with subprocess.Popen(
            [*command, *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            output, _ = process.communicate(timeout=900)
            assert process.returncode == 0, output
            return process.pid, output

    _, output = called("--dry-run")
    assert "unknown before the run, since only workers run the code" in output
    assert not runs.exists()
    controller, output = called()
    assert "workers run the Python code of the model" in output
    pids = {int(line) for line in runs.read_text().split()}
    assert len(pids) >= 3  # the trainer, the engine, the process of the tokenizer
    assert controller not in pids
    (exported,) = (store / "artifacts").glob("export-*")
    assert Manifest.read(exported).model_code == code_files(folder)
    assert "trust_remote_code=True" in (exported / "model" / "README.md").read_text()
    AutoModelForCausalLM.from_pretrained(exported / "model", trust_remote_code=True)
    assert "  ran  " not in called()[1]
    layers = folder / "layers_toy.py"
    layers.write_text(layers.read_text().replace("SCALE = 1.0", "SCALE = 0.5"))
    _, output = called("--dry-run")
    assert "prepare_model           runs" in output
