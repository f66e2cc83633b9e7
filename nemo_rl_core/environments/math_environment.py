"""Single-turn environment that checks answers with math-verify."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_rl_core.config.single_turn import MathVerify
from nemo_rl_core.environments.interfaces import (
    EnvironmentReturn,
    raise_first,
    reads_only_rewards,
)
from nemo_rl_core.environments.rewards.math import MathScorer
from nemo_rl_core.types import Completion, Prompt, Rollout

if TYPE_CHECKING:
    import torch


class MathEnvironment:
    """Rewards 1.0 if math-verify finds the last answer equal to the reference, else 0.0.

    `step` also accepts the output of an engine.

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
            metadata: Mappings with the key `answer`, one per conversation.

        Returns:
            An `EnvironmentReturn`, or for a batch only its `[B]` rewards.

        Raises:
            RewardError: If a reference answer cannot be read as mathematics.
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

    @reads_only_rewards
    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Returns the unchanged batch and the mean of its `rewards [B]`."""
        return batch, {"accuracy": float(batch["rewards"].float().mean())}

    def close(self) -> None:
        """Ends the child processes."""
        self._scorer.close()
