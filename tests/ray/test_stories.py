"""User stories in Python, each written the way a user would.

The table of all stories is in tests/reference/README.md.
"""

import ast
import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import nemo_rl_core
from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.distributed.session import ClusterSession
from tests.documents import REPOSITORY, blocks_of

# The same as in conftest.py, so that all tests share one engine.
SMALL = {
    "cluster": {"num_threads": 1},
    "generation": {"max_new_tokens": 6, "kv_cache_gib": 1, "max_num_seqs": 64},
    "max_prompt_tokens": 16,
}


@pytest.mark.slow
def test_gsm8k_with_a_reward_that_needs_the_answer(
    session: ClusterSession, tiny_model: Path, tmp_path: Path
) -> None:
    rows = [
        {"question": f"{a}+{b}=", "answer": f"{a} + {b} = <<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"}
        for a in range(1, 6)
        for b in range(1, 6)
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "train.parquet")

    def correct(completion: str, answer: str) -> float:
        return 1.0 if completion.strip() == answer else 1.0 / (10 + len(completion))

    result = nemo_rl_core.train(
        tiny_model,
        tmp_path / "train.parquet",
        reward_fn=correct,
        num_prompts_per_step=4,
        num_generations_per_prompt=2,
        num_steps_per_iteration=1,
        **SMALL,
    )
    rollouts = pd.read_parquet(result.folder / "rollouts" / "step_000001.parquet")
    sums = {row["question"]: row["answer"].rpartition("#### ")[2] for row in rows}
    assert rollouts["reward"].tolist() == pytest.approx(
        [
            correct(text, sums[prompt])
            for prompt, text in zip(rollouts.prompt, rollouts.completion, strict=True)
        ]
    )


@pytest.mark.thorough
def test_dpo_from_rows_of_ultrafeedback(
    session: ClusterSession, tiny_model: Path, tmp_path: Path
) -> None:
    def chat(*turns: str) -> list[dict[str, str]]:
        roles = ("user", "assistant")
        return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]

    rows = [
        {
            "prompt": f"{n}+1=",
            "prompt_id": f"a{n}",
            "chosen": chat(f"{n}+1=", str(n + 1)),
            "rejected": chat(f"{n}+1=", "0 0 0"),
            "messages": chat(f"{n}+1=", str(n + 1)),
            "score_chosen": 8.5,
            "score_rejected": 3.0,
        }
        for n in range(12)
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "train_prefs.parquet")
    trainer = nemo_rl_core.DPOTrainer.from_pretrained(
        tiny_model,
        num_steps_per_iteration=3,
        num_pairs_per_step=8,
        learning_rate=1e-3,
        num_warmup_steps=0,
        cluster={"num_threads": 1},
    )
    losses = [step["loss"] for step in trainer.fit(tmp_path / "train_prefs.parquet").metrics]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < losses[0]


def _blocks_of_the_page() -> list[str]:
    page = (REPOSITORY / "docs" / "coming-from" / "trl.md").read_text()
    return [block.text for block in blocks_of(page) if block.language == "python"]


def _options(text: str, function: str) -> dict[str, Any]:
    """Returns the literal options of the call of that name."""
    (call,) = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(function)
    ]
    options = {}
    for option in call.keywords:
        try:
            options[str(option.arg)] = ast.literal_eval(option.value)
        except ValueError:
            continue  # a name
    return options


@pytest.mark.thorough
def test_a_script_of_trl_is_ported_by_its_page(
    session: ClusterSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl import GRPOConfig

    _, theirs, ours = _blocks_of_the_page()
    config = GRPOConfig(**{**_options(theirs, "GRPOConfig"), "bf16": False, "use_cpu": True})
    small = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 2}
    model = ModelFromConfig(**small, max_position_embeddings=1024)
    materialize(model, tmp_path / "path" / "to" / "model", seed=0)
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(20)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "prompts.jsonl").write_text(text)
    monkeypatch.chdir(tmp_path)
    result: dict[str, Any] = {}
    exec(compile(ours, "trl.md", "exec"), result)
    settings = result["result"].manifest.config
    grpo = settings["grpo"]
    sequences = config.per_device_train_batch_size * config.gradient_accumulation_steps
    assert grpo["num_prompts_per_step"] * grpo["num_generations_per_prompt"] == sequences
    assert grpo["num_generations_per_prompt"] == config.num_generations
    assert grpo["num_steps_per_iteration"] == config.max_steps == len(result["result"].metrics)
    assert grpo["learning_rate"] == config.learning_rate
    assert grpo["loss"]["kl"]["beta"] == config.beta
    assert grpo["loss"]["clip_high"] == config.epsilon_high
    assert settings["generation"]["max_new_tokens"] == config.max_completion_length
