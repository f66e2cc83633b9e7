"""Single-turn rollouts: a prompt, a completion, and no answer to it."""

from collections.abc import Sequence
from typing import Any

from nemo_rl_core.rollouts.engine import RolloutEngine, RolloutPlace, request_seed
from nemo_rl_core.rollouts.requests import CompletionRequest, CompletionResult
from nemo_rl_core.types import Completion, Prompt, Rollout


class SingleTurnEpisode:
    """A prompt and its completion.

    Args:
        prompt: What is asked.
        place: Which rollout it is.
        tokenizer: Decodes the completion; token ids are never made from text again.
    """

    def __init__(self, prompt: Prompt, place: RolloutPlace, *, tokenizer: Any) -> None:
        self._prompt = prompt
        self._place = place
        self._tokenizer = tokenizer
        self._answer: CompletionResult | None = None

    @property
    def is_over(self) -> bool:
        """Whether the completion is there."""
        return self._answer is not None

    def request(self) -> CompletionRequest:
        """The request to the engine."""
        place = self._place
        seed = request_seed(place.seed, place.step, place.group, place.sample)
        return CompletionRequest(self._prompt.token_ids, seed)

    def add_completion(self, answer: CompletionResult) -> None:
        """Takes the completion."""
        self._answer = answer

    def rollout(self) -> Rollout:
        """The record of the episode, unscored."""
        answer = self._answer
        assert answer is not None
        return Rollout(
            self._prompt,
            Completion(
                answer.token_ids,
                answer.logprobs,
                answer.truncated,
                weight_versions=answer.weight_versions,
            ),
            self._tokenizer.decode(list(answer.token_ids), skip_special_tokens=True),
            group=self._place.group,
            sample=self._place.sample,
        )


class SingleTurnRollouts(RolloutEngine[SingleTurnEpisode]):
    """Samples completions, which somebody else scores."""

    def episode(self, prompt: Prompt, place: RolloutPlace) -> SingleTurnEpisode:
        """A rollout that has not begun."""
        return SingleTurnEpisode(prompt, place, tokenizer=self._tokenizer)

    def _step_environment(self, episodes: Sequence[SingleTurnEpisode]) -> None:
        """There is none: each episode is over."""
