"""Scored rollouts as a training batch, and as a table to read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.algorithms.grpo.config import AdvantageConfig
from nemo_rl_core.data.collate import collate
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.functional.advantages import (
    group_centered,
    group_normalized,
    leave_one_out,
)
from nemo_rl_core.types import Rollout

_ADVANTAGES = {
    "group_normalized": group_normalized,
    "group_centered": group_centered,
    "leave_one_out": leave_one_out,
}


def grpo_batch(
    rollouts: Sequence[Rollout], *, num_generations_per_prompt: int, advantage: AdvantageConfig
) -> BatchedDataDict:
    """Rollouts, group by group, as tensors.

    Args:
        rollouts: `B = P * G`, scored; those of one prompt lie next to each other.
        num_generations_per_prompt: G.
        advantage: How rewards of a group become advantages.

    Returns:
        What `collate` returns, and `rewards [B]`, `group_ids [B]`, `advantages [B]`,
        `generation_logprobs [B, T-1]` (0 on the prompt), `truncated [B]`.
    """
    batch = collate(
        [rollout.prompt.token_ids + rollout.completion.token_ids for rollout in rollouts],
        [
            [False] * len(rollout.prompt.token_ids) + [True] * len(rollout.completion.token_ids)
            for rollout in rollouts
        ],
    )
    logprobs = torch.zeros(batch["token_mask"].shape)
    logprobs[batch["token_mask"]] = torch.tensor(
        [value for rollout in rollouts for value in rollout.completion.logprobs]
    )
    rewards = torch.tensor([float(_reward(rollout)) for rollout in rollouts])
    # The place in the step, not the prompt's text, makes a group: a prompt may be drawn twice.
    group_ids = torch.arange(len(rollouts)) // num_generations_per_prompt
    batch.update(
        generation_logprobs=logprobs,
        rewards=rewards,
        group_ids=group_ids,
        advantages=_ADVANTAGES[advantage.kind](rewards, group_ids),
        truncated=torch.tensor([rollout.completion.truncated for rollout in rollouts]),
    )
    return batch


def _reward(rollout: Rollout) -> float:
    if rollout.reward is None:
        raise ValueError(f"rollout of prompt {rollout.prompt.id!r} has not been scored")
    return rollout.reward


def rollout_rows(rollouts: Sequence[Rollout], advantages: torch.Tensor) -> list[dict[str, Any]]:
    """One row a rollout: prompt, completion, answer, reward, advantage, tokens and logprobs."""
    return [
        {
            "prompt_id": rollout.prompt.id,
            "task": rollout.prompt.task,
            "prompt": rollout.prompt.text,
            "completion": rollout.text,
            "answer": rollout.prompt.answer,
            "reward": rollout.reward,
            "advantage": advantage,
            "truncated": rollout.completion.truncated,
            "prompt_ids": list(rollout.prompt.token_ids),
            "completion_ids": list(rollout.completion.token_ids),
            "logprobs": list(rollout.completion.logprobs),
        }
        for rollout, advantage in zip(rollouts, advantages.tolist(), strict=True)
    ]


def save_rollouts(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes rows as parquet; the same rows give the same bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
