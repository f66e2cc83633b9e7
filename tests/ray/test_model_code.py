"""A model with Python code sampled by vLLM, whose kernels replace its attention."""

import json
import os
from pathlib import Path

import pytest

import nemo_rl_core
from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.converters.materialize import materialize

_CONFIGURATION = """
from transformers import Qwen2Config


class NewConfig(Qwen2Config):
    model_type = "qwen2_with_code"
"""
_MODELING = """
import os

from transformers import Qwen2ForCausalLM, Qwen2Model

from .configuration_new import NewConfig

with open(os.environ["TOY_LOG"], "a") as file:
    file.write(f"{os.getpid()}\\n")


class NewModel(Qwen2Model):
    config_class = NewConfig


class NewForCausalLM(Qwen2ForCausalLM):
    config_class = NewConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = NewModel(config)
        self.post_init()
"""


@pytest.mark.thorough
def test_vllm_samples_from_a_model_with_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "runs"))
    folder = tmp_path / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 2}
    materialize(ModelFromConfig(**sizes), folder, seed=0)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "configuration_new.NewConfig"}
    classes |= {"AutoModel": "modeling_new.NewModel"}
    classes |= {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"}
    config |= {"model_type": "qwen2_with_code", "architectures": ["NewForCausalLM"]}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": classes}))
    (folder / "configuration_new.py").write_text(_CONFIGURATION)
    (folder / "modeling_new.py").write_text(_MODELING)
    result = nemo_rl_core.train(
        {"name": str(folder), "trust_remote_code": True},
        [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(9) for b in range(9)],
        reward_fn=lambda completion: float(completion[-1:] in set("02468")),
        generation={"backend": "vllm", "kv_cache_gib": 1},
        num_steps_per_iteration=2,
        num_prompts_per_step=4,
        num_generations_per_prompt=4,
        learning_rate=3e-3,
        max_new_tokens=6,
        max_prompt_tokens=16,
    )
    # Also after new weights, the engine computes what the trainer does.
    assert [step["token_mult_prob_error"] for step in result.metrics] == pytest.approx(
        [1, 1], abs=1e-3
    )
    assert str(os.getpid()) not in (tmp_path / "runs").read_text().split()
