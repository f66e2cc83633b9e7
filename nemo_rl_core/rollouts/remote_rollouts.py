"""Rollouts as columns: local rewards and groups, and tokens that may be in the object store.

They are also a sequence of `Rollout`, whose texts and tokens are fetched when they are read.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from typing import Any, overload

import numpy as np

from nemo_rl_core.distributed.batched_data_dict import RemoteRows
from nemo_rl_core.errors import RewardError
from nemo_rl_core.models.generation.remote_completions import RemoteCompletions
from nemo_rl_core.types import Completion, Prompt, Rollout

Indices = np.ndarray[Any, np.dtype[np.int64]]
_OF_TOKENS = ("token_ids", "logprobs", "generated", "weight_versions")
"""Fields of a completion with one value per token."""


def parts_of(numbers: Sequence[int]) -> Indices | None:
    """Returns the column `RemoteRollouts.part`."""
    return np.array(numbers, np.int64) if any(numbers) else None


@dataclass(eq=False)
class CompletionSource:
    """Completions of an engine, with a cache of the texts and tokens that were fetched."""

    completions: RemoteCompletions

    def __reduce__(self) -> Any:
        return CompletionSource, (self.completions,)  # without the cache

    @cached_property
    def texts(self) -> list[str]:
        """`N` texts."""
        texts: list[str] = self.completions.texts.fetched()["texts"]
        return texts

    @cached_property
    def tokens(self) -> dict[str, Any]:
        """Arrays `input_ids [N, T]` and `generation_logprobs [N, T-1]`."""
        columns = self.completions.tokens.fetched()
        return {name: values.numpy() for name, values in columns.items()}

    def read(self, index: int, turns: "Turns | None") -> Completion:
        """Returns a completion of this process, with several turns if an environment answers."""
        end = int(self.completions.input_lengths[index])
        start = end - int(self.completions.completion_lengths[index])
        rows = {name: column[index] for name, column in self.tokens.items()}
        token_ids = tuple(rows.pop("input_ids")[start:end].tolist())
        # The first token of a sequence has no prediction.
        values = {name: tuple(row[start - 1 : end - 1].tolist()) for name, row in rows.items()}
        mask = values["token_mask"] if turns else ()
        generated = () if all(mask) else mask
        versions = values.get("weight_versions", ())
        if generated and versions:
            # The environment's turns have the version of the policy's turn before.
            pairs = zip(versions, generated, strict=True)
            last = accumulate(pairs, lambda before, new: new if new[1] else (before[0], False))
            versions = tuple(version for version, _ in last)
        return Completion(
            token_ids,
            values["generation_logprobs"],
            bool(self.completions.truncated[index]),
            generated,
            versions,
            0 if turns is None else turns.num_unread_tokens,
        )

    def prompt_token_ids(self, index: int) -> tuple[int, ...]:
        """Returns the tokens before a completion."""
        lengths = self.completions.input_lengths[index] - self.completions.completion_lengths[index]
        return tuple(self.tokens["input_ids"][index, : int(lengths)].tolist())

    @classmethod
    def joined(cls, parts: "Sequence[CompletionSource]") -> "CompletionSource":
        """Concatenates the completions."""
        all_of = [part.completions for part in parts]
        return cls(
            RemoteCompletions(
                np.concatenate([each.input_lengths for each in all_of]),
                np.concatenate([each.completion_lengths for each in all_of]),
                np.concatenate([each.truncated for each in all_of]),
                RemoteRows.concatenated([each.tokens for each in all_of]),
                RemoteRows.concatenated([each.texts for each in all_of]),
            )
        )


@dataclass(frozen=True, slots=True)
class Turns:
    """Local values of a rollout of several turns.

    Attributes:
        num_written: Number of tokens that the policy generated.
        num_unread_tokens: Tokens of the environment that had no room in the rollout.
    """

    messages: tuple[dict[str, Any], ...]
    rewards: tuple[float, ...]
    num_written: int
    num_unread_tokens: int

    @classmethod
    def of(cls, rollout: Rollout) -> "Turns":
        """Returns the turns of a rollout of this process."""
        completion = rollout.completion
        num_written = sum(completion.token_mask)
        return cls(
            rollout.messages, rollout.turn_rewards, num_written, completion.num_unread_tokens
        )


class RemoteCompletion(Completion):
    """A completion of a `CompletionSource`, whose tokens are fetched when they are first read."""

    __slots__ = ("_index", "_source", "_turns")
    _source: CompletionSource
    _index: int
    _turns: Turns | None

    def __init__(self, source: CompletionSource, index: int, turns: Turns | None = None) -> None:
        set_attribute = object.__setattr__  # the dataclass is frozen
        set_attribute(self, "_source", source)
        set_attribute(self, "_index", index)
        set_attribute(self, "_turns", turns)
        set_attribute(self, "truncated", bool(source.completions.truncated[index]))
        set_attribute(self, "num_unread_tokens", 0 if turns is None else turns.num_unread_tokens)

    def __getattr__(self, name: str) -> Any:
        """Reads the tokens, and all values of them, when one is needed first."""
        if name not in _OF_TOKENS:
            raise AttributeError(name)
        local = self._source.read(self._index, self._turns)
        for each in _OF_TOKENS:
            object.__setattr__(self, each, getattr(local, each))
        return getattr(local, name)

    def read(self) -> Completion:
        """Returns a local copy."""
        return Completion(*(getattr(self, each.name) for each in fields(Completion)))

    def __eq__(self, other: object) -> bool:
        other = other.read() if isinstance(other, RemoteCompletion) else other
        return self.read() == other

    def __hash__(self) -> int:
        return hash(self.read())

    def __reduce__(self) -> Any:
        return Completion, tuple(getattr(self, each.name) for each in fields(Completion))


@dataclass(frozen=True, eq=False)
class SentPrompts(Sequence[Prompt]):
    """Prompts that are sent to another process, which reads their tokens from the blocks.

    Attributes:
        completion: `[P]` index of a completion of each prompt.
        texts: `P` values of every field except the tokens, by the name of the field.
    """

    source: CompletionSource
    completion: Indices
    texts: dict[str, list[str]]

    def __len__(self) -> int:
        return len(self.completion)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        return self._prompts[index]

    @cached_property
    def _prompts(self) -> list[Prompt]:
        return [
            Prompt(
                token_ids=self.source.prompt_token_ids(completion),
                **{name: values[number] for name, values in self.texts.items()},
            )
            for number, completion in enumerate(self.completion.tolist())
        ]


_TEXTS_OF_PROMPTS = tuple(each.name for each in fields(Prompt) if each.name != "token_ids")


@dataclass(frozen=True, eq=False)
class RemoteRollouts(Sequence[Rollout]):
    """`B` rollouts as columns.

    Attributes:
        source: Source of the completions; it may have more of them.
        completion: `[B]` index of each completion in the source.
        rewards: `[B]`, NaN where a rollout has no reward.
        components: `[B]` tuples if the environment returns several rewards.
        turns: `[B]` if an environment answers.
        part: `[B]` index of the training sample in its episode; None if no episode has several.
            Rows with equal `group` and `sample` are one episode, in the order of its samples.
    """

    source: CompletionSource
    completion: Indices
    prompts: Sequence[Prompt]
    prompt: Indices
    group: Indices
    sample: Indices
    rewards: "np.ndarray[Any, np.dtype[np.float64]] | None" = None
    errors: dict[int, str] | None = None
    components: tuple[tuple[float, ...], ...] = ()
    turns: tuple[Turns, ...] = ()
    part: Indices | None = None

    def __reduce__(self) -> Any:
        completion = np.full(len(self.prompts), -1)
        completion[self.prompt[::-1]] = self.completion[::-1]  # each prompt's first rollout wins
        used_prompts = np.flatnonzero(completion >= 0).tolist()
        prompts = [self.prompts[number] for number in used_prompts]
        texts = {name: list(map(attrgetter(name), prompts)) for name in _TEXTS_OF_PROMPTS}
        columns = {each.name: getattr(self, each.name) for each in fields(self)} | {
            "prompts": SentPrompts(self.source, completion[used_prompts], texts),
            "prompt": (np.cumsum(completion >= 0) - 1)[self.prompt],
        }
        return RemoteRollouts, tuple(columns.values())

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> "RemoteRollouts":
        """Returns rollouts of this process as columns, without their advantages.

        Raises:
            ValueError: If a completion does not have one logprob per token.
        """
        if isinstance(rollouts, RemoteRollouts):
            return rollouts
        prompts = {id(each.prompt): each.prompt for each in rollouts}
        indices = dict(zip(prompts, range(len(prompts)), strict=True))
        errors = {row: each.error for row, each in enumerate(rollouts) if each.error is not None}
        is_scored = any(each.reward is not None or each.error is not None for each in rollouts)
        rewards = [np.nan if each.reward is None else each.reward for each in rollouts]
        has_components = any(each.components for each in rollouts)
        has_turns = any(
            each.turn_rewards
            or each.messages
            or each.completion.generated
            or each.completion.num_unread_tokens
            for each in rollouts
        )
        completions = RemoteCompletions.of(
            [each.prompt.token_ids for each in rollouts],
            [each.completion for each in rollouts],
            [each.text for each in rollouts],
            streams=any(each.completion.weight_versions for each in rollouts),
        )
        return cls(
            CompletionSource(completions),
            np.arange(len(rollouts)),
            tuple(prompts.values()),
            np.array([indices[id(each.prompt)] for each in rollouts], np.int64),
            np.array([each.group for each in rollouts], np.int64),
            np.array([each.sample for each in rollouts], np.int64),
            np.array(rewards, np.float64) if is_scored else None,
            errors,
            tuple(each.components for each in rollouts) if has_components else (),
            tuple(map(Turns.of, rollouts)) if has_turns else (),
            parts_of([each.part for each in rollouts]),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.completion)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> "RemoteRollouts": ...
    def __getitem__(self, index: int | slice) -> "Rollout | RemoteRollouts":
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        return next(iter(self.select(np.array([range(len(self))[index]]))))

    def __iter__(self) -> Iterator[Rollout]:
        columns = (
            each.tolist() for each in (self.completion, self.prompt, self.group, self.sample)
        )
        errors, texts = self.errors or {}, self.source.texts
        parts = [0] * len(self) if self.part is None else self.part.tolist()
        for row, (completion, prompt, group, sample) in enumerate(zip(*columns, strict=True)):
            reward = np.nan if self.rewards is None else float(self.rewards[row])
            turns = self.turns[row] if self.turns else None
            yield Rollout(
                self.prompts[prompt],
                RemoteCompletion(self.source, completion, turns),
                texts[completion],
                reward=None if np.isnan(reward) or row in errors else reward,
                components=self.components[row] if self.components else (),
                group=group,
                sample=sample,
                turn_rewards=() if turns is None else turns.rewards,
                messages=() if turns is None else turns.messages,
                error=errors.get(row),
                part=parts[row],
            )

    def select(self, rows: Indices) -> "RemoteRollouts":
        """Returns the rollouts at these rows; nothing is fetched."""
        errors, components = self.errors, self.components
        if errors:
            pairs = ((new, errors.get(old)) for new, old in enumerate(rows.tolist()))
            errors = {new: error for new, error in pairs if error is not None}
        if components:
            components = tuple(components[row] for row in rows.tolist())
        return replace(
            self,
            completion=self.completion[rows],
            prompt=self.prompt[rows],
            group=self.group[rows],
            sample=self.sample[rows],
            rewards=None if self.rewards is None else self.rewards[rows],
            errors=errors,
            components=components,
            turns=tuple(self.turns[row] for row in rows.tolist()) if self.turns else (),
            part=None if self.part is None else self.part[rows],
        )

    @cached_property
    def episode(self) -> Indices:
        """`[B]` number of each row's episode."""
        if self.part is None:
            return np.arange(len(self))
        pairs = np.stack([self.group, self.sample])
        return np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1)

    def episodes(self) -> "RemoteRollouts":
        """Returns one row per episode, in the order of `episode`: its last training sample."""
        if self.part is None:
            return self
        _, from_end = np.unique(self.episode[::-1], return_index=True)
        return replace(self.select(len(self) - 1 - from_end), part=None)

    @property
    def is_valid(self) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """`[B]` mask of the rollouts without an error."""
        mask = np.ones(len(self), np.bool_)
        mask[list(self.errors or ())] = False
        return mask

    @property
    def num_tokens(self) -> int:
        """Total number of tokens of prompts and completions."""
        return int(self.source.completions.input_lengths[self.completion].sum())

    def valid(self) -> "RemoteRollouts":
        """Returns the rollouts without an error."""
        return self.select(np.flatnonzero(self.is_valid)) if self.errors else self

    def with_scored(self, scored: "RemoteRollouts") -> "RemoteRollouts":
        """Returns all rollouts with the outcomes of the valid ones."""
        if not self.errors:
            return scored
        assert scored.rewards is not None
        rows = np.flatnonzero(self.is_valid)
        rewards = np.full(len(self), np.nan)
        rewards[rows] = scored.rewards
        errors = self.errors | {int(rows[row]): each for row, each in (scored.errors or {}).items()}
        components: list[tuple[float, ...]] = [()] * len(self)
        for row, each in zip(rows.tolist(), scored.components, strict=False):
            components[row] = each
        rewarded = self.with_rewards(rewards, errors)
        return replace(rewarded, components=tuple(components) if scored.components else ())

    def with_outcomes(self, outcomes: Sequence[float | RewardError]) -> "RemoteRollouts":
        """Sets a reward or an error for each rollout."""
        numbers: Sequence[Any] = outcomes
        errors: dict[int, str] = {}
        if any(issubclass(kind, RewardError) for kind in set(map(type, outcomes))):
            errors = {
                row: each.in_one_line
                for row, each in enumerate(outcomes)
                if isinstance(each, RewardError)
            }
            numbers = [np.nan if row in errors else each for row, each in enumerate(outcomes)]
        return self.with_rewards(np.array(numbers, np.float64), errors)

    def with_scores(self, scored: Iterable[Rollout]) -> "RemoteRollouts":
        """Sets rewards, components and errors from rollouts in the same order."""
        rollouts = list(scored)
        errors = {row: each.error for row, each in enumerate(rollouts) if each.error is not None}
        rewards = [np.nan if each.reward is None else each.reward for each in rollouts]
        components = tuple(each.components for each in rollouts)
        rewarded = self.with_rewards(np.array(rewards, np.float64), errors)
        return replace(rewarded, components=components if any(components) else ())

    def with_rewards(
        self,
        rewards: "np.ndarray[Any, np.dtype[np.float64]]",
        errors: dict[int, str] | None = None,
    ) -> "RemoteRollouts":
        """Sets `[B]` rewards and, if given, errors."""
        if len(rewards) != len(self):
            raise ValueError(f"{len(rewards)} rewards for {len(self)} rollouts")
        return replace(self, rewards=rewards, errors=self.errors if errors is None else errors)

    def prompt_of(self, row: int) -> Prompt:
        """Returns the prompt of a rollout."""
        return self.prompts[int(self.prompt[row])]

    @classmethod
    def joined(cls, parts: "Sequence[RemoteRollouts]") -> "RemoteRollouts":
        """Concatenates rollouts."""
        if len(parts) == 1:
            return parts[0]
        lists: dict[str, list[Any]] = {"completion": [], "prompt": [], "errors": []}
        completions = prompts = rows = 0
        for part in parts:
            lists["completion"].append(part.completion + completions)
            lists["prompt"].append(part.prompt + prompts)
            lists["errors"] += [(row + rows, each) for row, each in (part.errors or {}).items()]
            completions += len(part.source.completions.input_lengths)
            prompts, rows = prompts + len(part.prompts), rows + len(part)
        sources = CompletionSource.joined([part.source for part in parts])
        is_scored = any(part.rewards is not None for part in parts)
        rewards = [
            np.full(len(part), np.nan) if part.rewards is None else part.rewards for part in parts
        ]
        components = tuple(each for part in parts for each in part.components or [()] * len(part))
        numbers = [np.zeros_like(each.sample) if each.part is None else each.part for each in parts]
        return cls(
            sources,
            np.concatenate(lists["completion"]),
            tuple(prompt for part in parts for prompt in part.prompts),
            np.concatenate(lists["prompt"]),
            np.concatenate([part.group for part in parts]),
            np.concatenate([part.sample for part in parts]),
            np.concatenate(rewards) if is_scored else None,
            dict(lists["errors"]),
            components if any(components) else (),
            tuple(each for part in parts for each in part.turns),
            None if all(each.part is None for each in parts) else np.concatenate(numbers),
        )
