"""One rollout of several turns while it goes on: the next request, and the turns so far.

It knows neither engine nor environment. So all episodes may go on in step, or each as soon as its
completion is there; the rollout is the same.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.data.replies import reply_token_ids
from nemo_rl_core.data.turns import as_turns
from nemo_rl_core.distributed.held_rows import HeldRows, InProcess
from nemo_rl_core.environments.interfaces import checked
from nemo_rl_core.environments.multi_turn.replies import Reply
from nemo_rl_core.errors import DataError, RewardError
from nemo_rl_core.models.generation.where_made import HeldCompletions, without_tokens
from nemo_rl_core.rollouts.engine import (
    CompletionRequest,
    HeldTokens,
    RolloutPlace,
    request_seed,
)
from nemo_rl_core.rollouts.episode_tokens import TokensElsewhere, TokensHere
from nemo_rl_core.rollouts.held import HeldRollouts, HeldSource, Turns
from nemo_rl_core.types import Prompt, Rollout


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
        holds: Whether its tokens stay where engines make them.

    Attributes:
        tokens: All behind the prompt.
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
        holds: bool = False,
    ) -> None:
        self._prompt = prompt
        self._place = place
        self._bounds = bounds
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self.tokens = TokensElsewhere(prompt) if holds else TokensHere(prompt, tokenizer)
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
        left = self._bounds.max_tokens - len(self.tokens)
        token_ids, before = self.tokens.asked
        return CompletionRequest(
            token_ids,
            request_seed(place.seed, place.step, place.group, place.sample, len(self._texts)),
            self._stop_strings,
            min(left, self._bounds.max_new_tokens),
            before,
        )

    def add_completion(self, answer: Any) -> None:
        """Appends a turn of the policy.

        Args:
            answer: A `CompletionResult`, or a `HeldResult` if the tokens are held.
        """
        text = self.tokens.add_completion(answer)
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
                last_token=self.tokens.last,
            )
        except DataError as error:  # A tool's output may spell what cannot be written as text.
            self._error, self.is_over = error.in_one_line, True
            return
        has_turns = len(self._texts) < self._bounds.max_turns
        has_room = len(self.tokens) + len(new) < self._bounds.max_tokens
        if not has_room:
            self._num_unread_tokens = len(new)
        if not (has_turns and has_room):
            self._is_cut = self.is_over = True
            if has_turns:
                self._rewards[-1] += reply.truncation_reward
            return
        self.tokens.add_reply(new)
        self.metadata, self._stop_strings = reply.metadata, tuple(reply.stop_strings or ())

    def rollout(self) -> Rollout:
        """The record of the episode, with its tokens; its reward is the sum over the turns."""
        assert isinstance(self.tokens, TokensHere)
        reward, error = self._outcome()
        return Rollout(
            self._prompt,
            self.tokens.completion(
                truncated=self._is_cut, num_unread_tokens=self._num_unread_tokens
            ),
            self._text,
            reward=reward,
            group=self._place.group,
            sample=self._place.sample,
            turn_rewards=tuple(self._rewards),
            messages=self._said,
            error=error,
        )

    def played(self) -> "PlayedEpisode":
        """The same of an episode whose tokens are held."""
        assert isinstance(self.tokens, TokensElsewhere)
        whole = self.tokens.whole
        assert whole is not None  # it has had a turn
        turns = Turns(
            self._said, tuple(self._rewards), self.tokens.num_written, self._num_unread_tokens
        )
        return PlayedEpisode(whole, self._is_cut, self._text, turns, *self._outcome())

    @property
    def _text(self) -> str:
        return "\n".join(self._texts)

    @property
    def _said(self) -> tuple[tuple[str, str], ...]:
        return tuple((said["role"], said["content"]) for said in self.messages)

    def _outcome(self) -> tuple[float | None, str | None]:
        """The sum of all turns' rewards, or why there is none."""
        if self._error is not None:
            return None, self._error
        total = checked(
            sum(self._rewards),
            prompt=self._prompt.text,
            completion=self._text,
            source="the sum over all turns",
        )
        return (None, total.in_one_line) if isinstance(total, RewardError) else (total, None)


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """An episode that is over, whose tokens are held.

    Attributes:
        whole: Prompt and turns.
        truncated: It ran into a bound on tokens or turns.
        text: What the policy wrote.
        turns: What is said of them.
        reward: The sum over the turns.
        error: Why there is none.
    """

    whole: HeldTokens
    truncated: bool
    text: str
    turns: Turns
    reward: float | None
    error: str | None

    @classmethod
    def failed(cls, prompt: Prompt, error: str) -> "PlayedEpisode":
        """One that never came to its end."""
        nothing = without_tokens([prompt.token_ids])
        whole = HeldTokens(nothing.tokens.each()[0], len(prompt.token_ids))
        return cls(
            whole, truncated=True, text="", turns=Turns((), (), 0, 0), reward=None, error=error
        )


def played_rollouts(
    asked: Sequence[tuple[Prompt, RolloutPlace]], played: Sequence[PlayedEpisode]
) -> HeldRollouts:
    """Rollouts of several turns by reference to their tokens.

    Args:
        asked: `B` prompts and places, by group and sample.
        played: What has become of them.
    """
    prompts = {place.group: prompt for prompt, place in asked}
    group = np.array([place.group for _, place in asked], np.int64)
    start = np.array([len(prompt.token_ids) for prompt, _ in asked], np.int64)
    length = np.array([each.whole.length for each in played], np.int64)
    texts = InProcess({"texts": [each.text for each in played]})
    completions = HeldCompletions(
        length,
        length - start,
        np.array([each.truncated for each in played], np.bool_),
        HeldRows.of_each([each.whole.row for each in played]),
        HeldRows.of_blocks([texts], [len(played)]),
    )
    rewards = [np.nan if each.reward is None else each.reward for each in played]
    return HeldRollouts(
        HeldSource(completions),
        np.arange(len(played)),
        tuple(prompts.values()),
        np.unique(group, return_inverse=True)[1],
        group,
        np.array([place.sample for _, place in asked], np.int64),
        np.array(rewards, np.float64),
        {row: each.error for row, each in enumerate(played) if each.error is not None},
        turns=tuple(each.turns for each in played),
    )
