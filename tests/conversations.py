"""An environment that replies, for runs of models with random weights."""

from collections.abc import Sequence
from typing import Any

import torch

from nemo_rl_core.environments.interfaces import EnvironmentReturn

ROOM = {"max_turns": 4, "max_rollout_tokens": 14, "max_failed_fraction": 0.9}
"""The section `rollouts`, which truncates some conversations and tolerates scoring failures."""


class Chat:
    """Answers `1=` to turns that stop at a digit, until one has a 7; fails on a minus."""

    first_stop_strings = tuple("0123456789")

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any]) -> EnvironmentReturn:
        turns = [log[-1]["content"] for log in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "1="}] * len(turns),
            metadata=list(metadata),
            next_stop_strings=[list(self.first_stop_strings)] * len(turns),
            rewards=torch.tensor([text.count("7") + 0.1 * len(text) for text in turns]),
            terminateds=torch.tensor(["7" in text for text in turns]),
            errors=["a minus" if text.startswith("-") else None for text in turns],
        )

    def global_post_process_and_metrics(self, batch: dict[str, Any]) -> Any:
        return batch, {"prompts": float(len(batch["prompts"]))}
