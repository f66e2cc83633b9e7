"""Scores completions that must equal the answer exactly."""

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
    """Scores 1.0 if completion and answer are equal, else 0.0."""

    def __init__(self, config: ExactMatch | None = None) -> None:
        config = config or ExactMatch()
        self._trim = _WHITE_SPACE[config.white_space]
        self._ignore_case = config.ignore_case

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """Returns one score per rollout; a row without an answer is an error."""
        return [
            float(self._normal(each.text) == self._normal(each.prompt.answer))
            if each.prompt.answer
            else no_answer("exact match", each)
            for each in rollouts
        ]

    def missing_columns(self, prompt: Prompt) -> Sequence[str]:
        """Returns `answer` if the row has none."""
        return () if prompt.answer else ("answer",)

    def _normal(self, text: str) -> str:
        text = self._trim(text)
        return text.casefold() if self._ignore_case else text
