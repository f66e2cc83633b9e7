"""Answers checked by math-verify, as an environment of one turn."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_rl_core.config.single_turn import MathVerify
from nemo_rl_core.environments.interfaces import (
    EnvironmentReturn,
    raise_first,
    reads_rewards_alone,
)
from nemo_rl_core.environments.rewards.math import MathScorer
from nemo_rl_core.types import Completion, Prompt, Rollout

if TYPE_CHECKING:
    import torch


class MathEnvironment:
    """1.0 where math-verify finds the last answer equal to the reference, else 0.0 (`MathScorer`).

    An `EnvironmentInterface`; `step` takes what an engine has generated as well.

    Args:
        config: The limits of a comparison.

    Example:
        >>> environment = MathEnvironment()
        >>> generations = {"completions": ["It is 4.", "5"], "answer": ["4", "4"]}
        >>> environment.step(generations)                                    # doctest: +SKIP
        tensor([1., 0.])
    """

    def __init__(self, config: MathVerify | None = None) -> None:
        self._scorer = MathScorer(config)

    def step(
        self,
        message_log_batch: "Sequence[Sequence[Mapping[str, str]]] | Mapping[str, Any]",
        metadata: Sequence[Any] = (),
    ) -> "EnvironmentReturn | torch.Tensor":
        """Scores `B` conversations and ends them, or scores `B` completions.

        Args:
            message_log_batch: Conversations, whose last message is scored; or a batch with the
                columns `completions` and `answer` (or `answers`), as `generate` returns it for rows
                that have an answer.
            metadata: A mapping with `answer` for each conversation.

        Returns:
            An `EnvironmentReturn`; of a batch `[B]` rewards alone.

        Raises:
            RewardError: If an answer is no mathematics.
            MissingColumnError: If the batch lacks a column.
        """
        import torch

        if isinstance(message_log_batch, Mapping):
            batch = message_log_batch
            answers = batch["answers"] if "answers" in batch else batch["answer"]
            return torch.tensor(self._rewards(batch["completions"], answers))
        texts = [log[-1]["content"] for log in message_log_batch]
        rewards = self._rewards(texts, [each["answer"] for each in metadata])
        return EnvironmentReturn(
            observations=[],
            metadata=list(metadata),
            next_stop_strings=[None] * len(texts),
            rewards=torch.tensor(rewards),
            terminateds=torch.ones(len(texts), dtype=torch.bool),
            answers=None,
        )

    def _rewards(self, completions: Sequence[str], answers: Sequence[str]) -> list[float]:
        rollouts = [
            Rollout(
                Prompt(id=str(row), text="", token_ids=(), answer=str(answer), task="math"),
                Completion(token_ids=(), logprobs=(), truncated=False),
                text,
            )
            for row, (text, answer) in enumerate(zip(completions, answers, strict=True))
        ]
        return raise_first(self._scorer.score(rollouts))

    @reads_rewards_alone
    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """The batch as it was, and the mean of its `rewards [B]`."""
        return batch, {"accuracy": float(batch["rewards"].float().mean())}

    def close(self) -> None:
        """Ends the child processes."""
        self._scorer.close()
