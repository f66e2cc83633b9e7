"""Rollouts whose tokens, logprobs and texts lie where an engine has made them.

What an algorithm computes with on the controller is here: lengths, rewards, groups. As a sequence
of `Rollout`s they can be read one by one; texts and tokens are fetched when they are read.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from typing import Any, overload

import numpy as np
import torch

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.held_rows import HeldRows
from nemo_rl_core.errors import RewardError
from nemo_rl_core.models.generation.where_made import HeldCompletions
from nemo_rl_core.types import Completion, Prompt, Rollout

Indices = np.ndarray[Any, np.dtype[np.int64]]


class HeldSource:
    """Completions of an engine, and what of them somebody has asked to see here.

    Args:
        completions: `N` of them.
    """

    def __init__(self, completions: HeldCompletions) -> None:
        self.completions = completions

    def __reduce__(self) -> Any:
        return HeldSource, (self.completions,)  # without what was fetched

    @cached_property
    def texts(self) -> list[str]:
        """`N` texts."""
        texts: list[str] = self.completions.texts.fetched()["texts"]
        return texts

    @cached_property
    def tokens(self) -> dict[str, Any]:
        """Arrays `input_ids [N, T]` and `generation_logprobs [N, T-1]`."""
        found = self.completions.tokens.fetched()
        return {name: values.numpy() for name, values in found.items()}

    def of_tokens(self, place: int, name: str) -> tuple[Any, ...]:
        """The values of one completion's tokens."""
        end = int(self.completions.input_lengths[place])
        start = end - int(self.completions.completion_lengths[place])
        first = 0 if name == "input_ids" else 1  # of the first token nothing is predicted
        return tuple(self.tokens[name][place, start - first : end - first].tolist())

    def of_prompt(self, place: int) -> tuple[int, ...]:
        """The tokens before a completion."""
        lengths = self.completions.input_lengths[place] - self.completions.completion_lengths[place]
        return tuple(self.tokens["input_ids"][place, : int(lengths)].tolist())

    @classmethod
    def joined(cls, parts: "Sequence[HeldSource]") -> "HeldSource":
        """The completions of one after the other."""
        all_of = [part.completions for part in parts]
        return cls(
            HeldCompletions(
                np.concatenate([each.input_lengths for each in all_of]),
                np.concatenate([each.completion_lengths for each in all_of]),
                np.concatenate([each.truncated for each in all_of]),
                HeldRows.concatenated([each.tokens for each in all_of]),
                HeldRows.concatenated([each.texts for each in all_of]),
            )
        )


@dataclass(frozen=True, slots=True)
class Turns:
    """What is said of a rollout of several turns, beside its tokens.

    Attributes:
        messages: As of a `Rollout`.
        rewards: Of each turn of the policy.
        num_written: Tokens of the policy.
        num_unread_tokens: As of a `Completion`.
    """

    messages: tuple[tuple[str, str], ...]
    rewards: tuple[float, ...]
    num_written: int
    num_unread_tokens: int


class HeldCompletion(Completion):
    """A completion of a `HeldSource`, whose tokens are fetched when they are read.

    Args:
        source: Has it.
        place: There.
        turns: Of several turns.
    """

    __slots__ = ("_place", "_source", "_turns")
    _source: HeldSource
    _place: int
    _turns: Turns | None

    def __init__(self, source: HeldSource, place: int, turns: Turns | None = None) -> None:
        set_here = object.__setattr__  # as of any frozen dataclass
        set_here(self, "_source", source)
        set_here(self, "_place", place)
        set_here(self, "_turns", turns)
        set_here(self, "truncated", bool(source.completions.truncated[place]))
        set_here(self, "num_unread_tokens", 0 if turns is None else turns.num_unread_tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """`L` of them."""
        return self._source.of_tokens(self._place, "input_ids")

    @property
    def logprobs(self) -> tuple[float, ...]:
        """`[L]`, in nats."""
        return self._source.of_tokens(self._place, "generation_logprobs")

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """`[L]` of a streaming engine, else none."""
        if "weight_versions" not in self._source.tokens:
            return ()
        versions = self._source.of_tokens(self._place, "weight_versions")
        # The environment's turns have the version of the policy's turn before.
        pairs = zip(versions, self.generated, strict=True) if self.generated else ()
        last = accumulate(pairs, lambda before, own: own if own[1] else (before[0], False))
        return tuple(version for version, _ in last) or versions

    @property
    def generated(self) -> tuple[bool, ...]:
        """`[L]`; empty if the policy wrote all tokens."""
        if self._turns is None:
            return ()
        found = self._source.of_tokens(self._place, "token_mask")
        return () if all(found) else found

    def read(self) -> Completion:
        """The same without a reference to anything elsewhere."""
        return Completion(
            self.token_ids,
            self.logprobs,
            self.truncated,
            self.generated,
            self.weight_versions,
            self.num_unread_tokens,
        )

    def __eq__(self, other: object) -> bool:
        other = other.read() if isinstance(other, HeldCompletion) else other
        return self.read() == other

    def __hash__(self) -> int:
        return hash(self.read())

    def __reduce__(self) -> Any:
        found = self.read()
        return Completion, tuple(getattr(found, each.name) for each in fields(Completion))


@dataclass(frozen=True, eq=False)
class SentPrompts(Sequence[Prompt]):
    """Prompts as another process gets them: their tokens lie in blocks, before the completions.

    Attributes:
        source: Of completions.
        place: `[P]`: which of the source's completes each.
        texts: By the name of the field, `P` values of all fields but the tokens.
    """

    source: HeldSource
    place: Indices
    texts: dict[str, list[str]]

    def __len__(self) -> int:
        return len(self.place)

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
                token_ids=self.source.of_prompt(place),
                **{name: values[number] for name, values in self.texts.items()},
            )
            for number, place in enumerate(self.place.tolist())
        ]


_TEXTS_OF_PROMPTS = tuple(each.name for each in fields(Prompt) if each.name != "token_ids")


@dataclass(frozen=True, eq=False)
class HeldRollouts(Sequence[Rollout]):
    """`B` rollouts.

    Attributes:
        source: Their completions, perhaps among others.
        place: `[B]`: which of the source's each has.
        prompts: What was asked.
        prompt: `[B]`: which of the prompts each completes.
        group: `[B]`, as of a `Rollout`.
        sample: `[B]`, as of a `Rollout`.
        rewards: `[B]`, not a number where there is none (yet).
        errors: Why there is none, by row.
        components: `[B]` tuples, where the environment gives several rewards.
        turns: `[B]`, where an environment answers.
    """

    source: HeldSource
    place: Indices
    prompts: Sequence[Prompt]
    prompt: Indices
    group: Indices
    sample: Indices
    rewards: "np.ndarray[Any, np.dtype[np.float64]] | None" = None
    errors: dict[int, str] | None = None
    components: tuple[tuple[float, ...], ...] = ()
    turns: tuple[Turns, ...] = ()

    def __reduce__(self) -> Any:
        place = np.full(len(self.prompts), -1)
        place[self.prompt[::-1]] = self.place[::-1]  # of each prompt's first rollout
        used = np.flatnonzero(place >= 0).tolist()
        own = [self.prompts[number] for number in used]
        texts = {name: list(map(attrgetter(name), own)) for name in _TEXTS_OF_PROMPTS}
        columns = {each.name: getattr(self, each.name) for each in fields(self)} | {
            "prompts": SentPrompts(self.source, place[used], texts),
            "prompt": (np.cumsum(place >= 0) - 1)[self.prompt],
        }
        return HeldRollouts, tuple(columns.values())

    def __len__(self) -> int:
        return len(self.place)

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> "HeldRollouts": ...
    def __getitem__(self, index: int | slice) -> "Rollout | HeldRollouts":
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        return next(iter(self.select(np.arange(len(self))[index : index + 1 or None])))

    def __iter__(self) -> Iterator[Rollout]:
        columns = (each.tolist() for each in (self.place, self.prompt, self.group, self.sample))
        errors, texts = self.errors or {}, self.source.texts
        for row, (place, prompt, group, sample) in enumerate(zip(*columns, strict=True)):
            reward = None if self.rewards is None else float(self.rewards[row])
            error = errors.get(row)
            turns = self.turns[row] if self.turns else None
            yield Rollout(
                self.prompts[prompt],
                HeldCompletion(self.source, place, turns),
                texts[place],
                reward=reward if error is None else None,
                components=self.components[row] if self.components else (),
                group=group,
                sample=sample,
                turn_rewards=() if turns is None else turns.rewards,
                messages=() if turns is None else turns.messages,
                error=error,
            )

    def select(self, rows: Indices) -> "HeldRollouts":
        """The rollouts at these rows, in their order; nothing is fetched."""
        errors, components = self.errors, self.components
        if errors:
            found = ((new, errors.get(old)) for new, old in enumerate(rows.tolist()))
            errors = {new: error for new, error in found if error is not None}
        if components:
            components = tuple(components[row] for row in rows.tolist())
        return replace(
            self,
            place=self.place[rows],
            prompt=self.prompt[rows],
            group=self.group[rows],
            sample=self.sample[rows],
            rewards=None if self.rewards is None else self.rewards[rows],
            errors=errors,
            components=components,
            turns=tuple(self.turns[row] for row in rows.tolist()) if self.turns else (),
        )

    @property
    def is_valid(self) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """`[B]`: those without an error."""
        found = np.ones(len(self), np.bool_)
        found[list(self.errors or ())] = False
        return found

    @property
    def num_tokens(self) -> int:
        """Of prompts and completions together."""
        return int(self.source.completions.input_lengths[self.place].sum())

    def valid(self) -> "HeldRollouts":
        """Those without an error."""
        return self.select(np.flatnonzero(self.is_valid)) if self.errors else self

    def with_scored(self, scored: "HeldRollouts") -> "HeldRollouts":
        """All, with the outcomes of the valid ones.

        Args:
            scored: What has become of `valid()`.
        """
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
        found = self.with_rewards(rewards, errors)
        return replace(found, components=tuple(components) if scored.components else ())

    def with_outcomes(self, outcomes: Sequence[float | RewardError]) -> "HeldRollouts":
        """The same with a reward, or an error, each."""
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

    def with_scores(self, scored: Iterable[Rollout]) -> "HeldRollouts":
        """The same with the rewards, components and errors of rollouts in the same order."""
        found = list(scored)
        errors = {row: each.error for row, each in enumerate(found) if each.error is not None}
        rewards = [np.nan if each.reward is None else each.reward for each in found]
        components = tuple(each.components for each in found)
        held = self.with_rewards(np.array(rewards, np.float64), errors)
        return replace(held, components=components if any(components) else ())

    def with_rewards(
        self,
        rewards: "np.ndarray[Any, np.dtype[np.float64]]",
        errors: dict[int, str] | None = None,
    ) -> "HeldRollouts":
        """The same with `[B]` rewards, and other errors, where they are given."""
        return replace(self, rewards=rewards, errors=self.errors if errors is None else errors)

    def batch(self) -> BatchedDataDict:
        """The columns of `rollout_batch`; `tokens` stand for those with a value a token.

        Of several turns also `written_lengths [B]`, the policy's tokens.
        """
        source = self.source.completions
        batch = BatchedDataDict(
            {
                "tokens": source.tokens[self.place],
                "input_lengths": torch.from_numpy(source.input_lengths[self.place]),
                "sample_mask": torch.ones(len(self)),
                "truncated": torch.from_numpy(source.truncated[self.place]),
                "rollout_lengths": torch.from_numpy(source.completion_lengths[self.place]),
            }
        )
        if self.turns:
            num_unread = [each.num_unread_tokens for each in self.turns]
            batch["rollout_lengths"] += torch.tensor(num_unread)
            batch["written_lengths"] = torch.tensor([each.num_written for each in self.turns])
            batch["num_turns"] = torch.tensor([len(each.rewards) for each in self.turns])
        return batch

    @classmethod
    def joined(cls, parts: "Sequence[HeldRollouts]") -> "HeldRollouts":
        """The rollouts of one after the other."""
        if len(parts) == 1:
            return parts[0]
        lists: dict[str, list[Any]] = {"place": [], "prompt": [], "errors": []}
        completions = prompts = rows = 0
        for part in parts:
            lists["place"].append(part.place + completions)
            lists["prompt"].append(part.prompt + prompts)
            lists["errors"] += [(row + rows, each) for row, each in (part.errors or {}).items()]
            completions += len(part.source.completions.input_lengths)
            prompts, rows = prompts + len(part.prompts), rows + len(part)
        sources = HeldSource.joined([part.source for part in parts])
        rewards = [part.rewards for part in parts if part.rewards is not None]
        return cls(
            sources,
            np.concatenate(lists["place"]),
            tuple(prompt for part in parts for prompt in part.prompts),
            np.concatenate(lists["prompt"]),
            np.concatenate([part.group for part in parts]),
            np.concatenate([part.sample for part in parts]),
            np.concatenate(rewards) if rewards else None,
            dict(lists["errors"]),
            tuple(each for part in parts for each in part.components),
            tuple(each for part in parts for each in part.turns),
        )
