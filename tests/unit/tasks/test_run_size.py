"""Steps that take more rows than the data has, and runs of hours on a laptop."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.algorithms.grpo.trainer import GRPOTrainer
from nemo_rl_core.algorithms.sft.trainer import SFTTrainer
from nemo_rl_core.data.loader import save_frame
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.planning.cpu_hours import cpu_hours
from nemo_rl_core.planning.sizes import sizes_of
from nemo_rl_core.trainers.gpu_load import warn_of_hours
from tasks.local_run.preflight import preflight
from tasks.planning.loads import loads_of
from tasks.recipes.common import PipelineRecipe
from tasks.recipes.distillation import DistillationRecipe
from tasks.recipes.dpo import DPORecipe
from tasks.recipes.grpo import GRPORecipe
from tasks.recipes.ppo import PPORecipe
from tasks.recipes.reward_model import RewardModelRecipe
from tasks.recipes.sft import SFTRecipe

SUMS = {"kind": "arithmetic", "num_train": 20, "num_validation": 5}


def check(kind: type[PipelineRecipe], **values: Any) -> None:
    preflight({"config": kind.model_validate(values)})


@pytest.mark.parametrize(
    ("kind", "values", "name"),
    [
        (SFTRecipe, {"sft": {"global_batch_size": 21}}, "sft.global_batch_size"),
        (GRPORecipe, {"grpo": {"num_prompts_per_step": 21}}, "grpo.num_prompts_per_step"),
        (PPORecipe, {"ppo": {"num_prompts_per_step": 21}}, "ppo.num_prompts_per_step"),
        (
            DistillationRecipe,
            {"distillation": {"num_prompts_per_step": 21}, "teacher": {}},
            "distillation.num_prompts_per_step",
        ),
    ],
)
def test_a_step_of_more_rows_than_the_data_is_refused(
    kind: type[PipelineRecipe], values: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError, match="a step takes more rows than the data has") as caught:
        check(kind, data=SUMS, **values)
    assert caught.value.expected is not None
    assert caught.value.expected.startswith(f"{name} of at most 20")
    assert caught.value.got == "21"


@pytest.mark.parametrize("kind", [DPORecipe, RewardModelRecipe])
def test_pairs_of_a_file_are_counted_without_held_out_ones(
    kind: type[PipelineRecipe], tmp_path: Path
) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "0"} for n in range(10)]
    path.write_text("\n".join(map(json.dumps, rows)))
    section = "dpo" if kind is DPORecipe else "reward_model"
    data = {"kind": "file", "train": str(path), "validation_fraction": 0.2,
            "max_prompt_tokens": 16}  # fmt: skip
    sections = {"data": data, "evaluation": {"data": SUMS}}
    with pytest.raises(ConfigError, match="a step takes more rows than the data has") as caught:
        check(kind, **sections, pairs={"kind": "data"}, **{section: {"num_pairs_per_step": 9}})
    assert (
        caught.value.expected == f"{section}.num_pairs_per_step of at most 8, the rows to train on"
    )
    check(kind, **sections, pairs={"kind": "data"}, **{section: {"num_pairs_per_step": 8}})
    # A prompt may give no pair, so the number of sampled pairs is not known before the run.
    check(kind, data=SUMS, pairs={"kind": "rollouts"}, **{section: {"num_pairs_per_step": 99}})


QWEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "tie_word_embeddings": True,
}


def test_hours_are_counted_from_tokens_and_weights() -> None:
    recipe = GRPORecipe.model_validate(
        {
            "data": {**SUMS, "max_prompt_tokens": 24},
            "grpo": {
                "num_prompts_per_step": 8,
                "num_generations_per_prompt": 4,
                "loss": {"kl": None},
            },
            "generation": {"max_new_tokens": 1000},
        }
    )
    load = loads_of(recipe, lambda _: sizes_of(QWEN))[0]
    # 24 layers x (4 x 1024^2 + 3 x 1024 x 4096), and the head.
    weights = 24 * (4 * 1024**2 + 3 * 1024 * 4096) + 1000 * 1024
    # Sampled once (2 N), trained once (6 N); with 10 % for attention at 1024 tokens.
    flops = 3 * 32 * 1024 * 8 * weights
    expected = flops / (20e9 * len(os.sched_getaffinity(0))) / 3600
    assert expected < cpu_hours(load, 3) < 1.15 * expected


def test_a_recipe_of_hours_on_a_laptop_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    big = {"kind": "from_config", "hidden_size": 1024, "num_layers": 24, "num_heads": 16,
           "max_position_embeddings": 2048}  # fmt: skip
    grpo = {"num_steps_per_iteration": 50, "num_iterations": 4}
    sections = {"model": big, "grpo": grpo, "generation": {"max_new_tokens": 512}}
    with caplog.at_level(logging.WARNING):
        check(GRPORecipe, **sections)
    (line,) = [each for each in caplog.messages if "hours" in each]
    assert line.startswith("grpo_iteration may take about ")
    assert "102,400 completions of up to 512 tokens" in line
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check(GRPORecipe, **{**sections, "model": {**big, "hidden_size": 512, "num_layers": 2}})
    assert not [each for each in caplog.messages if "hours" in each]


def test_rows_of_a_file_are_taken_at_their_mean_length(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"{n}" + "x" * 3988}) for n in range(100, 200)))
    model = {"kind": "text_from_config", "hidden_size": 1024, "num_layers": 24, "num_heads": 16,
             "max_position_embeddings": 2048}  # fmt: skip
    with caplog.at_level(logging.WARNING):
        check(SFTRecipe, model=model, data={"kind": "file", "train": str(path)},
              sft={"num_steps": 500, "global_batch_size": 64},
              evaluation={"data": SUMS})  # fmt: skip
    (line,) = [each for each in caplog.messages if "hours" in each]
    assert line.startswith("train_sft may take about ")
    assert "32,000 rows of about 1" in line


@pytest.mark.parametrize(
    ("trainer", "section", "text"),
    [
        (
            GRPOTrainer,
            {"grpo": {"num_steps_per_iteration": 90}, "generation": {"max_new_tokens": 99}},
            "46,080 completions of up to 99 tokens",
        ),
        # A prompt of 5 characters and a completion of 2.
        (SFTTrainer, {"sft": {"num_steps": 9000}}, "1,152,000 rows of about 2 tokens"),
    ],
)  # fmt: skip
def test_a_training_of_hours_from_python_is_a_warning(
    trainer: Any, section: dict[str, Any], text: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN))
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(10, 30)]
    save_frame(DataModule.of(rows).train, tmp_path / "train")
    made = trainer(section)
    with caplog.at_level(logging.WARNING):
        warn_of_hours(made.algorithm, made.config, made.settings, tmp_path / "model",
                      tmp_path / "train")  # fmt: skip
    (line,) = [each for each in caplog.messages if "hours" in each]
    assert text in line
