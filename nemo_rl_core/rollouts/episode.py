"""One rollout of several turns while it goes on: the next request, and the turns so far.

It knows neither engine nor environment. So all episodes may go on in step, or each as soon as its
completion is there; the rollout is the same.
"""

import json
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.data.pretrained import decoded
from nemo_rl_core.data.replies import reply_token_ids
from nemo_rl_core.data.turns import as_turns
from nemo_rl_core.environments.interfaces import checked
from nemo_rl_core.environments.multi_turn.replies import Reply
from nemo_rl_core.errors import DataError, RewardError
from nemo_rl_core.rollouts.engine import (
    CompletionRequest,
    CompletionResult,
    RolloutPlace,
    request_seed,
)
from nemo_rl_core.types import Completion, Prompt, Rollout


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where an episode is cut.

    Attributes:
        max_turns: Of the policy.
        max_tokens: Behind the prompt, the policy's and the environment's together.
        max_new_tokens: Of one turn of the policy.
    """

    max_turns: int
    max_tokens: int
    max_new_tokens: int

    @classmethod
    def of(cls, settings: RolloutSettings) -> "Bounds":
        """What the settings of a run say."""
        return cls(
            max_turns=settings.rollouts.max_turns,
            max_tokens=settings.max_rollout_tokens,
            max_new_tokens=settings.generation.max_new_tokens,
        )


class MultiTurnEpisode:
    """A prompt, the policy's turns, and the environment's between them.

    A turn that is cut at `max_new_tokens` is a turn like any other: the environment gets the
    text, and goes on if it wants to (NeMo RL does the same). If it were the last, a game that takes
    something off for each bad turn would reward long turns, which end the game before the
    next penalty. What cuts an episode is a bound on all of it: the number of turns, which the
    policy cannot change, or the room for tokens, which it can use up. There the environment's
    `truncation_reward` is added to the last reward, so that using it up is no way out either.

    Args:
        prompt: What is asked first.
        place: Which rollout it is.
        bounds: Where it is cut.
        tokenizer: Decodes the policy's turns and encodes the environment's.
        stop_strings: Where the first turn must stop.

    Attributes:
        messages: All turns, beginning with the prompt.
        metadata: What the environment's next step gets.
        is_over: Whether there are no more requests.

    Example:
        >>> while not episode.is_over:                              # doctest: +SKIP
        ...     episode.add_completion(answer_to(episode.request()))
        ...     episode.add_observation(reply_to(episode.messages))
    """

    def __init__(
        self,
        prompt: Prompt,
        place: RolloutPlace,
        *,
        bounds: Bounds,
        tokenizer: Any,
        stop_strings: tuple[str, ...],
    ) -> None:
        self._prompt = prompt
        self._place = place
        self._bounds = bounds
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._generated: list[bool] = []
        self._weight_versions: list[int] = []
        self._texts: list[str] = []
        self._rewards: list[float] = []
        self._is_cut = False
        self._num_unread_tokens = 0
        self._error: str | None = None
        self.is_over = False
        self.messages: list[dict[str, str]] = [
            {"role": turn["role"], "content": turn["content"]}
            for turn in as_turns(prompt.text, role="user")
        ]
        self.metadata: Any = {
            **json.loads(prompt.metadata),
            "answer": prompt.answer,
            "task": prompt.task,
        }

    def request(self) -> CompletionRequest:
        """The next request to the engine."""
        place = self._place
        left = self._bounds.max_tokens - len(self._token_ids)
        return CompletionRequest(
            self._prompt.token_ids + tuple(self._token_ids),
            request_seed(place.seed, place.step, place.group, place.sample, len(self._texts)),
            self._stop_strings,
            min(left, self._bounds.max_new_tokens),
        )

    def add_completion(self, answer: CompletionResult) -> None:
        """Appends a turn of the policy: its tokens as they are."""
        self._append(answer.token_ids, answer.logprobs, generated=True)
        self._weight_versions += answer.weight_versions
        text = decoded(self._tokenizer, answer.token_ids)
        self._texts.append(text)
        self.messages.append({"role": "assistant", "content": text})
        self._is_cut = answer.truncated

    def add_observation(self, reply: Reply | RewardError) -> None:
        """Takes the reward of the policy's turn, and the environment's answer to it."""
        if isinstance(reply, RewardError):
            self._error, self.is_over = reply.in_one_line, True
            return
        self._rewards.append(reply.reward)
        if reply.terminated:
            self.is_over = True
            return
        message = {"role": reply.role, "content": reply.observation}
        self.messages.append(message)
        try:
            new = reply_token_ids(
                self._tokenizer,
                self._prompt.text,
                message,
                last_token=self._token_ids[-1] if self._token_ids else None,
            )
        except DataError as error:  # A tool's output may spell what cannot be written as text.
            self._error, self.is_over = error.in_one_line, True
            return
        has_turns = len(self._texts) < self._bounds.max_turns
        has_room = len(self._token_ids) + len(new) < self._bounds.max_tokens
        if not has_room:
            self._num_unread_tokens = len(new)
        if not (has_turns and has_room):
            self._is_cut = self.is_over = True
            if has_turns:
                self._rewards[-1] += reply.truncation_reward
            return
        self._append(new, [0.0] * len(new), generated=False)
        if self._weight_versions:
            self._weight_versions += [self._weight_versions[-1]] * len(new)
        self.metadata, self._stop_strings = reply.metadata, tuple(reply.stop_strings or ())

    def rollout(self) -> Rollout:
        """The record of the episode; its reward is the sum over the turns."""
        reward, error = self._outcome()
        return Rollout(
            self._prompt,
            Completion(
                tuple(self._token_ids),
                tuple(self._logprobs),
                self._is_cut,
                () if all(self._generated) else tuple(self._generated),
                tuple(self._weight_versions),
                self._num_unread_tokens,
            ),
            "\n".join(self._texts),
            reward=reward,
            group=self._place.group,
            sample=self._place.sample,
            turn_rewards=tuple(self._rewards),
            messages=tuple((said["role"], said["content"]) for said in self.messages),
            error=error,
        )

    def _outcome(self) -> tuple[float | None, str | None]:
        """The sum of all turns' rewards, or why there is none."""
        if self._error is not None:
            return None, self._error
        total = checked(
            sum(self._rewards),
            prompt=self._prompt.text,
            completion="\n".join(self._texts),
            source="the sum over all turns",
        )
        return (None, total.in_one_line) if isinstance(total, RewardError) else (total, None)

    def _append(
        self, token_ids: "tuple[int, ...] | list[int]", logprobs: Any, *, generated: bool
    ) -> None:
        self._token_ids += token_ids
        self._logprobs += logprobs
        self._generated += [generated] * len(token_ids)
