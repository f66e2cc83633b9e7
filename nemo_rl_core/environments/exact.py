"""Completions that must be the answer, to the letter."""

from collections.abc import Sequence

from nemo_rl_core.types import Rollout


class ExactScorer:
    """1.0 when the completion, stripped of white space around it, is the answer; else 0.0."""

    def score(self, rollouts: Sequence[Rollout]) -> list[float]:
        """One score a rollout."""
        return [
            float(rollout.text.strip() == rollout.prompt.answer.strip()) for rollout in rollouts
        ]

    def close(self) -> None:
        """Nothing to end."""
