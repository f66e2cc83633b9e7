"""Completions that must be the answer, to the letter."""

from collections.abc import Callable, Sequence

from nemo_rl_core.config.single_turn import ExactMatch
from nemo_rl_core.environments.interfaces import Scorer, no_answer
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Prompt, Rollout

_WHITE_SPACE: dict[str, Callable[[str], str]] = {
    "strip": str.strip,
    "collapse": lambda text: " ".join(text.split()),
    "keep": lambda text: text,
}


class ExactScorer(Scorer):
    """1.0 when completion and answer are equal, else 0.0.

    Args:
        config: What of white space and capitals counts; by default all but white space around.
    """

    def __init__(self, config: ExactMatch | None = None) -> None:
        config = config or ExactMatch()
        self._trimmed = _WHITE_SPACE[config.white_space]
        self._ignore_case = config.ignore_case

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """One score a rollout; comparing text cannot fail, where the row has an answer."""
        return [
            float(self._normal(each.text) == self._normal(each.prompt.answer))
            if each.prompt.answer
            else no_answer("exact match", each)
            for each in rollouts
        ]

    def missing_columns(self, prompt: Prompt) -> Sequence[str]:
        """The answer, where the row has none."""
        return () if prompt.answer else ("answer",)

    def _normal(self, text: str) -> str:
        text = self._trimmed(text)
        return text.casefold() if self._ignore_case else text
