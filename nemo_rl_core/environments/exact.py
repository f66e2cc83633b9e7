"""Completions that must be the answer, to the letter."""

from collections.abc import Sequence

from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Rollout


class ExactScorer(Scorer):
    """1.0 when completion and answer are equal, white space around them aside; else 0.0."""

    def outcomes(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """One score a rollout; comparing text cannot fail."""
        return [float(each.text.strip() == each.prompt.answer.strip()) for each in rollouts]
