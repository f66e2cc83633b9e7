"""A multi-turn rollout: its turns so far, and how policy and environment take turns."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.data.renderer import Renderer
from nemo_rl_core.data.sampled_turns import TurnReader
from nemo_rl_core.data.turns import Turn, as_turns
from nemo_rl_core.distributed.batched_data_dict import InProcess, RemoteRows
from nemo_rl_core.environments.conversations import ConversationAnswers
from nemo_rl_core.environments.interfaces import checked
from nemo_rl_core.environments.multi_turn.replies import REPORTED, SHOWN_TOOLS, Reply
from nemo_rl_core.errors import DataError, RewardError
from nemo_rl_core.models.generation.remote_completions import RemoteCompletions, without_tokens
from nemo_rl_core.rollouts.engine import (
    Complete,
    CompletionRequest,
    CompletionResult,
    RemoteTokens,
    RolloutIndex,
    request_seed,
)
from nemo_rl_core.rollouts.remote_rollouts import (
    CompletionSource,
    RemoteRollouts,
    Turns,
    parts_of,
)
from nemo_rl_core.types import Prompt


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits at which an episode is cut.

    Attributes:
        max_turns: Maximum number of turns of the policy.
        max_tokens: Maximum number of tokens after the prompt, of policy and environment together.
        max_new_tokens: Maximum number of tokens in one turn of the policy.
        splits_history: Whether a turn begins another training sample where the chat template
            rewrites past turns.
    """

    max_turns: int
    max_tokens: int
    max_new_tokens: int
    splits_history: bool = False

    @classmethod
    def of(cls, settings: RolloutSettings) -> "Bounds":
        """Reads the limits from the settings of a run."""
        return cls(
            max_turns=settings.rollouts.max_turns,
            max_tokens=settings.max_rollout_tokens,
            max_new_tokens=settings.generation.max_new_tokens,
            splits_history=settings.rollouts.history == "split",
        )


class MultiTurnEpisode:
    """A prompt, the policy's turns, and the environment's between them.

    A turn that is cut at `max_new_tokens` is a turn like any other: the environment gets the text
    and decides whether to continue (NeMo RL does the same). If such a turn ended the episode, a
    game that penalizes each bad turn would reward long turns, which end the game before the next
    penalty. Only a limit on the episode cuts it: the number of turns, which the policy cannot
    change, or the number of tokens, which it can use up. In the second case the environment's
    `truncation_reward` is added to the last reward, so that using up the tokens does not pay.

    Attributes:
        metadata: Argument of the environment's next step.

    Args:
        answer: The environment's side of the conversation, for `play`.
    """

    def __init__(
        self,
        prompt: Prompt,
        index: RolloutIndex,
        *,
        bounds: Bounds,
        tokenizer: Any,
        stop_strings: tuple[str, ...],
        answer: ConversationAnswers | None = None,
    ) -> None:
        self._prompt = prompt
        self._answer = answer
        self._index = index
        self._bounds = bounds
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._tools = json.loads(prompt.tools)
        self._earlier: list[PlayedEpisode] = []  # training samples before the last one
        self._prompt_ids: tuple[int, ...] | None = None  # of a sample after the first
        self._sequence: RemoteTokens | None = None  # of the prompt up to the policy's last turn
        self._reply: tuple[int, ...] = ()  # the environment's last turn
        self._last_token: int | None = None
        self._num_written = 0
        self._texts: list[str] = []
        self._rewards: list[float] = []
        self._is_cut = False
        self._num_unread_tokens = 0
        self._error: str | None = None
        self.is_over = False
        self.messages: list[Turn] = as_turns(prompt.text, role="user")
        self.metadata: Any = {
            **json.loads(prompt.metadata),
            "answer": prompt.answer,
            "task": prompt.task,
            **({SHOWN_TOOLS: self._tools} if self._tools else {}),
        }

    async def play(self, complete: Complete) -> "list[PlayedEpisode]":
        """Plays all turns; see `rollouts.engine.Episode`."""
        assert self._answer is not None
        try:
            while not self.is_over:
                self.add_completion(await complete(self.request()))
                self.add_observation(await self._answer(list(self.messages), self.metadata))
        finally:
            await self._answer.end(self.metadata)
        last = self.played()
        return [
            *(replace(each, reward=last.reward, error=last.error) for each in self._earlier),
            last,
        ]

    def request(self) -> CompletionRequest:
        """Returns the next request to the engine."""
        index = self._index
        num_left = self._bounds.max_tokens - self._num_tokens
        return CompletionRequest(
            self._start if self._sequence is None else self._reply,
            request_seed(index.seed, index.step, index.group, index.sample, len(self._texts)),
            self._stop_strings,
            min(num_left, self._bounds.max_new_tokens),
            self._sequence,
        )

    @property
    def _start(self) -> tuple[int, ...]:
        return self._prompt.token_ids if self._prompt_ids is None else self._prompt_ids

    @property
    def _num_tokens(self) -> int:
        """Number of tokens after the prompt."""
        end = len(self._start) if self._sequence is None else self._sequence.length
        return end - len(self._prompt.token_ids) + len(self._reply)

    def add_completion(self, result: CompletionResult) -> None:
        """Appends a turn of the policy."""
        self._sequence, self._reply = result.sequence, ()
        self._last_token = result.last_token
        self._num_written += result.num_tokens
        self._texts.append(result.text)
        self.messages.append(self._read(result))
        self._is_cut = result.truncated

    def _read(self, result: CompletionResult) -> Turn:
        """Returns a turn of the policy, with calls only if the prompt has tools."""
        if not self._tools:
            return {"role": "assistant", "content": result.text}
        columns = RemoteRows.of_each([result.sequence.row]).of_column("input_ids").fetched()
        ids = columns["input_ids"][0, : result.sequence.length].tolist()
        sampled = TurnReader(self._tokenizer).read(
            ids[len(ids) - result.num_tokens :], tools=self._tools
        )
        return {**sampled.turn, **({"faults": list(sampled.faults)} if sampled.faults else {})}

    def add_observation(self, reply: Reply | RewardError) -> None:
        """Appends the reward of the policy's turn and the environment's answer."""
        if isinstance(reply, RewardError):
            self._error, self.is_over = reply.in_one_line, True
            return
        self._rewards.append(reply.reward)
        if reply.terminated:
            self.is_over = True
            return
        self.metadata, self._stop_strings = reply.metadata, tuple(reply.stop_strings or ())
        past = len(self.messages)
        self.messages += reply.messages
        turns = [_without(turn, REPORTED) for turn in self.messages]
        row = f"the {turns[past]['role']} turn that begins with {turns[past]['content'][:80]!r}"
        renderer, begins = Renderer(self._tokenizer), self._bounds.splits_history
        try:
            begins = begins and renderer.rewrites_history
            if begins:
                new = renderer.opening(turns, tools=self._tools, row=row)
                num_tokens = len(new) - len(self._prompt.token_ids)
            else:
                new = renderer.continuation(
                    turns[:past],
                    turns[past:],
                    tools=self._tools,
                    last_token=self._last_token,
                    row=row,
                )
                num_tokens = self._num_tokens + len(new)
        except DataError as error:  # A tool's output may spell a control token.
            self._error, self.is_over = error.in_one_line, True
            return
        has_turns = len(self._texts) < self._bounds.max_turns
        has_room = num_tokens < self._bounds.max_tokens
        if not has_room:
            self._num_unread_tokens = max(num_tokens - self._num_tokens, 0)
        if not (has_turns and has_room):
            self._is_cut = self.is_over = True
            if has_turns:
                self._rewards[-1] += reply.truncation_reward
            return
        if begins:
            self._earlier.append(replace(self.played(), truncated=False))
            self._prompt_ids, self._sequence, self._num_written = tuple(new), None, 0
        else:
            self._reply = tuple(new)

    def played(self) -> "PlayedEpisode":
        """Returns the last training sample of the episode, with its outcome."""
        assert self._sequence is not None  # it has had a turn
        first = sum(len(each.turns.rewards) for each in self._earlier)
        rewards, text = tuple(self._rewards[first:]), "\n".join(self._texts[first:])
        turns = Turns(tuple(self.messages), rewards, self._num_written, self._num_unread_tokens)
        outcome = self._outcome()
        return PlayedEpisode(
            self._sequence, self._is_cut, text, turns, *outcome, prompt_ids=self._prompt_ids
        )

    def _outcome(self) -> tuple[float | None, str | None]:
        if self._error is not None:
            return None, self._error
        total = checked(
            sum(self._rewards),
            prompt=self._prompt.text,
            completion="\n".join(self._texts),
            source="the sum over all turns",
        )
        return (None, total.in_one_line) if isinstance(total, RewardError) else (total, None)


def _without(turn: Turn, keys: Collection[str]) -> Turn:
    return {key: value for key, value in turn.items() if key not in keys}


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """A finished episode.

    Attributes:
        sequence: All tokens of the prompt and the turns.
        prompt_ids: Tokens before the sample's first turn; None for those of the prompt.
    """

    sequence: RemoteTokens
    truncated: bool
    text: str
    turns: Turns
    reward: float | None
    error: str | None
    prompt_ids: tuple[int, ...] | None = None

    @classmethod
    def failed(cls, prompt: Prompt, error: str) -> "PlayedEpisode":
        """Returns an episode that never finished."""
        nothing = without_tokens([prompt.token_ids])
        sequence = RemoteTokens(nothing.tokens.each()[0], len(prompt.token_ids))
        return cls(
            sequence, truncated=True, text="", turns=Turns((), (), 0, 0), reward=None, error=error
        )


def played_rollouts(
    requested: Sequence[tuple[Prompt, RolloutIndex]], episodes: Sequence[Sequence[PlayedEpisode]]
) -> RemoteRollouts:
    """Returns rollouts of several turns, one per training sample of each episode."""
    pairs = list(zip(requested, episodes, strict=True))
    indices = [index for (_, index), samples in pairs for _ in samples]
    played = [each for samples in episodes for each in samples]
    prompts = [
        prompt if each.prompt_ids is None else replace(prompt, token_ids=each.prompt_ids)
        for (prompt, _), samples in pairs
        for each in samples
    ]
    unique = {id(each): each for each in prompts}
    numbers = dict(zip(unique, range(len(unique)), strict=True))
    start = np.array([len(each.token_ids) for each in prompts], np.int64)
    length = np.array([each.sequence.length for each in played], np.int64)
    texts = InProcess({"texts": [each.text for each in played]})
    completions = RemoteCompletions(
        length,
        length - start,
        np.array([each.truncated for each in played], np.bool_),
        RemoteRows.of_each([each.sequence.row for each in played]),
        RemoteRows.of_blocks([texts], [len(played)]),
    )
    rewards = [np.nan if each.reward is None else each.reward for each in played]
    return RemoteRollouts(
        CompletionSource(completions),
        np.arange(len(played)),
        tuple(unique.values()),
        np.array([numbers[id(each)] for each in prompts], np.int64),
        np.array([index.group for index in indices], np.int64),
        np.array([index.sample for index in indices], np.int64),
        np.array(rewards, np.float64),
        {row: each.error for row, each in enumerate(played) if each.error is not None},
        turns=tuple(each.turns for each in played),
        part=parts_of([number for samples in episodes for number in range(len(samples))]),
    )
