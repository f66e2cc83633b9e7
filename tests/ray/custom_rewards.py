"""A custom reward function and environment, like files that users put next to a recipe."""

from typing import Any

import torch

from nemo_rl_core.environments.interfaces import EnvironmentReturn


def length(prompt: str, response: str) -> float:
    if response == "boom":
        raise LookupError("no answer sheet")
    return len(response)


class Length:
    def __init__(self, boom: float) -> None:
        self.boom = boom

    def step(self, logs: list[Any], metadata: list[Any]) -> EnvironmentReturn:
        texts = [log[-1]["content"] for log in logs]
        rewards = [self.boom if text == "boom" else float(len(text)) for text in texts]
        ended = torch.ones(len(texts), dtype=torch.bool)
        return EnvironmentReturn([], metadata, [None] * len(texts), torch.tensor(rewards), ended)
