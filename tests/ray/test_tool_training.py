"""GRPO on episodes in which a real model calls tools in the syntax of its chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms import GRPOTrainer
from nemo_rl_core.config.multi_turn import ToolUse
from nemo_rl_core.data.renderer import Renderer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments.tools.sources import schemas_of
from nemo_rl_core.rollouts.records import RolloutRecords
from tests.chat_models import qwen3_tokenizer

TOOLS = ToolUse.model_validate({"tools": ["tests.ray.test_tool_training:add"]})
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

    def said(text: str) -> list[int]:
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
        [(opening, False), (said(CALLS), True), (between, False), (said("5"), True)],
        [(opening, False), (said("6"), True)],
    ]
    return [
        ([i for ids, _ in part for i in ids], [own for ids, own in part for _ in ids])
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
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    num_steps = 150
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, total_steps=num_steps)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for ids, own in episodes:
            # Only the positions of the policy's tokens need logits.
            trained = torch.tensor(own[1:]).nonzero()[:, 0]
            hidden = model.model(torch.tensor([ids])).last_hidden_state[0, trained]
            logits = model.lm_head(hidden)
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids)[trained + 1])
            loss.backward()
        optimizer.step()
        schedule.step()
    folder = tmp_path_factory.mktemp("calls") / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_model_trains_on_episodes_with_calls(session: ClusterSession, taught_model: Path) -> None:
    trainer = GRPOTrainer.from_pretrained(
        taught_model,
        cluster={"num_threads": 1},
        environment=TOOLS,
        generation={"backend": "hf", "max_new_tokens": 200},
        rollouts={"max_turns": 3, "max_rollout_tokens": 500},
        max_prompt_tokens=1024,
        num_prompts_per_step=1,
        num_generations_per_prompt=8,
        num_steps_per_iteration=2,
    )
    result = trainer.fit([{"prompt": "2+3?", "answer": "5"}])
    tokenizer, records = qwen3_tokenizer(), RolloutRecords(result.folder / "rollouts")
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
    metrics = result.metrics
    first = [each for each in rollouts[:8] if each.error is None]
    calls = sum(2 for each in first if len(each.messages) > 2)
    assert metrics[0]["environment_calls_per_episode"] == calls / len(first)
