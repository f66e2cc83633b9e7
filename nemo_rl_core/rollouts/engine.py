"""Requests to an engine, their results and seeds, and single-turn rollouts."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nemo_rl_core.distributed.batched_data_dict import InProcess, RemoteRow, RemoteRows
from nemo_rl_core.models.generation.remote_completions import (
    InProcessEngine,
    RemoteCompletions,
    Requests,
)
from nemo_rl_core.models.interfaces import GenerationInterface
from nemo_rl_core.rollouts.remote_rollouts import CompletionSource, RemoteRollouts
from nemo_rl_core.types import Prompt


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request to complete tokens.

    Attributes:
        token_ids: Tokens of the prompt and earlier turns, or only those after `before`.
        max_new_tokens: Maximum number of new tokens; None uses the engine's config.
        before: Remote tokens before `token_ids`.
    """

    token_ids: tuple[int, ...]
    seed: int
    stop_strings: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    before: "RemoteTokens | None" = None


@dataclass(frozen=True, slots=True)
class RemoteTokens:
    """A sequence whose tokens are remote.

    Attributes:
        row: Row with the columns of `RemoteCompletions.tokens`.
    """

    row: RemoteRow
    length: int


@dataclass(frozen=True, slots=True)
class CompletionResult:
    """A completion.

    Attributes:
        last_token: Last token of the completion; None if it is empty.
    """

    sequence: RemoteTokens
    num_tokens: int
    last_token: int | None
    text: str
    truncated: bool


def results_of(completions: RemoteCompletions) -> list[CompletionResult]:
    """Returns completions one by one; fetches their texts, but not their tokens."""
    texts = completions.texts.fetched()
    columns = (
        map(RemoteTokens, completions.tokens.each(), completions.input_lengths.tolist()),
        completions.completion_lengths.tolist(),
        texts["last_token_ids"],
        texts["texts"],
        completions.truncated.tolist(),
    )
    return [CompletionResult(*each) for each in zip(*columns, strict=True)]


def joined_requests(requests: Sequence[CompletionRequest], *, separately: bool = False) -> Requests:
    """Returns requests as columns, in order; `separately` is that of `Requests`.

    The requests of a group have the same first tokens and are adjacent, so that an engine with a
    prefix cache computes these tokens once.
    """
    # Samples of a prompt share its tuple, which is stored once.
    prompts = {id(request.token_ids): request.token_ids for request in requests}
    indices = dict(zip(prompts, range(len(prompts)), strict=True))
    columns: dict[str, Any] = {"seeds": np.array([request.seed for request in requests])}
    if any(request.stop_strings for request in requests):
        columns["stop_strings"] = [list(request.stop_strings) or None for request in requests]
    limits = [request.max_new_tokens for request in requests]
    if None not in limits:
        columns["max_new_tokens"] = np.array(limits)
    before = [request.before or _NOTHING for request in requests]
    if any(each is not _NOTHING for each in before):
        columns["before"] = RemoteRows.of_each([each.row for each in before])
        columns["before_lengths"] = np.array([each.length for each in before])
    prompt = np.array([indices[id(request.token_ids)] for request in requests])
    return Requests(list(prompts.values()), prompt, columns, separately)


_NOTHING = RemoteTokens(
    RemoteRow(
        InProcess(
            {
                "input_ids": np.zeros((1, 0), np.int64),
                "token_mask": np.zeros((1, 0), np.bool_),
                "generation_logprobs": np.zeros((1, 0), np.float32),
                "weight_versions": np.zeros((1, 0), np.int64),
            }
        ),
        0,
    ),
    0,
)
"""`before` of a first turn, in a batch with later turns."""


@dataclass(frozen=True, slots=True)
class RolloutIndex:
    """Position of a rollout in a run, from which its seeds are derived."""

    seed: int
    step: int
    group: int
    sample: int


Complete = Callable[[CompletionRequest], Awaitable[CompletionResult]]
"""Completes a request of an episode."""


class Episode(Protocol):
    """A rollout that asks for completions at its own pace.

    Example:
        >>> async def play(self, complete):                        # doctest: +SKIP
        ...     while not self.is_over:
        ...         self.add_completion(await complete(self.request()))
        ...         self.add_observation(await self.answer())
        ...     return [self.played()]
    """

    async def play(self, complete: Complete) -> Sequence[Any]:
        """Plays the episode in the event loop of the process (`distributed.event_loop`).

        Args:
            complete: Completes a request; a lost engine is restarted and asked again. The seed of
                a request depends on the run, the step, the rollout and the number of the call
                (`request_seed`), never on time.

        Returns:
            Training samples (`episode.PlayedEpisode`) of the episode, mostly one. An exception is
            the episode's error.
        """
        ...


class RolloutEngine(ABC):
    """Samples groups of rollouts of the same prompt, each with a separate seed.

    A request's seed depends only on the run's seed, the step, the indices of prompt and sample, and
    the turn, so that a rerun, or a resumed run, samples the same tokens. No episode depends on the
    others.

    Attributes:
        has_logprobs: Whether the engine has returned logprobs with all completions so far.
        weight_version: Version of the engine's weights to record for the tokens of `run`, if any.
    """

    def __init__(self, generation: GenerationInterface, tokenizer: Any, *, seed: int) -> None:
        has_columns = hasattr(generation, "complete")
        self._generation: Any = (
            generation if has_columns else InProcessEngine(generation, tokenizer)
        )
        self._tokenizer = tokenizer
        self._seed = seed
        self.has_logprobs = True
        self.weight_version: int | None = None

    @abstractmethod
    def episode(self, prompt: Prompt, index: RolloutIndex) -> "Episode | SingleTurnEpisode":
        """Creates a rollout that has not begun."""

    @abstractmethod
    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        num_generations_per_prompt: int,
        step: int,
        first_group: int = 0,
        greedy: bool = False,
        releases_memory: bool = False,
        discards_weights: bool = False,
    ) -> RemoteRollouts:
        """Rolls out every prompt; the completions stay in the object store.

        Args:
            prompts: `P` prompts.
            num_generations_per_prompt: Number of rollouts per prompt, `G`.
            step: Number of the step, which is part of every request's seed.
            first_group: Index of the first prompt, if the step draws more than once.
            greedy: Always take the most likely token.
            releases_memory: Whether engines are awake only while they generate.
            discards_weights: Same as in `Generation.finish_generation`.

        Returns:
            `P * G` rollouts, ordered by `group` and `sample`. If an environment has answered, each
            has a reward or an error; otherwise neither.
        """

    def close(self) -> None:  # noqa: B027 (most have nothing to release)
        """Ends processes of episodes that still run."""


def request_seed(seed: int, step: int, group: int, sample: int, turn: int = 0) -> int:
    """Returns a 31-bit seed for one request; the samples of a prompt have consecutive seeds.

    Args:
        turn: Number of earlier turns of the policy. 0 leaves the seed unchanged, so that a first
            turn is drawn like a single-turn completion.
    """
    key = f"{seed}/{step}/{group}" + (f"/{turn}" if turn else "")
    first = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") >> 2
    return first + sample


class SingleTurnEpisode:
    """A prompt whose completion ends the rollout."""

    def __init__(self, prompt: Prompt, index: RolloutIndex) -> None:
        self._prompt, self._index = prompt, index

    def request(self) -> CompletionRequest:
        """Returns the request to the engine."""
        index = self._index
        seed = request_seed(index.seed, index.step, index.group, index.sample)
        return CompletionRequest(self._prompt.token_ids, seed)


class SingleTurnRollouts(RolloutEngine):
    """Samples completions without scoring them."""

    def episode(self, prompt: Prompt, index: RolloutIndex) -> SingleTurnEpisode:
        """Creates a rollout that has not begun."""
        return SingleTurnEpisode(prompt, index)

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        num_generations_per_prompt: int,
        step: int,
        first_group: int = 0,
        greedy: bool = False,
        releases_memory: bool = False,
        discards_weights: bool = False,
    ) -> RemoteRollouts:
        """Rolls out every prompt with one call per engine; see `RolloutEngine.run`."""
        count, size = len(prompts), num_generations_per_prompt
        groups = range(first_group, first_group + count)
        first_seeds = np.array([request_seed(self._seed, step, group, 0) for group in groups])
        prompt, sample = np.divmod(np.arange(count * size), size)
        ids = [each.token_ids for each in prompts]
        completions = self._generation.complete(
            Requests(ids, prompt, {"seeds": first_seeds[prompt] + sample}),
            greedy=greedy,
            releases_memory=releases_memory,
            discards_weights=discards_weights,
            weight_version=self.weight_version,
        )
        self.has_logprobs &= completions.has_logprobs
        return RemoteRollouts(
            CompletionSource(completions),
            np.arange(count * size),
            tuple(prompts),
            prompt,
            prompt + first_group,
            sample,
        )
