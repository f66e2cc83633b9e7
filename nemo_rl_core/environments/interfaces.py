"""What an environment must offer."""

from collections.abc import Sequence
from typing import Protocol

from nemo_rl_core.types import Rollout


class Scorer(Protocol):
    """Gives completions a score each."""

    def score(self, rollouts: Sequence[Rollout]) -> list[float]:
        """One finite score a rollout, in order.

        Raises:
            RewardError: If a completion cannot be scored; an error is not a score of 0.
        """
        ...

    def close(self) -> None:
        """Ends what the scorer has started."""
        ...
