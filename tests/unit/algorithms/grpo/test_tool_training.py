"""GRPO on episodes in which a real model calls tools in the syntax of its chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.config.multi_turn import ToolUse
from nemo_rl_core.data.loader import save_frame
from nemo_rl_core.data.module import DataModule
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.data.renderer import Renderer
from nemo_rl_core.environments.tools.sources import schemas_of
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.telemetry.metrics import MetricsFile
from nemo_rl_core.trainers.loop import RunSpec
from tests.chat_models import qwen3_tokenizer
from tests.local_workers import LocalSession
from tests.unit.algorithms.grpo.test_remote_training import GRPO, InProcessTrainer

TOOLS = ToolUse.model_validate({"tools": ["tests.unit.algorithms.grpo.test_tool_training:add"]})
NUM_LESSONS = 120
QUESTION = {"role": "user", "content": "2+3?"}
ARGUMENTS = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
CALLS = f"<tool_call>\n{ARGUMENTS}\n</tool_call>\n<tool_call>\n{ARGUMENTS}\n</tool_call>"


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Other.
    """
    return a + b


def taught(tokenizer: Any, tools: Any) -> list[tuple[list[int], list[bool]]]:
    """Two episodes: two calls and then the right answer, or a wrong answer at once."""

    def sampled(text: str) -> list[int]:
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    writer = Renderer(tokenizer)
    opening = writer.opening([QUESTION], tools=tools, row="a prompt")
    call = {"type": "function", "function": json.loads(ARGUMENTS)}
    results = [{"role": "tool", "name": "add", "content": "5"}] * 2
    turns = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call, call]}]
    between = writer.continuation(
        turns, results, tools=tools, last_token=tokenizer.eos_token_id, row="results"
    )
    parts = [
        [(opening, False), (sampled(CALLS), True), (between, False), (sampled("5"), True)],
        [(opening, False), (sampled("6"), True)],
    ]
    return [
        ([i for ids, _ in part for i in ids], [by_policy for ids, by_policy in part for _ in ids])
        for part in parts
    ]


@pytest.fixture(scope="module")
def taught_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that plays either of the two episodes."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = qwen3_tokenizer()
    episodes = taught(tokenizer, schemas_of(TOOLS.tools))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=NUM_LESSONS)
    for _ in range(NUM_LESSONS):
        optimizer.zero_grad()
        for ids, by_policy in episodes:
            # Only the positions of the policy's tokens need logits.
            trained = torch.tensor(by_policy[1:]).nonzero()[:, 0]
            hidden = model.model(torch.tensor([ids])).last_hidden_state[0, trained]
            labels = torch.tensor(ids)[trained + 1]
            torch.nn.functional.cross_entropy(
                model.lm_head(hidden), labels, reduction="sum"
            ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    folder = tmp_path_factory.mktemp("calls") / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_model_trains_on_episodes_with_calls(taught_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "2+3?", "answer": "5"}]
    train = tmp_path / "train"
    train.mkdir()
    others = [{"prompt": "2+4?", "answer": "6"}]
    data = DataModule.of(rows, validation=others, tokenizer=load_tokenizer(taught_model))
    save_frame(data.train, train)
    steps = {"num_prompts_per_step": 1, "num_generations_per_prompt": 8}
    trainer = InProcessTrainer(
        {
            "environment": TOOLS,
            "generation": {"backend": "hf", "max_new_tokens": 200},
            "rollouts": {"max_turns": 3, "max_rollout_tokens": 500},
            "max_prompt_tokens": 1024,
            "grpo": {**GRPO, **steps, "num_steps_per_iteration": 2, "learning_rate": 1e-3},
        },
        session=LocalSession(),  # type: ignore[arg-type]
    )
    work = tmp_path / "work"
    trainer.run(RunSpec(train=train, start=taught_model, work=work, reference=taught_model))
    tokenizer, records = qwen3_tokenizer(), RolloutRecords(work / "rollouts")
    rollouts = [each for step in (1, 2) for each in records.load(step)]
    assert len(rollouts) == 16
    solved = [each for each in rollouts if each.reward == 1.0]
    assert 2 <= len(solved) <= 14  # the model plays both episodes
    (right, _), _ = taught(tokenizer, schemas_of(TOOLS.tools))
    for each in solved:
        assert [*each.prompt.token_ids, *each.completion.token_ids] == right
        roles = [turn["role"] for turn in each.messages]
        assert roles == ["user", "assistant", "tool", "tool", "assistant"]
        assert [turn["content"] for turn in each.messages[2:]] == ["5"] * 3
    metrics = [each.metrics for each in MetricsFile(work / "metrics.jsonl").read()]
    first = [each for each in rollouts[:8] if each.error is None]
    calls = sum(2 for each in first if len(each.messages) > 2)
    assert metrics[0]["environment_calls_per_episode"] == calls / len(first)
