"""User code: an environment of two turns with a tool, and a custom reward."""

from collections.abc import Sequence
from typing import Any

import torch

from nemo_rl_core.environments.interfaces import EnvironmentReturn


class SumTool:
    """Answers the first turn, a call, with the sum of its digits; scores the second.

    Args:
        unit: Text after each sum.
        wrong: Reward of a wrong answer.
    """

    def __init__(self, unit: str, wrong: float = 0.0) -> None:
        self.unit, self.wrong = unit, wrong

    def step(
        self, message_log_batch: Sequence[Sequence[Any]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        turns = [log[-1]["content"] for log in message_log_batch]
        called = [about.get("called", False) for about in metadata]
        sums = [sum(int(each) for each in turn if each.isdigit()) for turn in turns]
        earned = [
            1.0 if turn.strip() == about["answer"] else self.wrong
            for turn, about in zip(turns, metadata, strict=True)
        ]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"{n}{self.unit}"} for n in sums],
            metadata=[{**about, "called": True} for about in metadata],
            next_stop_strings=[None] * len(turns),
            rewards=torch.tensor([e * done for e, done in zip(earned, called, strict=True)]),
            terminateds=torch.tensor(called),
        )

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        return batch, {"right_fraction": float((batch["rewards"] == 1).float().mean())}


def closeness(completion: str, answer: str, scale: float = 1.0) -> float:
    """Returns 1 for the row's answer, and less the further a number is from it."""
    digits = "".join(each for each in completion if each.isdigit())[:6]
    return 1.0 / (1.0 + scale * abs(int(answer) - int(digits))) if digits else 0.0


def without_the_lock(completion: str) -> float:
    """Returns 1 if the `tabulate` of this process differs from the lock's."""
    import tabulate

    return float(not hasattr(tabulate, "tabulate"))
