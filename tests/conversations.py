"""An environment that answers, for runs of models with random weights."""

from collections.abc import Sequence
from typing import Any

import torch

from nemo_rl_core.environments.interfaces import EnvironmentReturn

ROOM = {"max_turns": 4, "max_rollout_tokens": 14, "max_failed_fraction": 0.9}
"""The section `rollouts`, which cuts some conversations, and bears that some cannot be scored."""


class Chat:
    """Answers `1=` to turns that stop at a digit, until one has a 7; those with a minus fail."""

    first_stop_strings = tuple("0123456789")

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any]) -> EnvironmentReturn:
        said = [log[-1]["content"] for log in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "1="}] * len(said),
            metadata=list(metadata),
            next_stop_strings=[list(self.first_stop_strings)] * len(said),
            rewards=torch.tensor([text.count("7") + 0.1 * len(text) for text in said]),
            terminateds=torch.tensor(["7" in text for text in said]),
            errors=["a minus" if text.startswith("-") else None for text in said],
        )

    def global_post_process_and_metrics(self, batch: dict[str, Any]) -> Any:
        return batch, {"prompts": float(len(batch["prompts"]))}
