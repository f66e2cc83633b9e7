"""What makes rollouts: requests and results, their seeds, and single-turn rollouts.

A batch of tensors is only how `GenerationInterface.generate` takes many requests at once; an engine
that streams takes the same records one by one.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import numpy as np
import torch

from nemo_rl_core.data.pretrained import decoded
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, flat_tensor
from nemo_rl_core.distributed.held_rows import HeldRow, HeldRows, InProcess
from nemo_rl_core.models.generation.where_made import HeldCompletions
from nemo_rl_core.models.interfaces import GenerationInterface
from nemo_rl_core.rollouts.held import HeldRollouts, HeldSource
from nemo_rl_core.types import Completion, Prompt, Rollout

if TYPE_CHECKING:
    from nemo_rl_core.models.generation.engine import Generation


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Tokens to be continued.

    Attributes:
        token_ids: All that came before, prompt and earlier turns, or what comes behind `before`.
        seed: Of this request alone, 31 bits.
        stop_strings: Texts that end the answer; they are part of it.
        max_new_tokens: At most so many; None leaves it to the engine's config.
        before: The tokens before `token_ids`, where they lie elsewhere.
    """

    token_ids: tuple[int, ...]
    seed: int
    stop_strings: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    before: "HeldTokens | None" = None


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """A sequence that lies where an engine has made it.

    Attributes:
        row: With the columns of `HeldCompletions.tokens`.
        length: How many tokens of it there are.
    """

    row: HeldRow
    length: int


@dataclass(frozen=True, slots=True)
class CompletionResult:
    """What followed.

    Attributes:
        token_ids: With the stop token, where one ended it.
        logprobs: One a token, in nats, under the sampling temperature.
        truncated: It ran into a bound on tokens.
        weight_versions: One a token, where the engine takes new weights in between; else empty.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    truncated: bool
    weight_versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldResult:
    """As `CompletionResult`, of a completion that stays where it is made.

    Attributes:
        whole: The completion, behind all that came before.
        num_tokens: Of the completion alone.
        last_token: Of the completion; None if it is empty.
        text: Of the completion, decoded.
        truncated: It ran into a bound on tokens.
    """

    whole: HeldTokens
    num_tokens: int
    last_token: int | None
    text: str
    truncated: bool


def held_results(completions: HeldCompletions) -> list[HeldResult]:
    """Completions one by one, of which the texts are fetched, and not the tokens."""
    said = completions.texts.fetched()
    columns = (
        map(HeldTokens, completions.tokens.each(), completions.input_lengths.tolist()),
        completions.completion_lengths.tolist(),
        said["last_token_ids"],
        said["texts"],
        completions.truncated.tolist(),
    )
    return [HeldResult(*each) for each in zip(*columns, strict=True)]


def answers_to(
    requests: Sequence[CompletionRequest], generation: GenerationInterface, *, greedy: bool
) -> list[CompletionResult]:
    """Hands all requests to the engine at once, and waits for all answers.

    Args:
        requests: At least one. Those of a group begin with the same tokens, and lie next to each
            other, so that an engine with a prefix cache computes these once.
        generation: The engine.
        greedy: Take the most likely token always.

    Returns:
        One answer a request, in order.
    """
    output = generation.generate(as_batch(requests), greedy)
    ends, lengths = output["unpadded_sequence_lengths"], output["generation_lengths"]
    place = torch.arange(output["output_ids"].shape[1])
    is_new = (place < ends[:, None]) & (place >= (ends - lengths)[:, None])
    # All new tokens in one line: prompts and padding do not become Python's numbers.
    ids, logprobs = output["output_ids"][is_new].tolist(), output["logprobs"][is_new].tolist()
    last = lengths.cumsum(0)
    return [
        CompletionResult(tuple(ids[start:end]), tuple(logprobs[start:end]), bool(truncated))
        for start, end, truncated in zip(
            (last - lengths).tolist(), last.tolist(), output["truncated"].tolist(), strict=True
        )
    ]


def as_batch(requests: Sequence[CompletionRequest]) -> BatchedDataDict:
    """At least one request as `GenerationInterface.generate` takes them.

    With `before` and `before_lengths`, as `where_made.whole_requests` has them, where one goes on
    behind tokens that lie elsewhere.
    """
    # Samples of a prompt share its tuple, which is read once.
    rows = {id(request.token_ids): request.token_ids for request in requests}
    numbers = dict(zip(rows, range(len(rows)), strict=True))
    row = torch.tensor([numbers[id(request.token_ids)] for request in requests])
    lengths = torch.tensor(list(map(len, rows.values())))
    is_token = torch.arange(int(lengths.max())) < lengths[:, None]
    input_ids = torch.zeros(is_token.shape, dtype=torch.long)
    input_ids[is_token] = flat_tensor(rows.values(), np.int64)
    batch = BatchedDataDict(
        {
            "input_ids": input_ids[row],
            "input_lengths": lengths[row],
            "seeds": torch.tensor([request.seed for request in requests]),
        }
    )
    if any(request.stop_strings for request in requests):
        batch["stop_strings"] = [list(request.stop_strings) or None for request in requests]
    limits = [request.max_new_tokens for request in requests]
    if None not in limits:
        batch["max_new_tokens"] = torch.tensor(limits)
    before = [request.before or _NOTHING for request in requests]
    if any(each is not _NOTHING for each in before):
        batch["before"] = HeldRows.of_each([each.row for each in before])
        batch["before_lengths"] = torch.tensor([each.length for each in before])
    return batch


_NOTHING = HeldTokens(
    HeldRow(
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
"""What comes before a request that begins, in a batch with such as go on."""


@dataclass(frozen=True, slots=True)
class RolloutPlace:
    """Which rollout of a run it is: what its seeds are made of.

    Attributes:
        seed: The run's.
        step: Number of the step.
        group: Place of the prompt in its step.
        sample: Place in the group.
    """

    seed: int
    step: int
    group: int
    sample: int


class Episode(Protocol):
    """One rollout while it goes on, of one turn or several."""

    @property
    def is_over(self) -> bool:
        """Whether there are no more requests."""
        ...

    def request(self) -> CompletionRequest:
        """The next request to the engine."""
        ...

    def add_completion(self, answer: Any) -> None:
        """Appends a completion of the policy: a `CompletionResult`, or a `HeldResult`."""
        ...

    def rollout(self) -> Rollout:
        """The record of the episode."""
        ...


E = TypeVar("E", bound=Episode)


class RolloutEngine(ABC, Generic[E]):
    """Samples groups of rollouts of the same prompt, each under a seed of its own.

    A request's seed depends only on the run's seed, the step, the indices of prompt and sample, and
    the turn, so that a rerun, or a resumed run, samples the same tokens. Episodes advance together,
    one call of the engine for all that are not over; none depends on which others there are.

    Args:
        generation: The engine.
        tokenizer: Decodes what it says.
        seed: The run's seed.
    """

    def __init__(self, generation: GenerationInterface, tokenizer: Any, *, seed: int) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._seed = seed

    @abstractmethod
    def episode(self, prompt: Prompt, place: RolloutPlace, *, holds: bool = False) -> E:
        """A rollout that has not begun.

        Args:
            prompt: What is asked first.
            place: Which rollout it is.
            holds: Whether its tokens stay where they are made.
        """

    @abstractmethod
    def _step_environment(self, episodes: Sequence[E]) -> None:
        """Answers the last completion of each episode, where there is an environment."""

    @property
    def holds(self) -> bool:
        """Whether `run_held` is there: of an engine in workers that completes whole batches."""
        return bool(getattr(self._generation, "holds_completions", False))

    @abstractmethod
    def run_held(
        self,
        prompts: Sequence[Prompt],
        *,
        num_generations_per_prompt: int,
        step: int,
        first_place: int = 0,
        discards_weights: bool = False,
    ) -> HeldRollouts:
        """As `run`, of rollouts whose completions stay where they are made.

        Engines are awake only for as long as it takes; see `Generation.generate_held`.
        """

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        num_generations_per_prompt: int,
        step: int,
        first_place: int = 0,
        greedy: bool = False,
    ) -> list[Rollout]:
        """Rolls every prompt out.

        Args:
            prompts: `P` prompts.
            num_generations_per_prompt: G.
            step: Part of every request's seed.
            first_place: Of the first prompt, where the step asks more than once.
            greedy: Take the most likely token always.

        Returns:
            `P * G` rollouts; those of one prompt lie next to each other, and `group` and `sample`
            say which they are. Where an environment has answered, each has a reward or an error;
            else neither.
        """
        places = self._places(prompts, num_generations_per_prompt, step, first_place)
        episodes = [self.episode(*each) for each in places]
        self._play(episodes, partial(answers_to, generation=self._generation, greedy=greedy))
        return [each.rollout() for each in episodes]

    def _places(
        self, prompts: Sequence[Prompt], group_size: int, step: int, first_place: int
    ) -> list[tuple[Prompt, RolloutPlace]]:
        return [
            (prompt, RolloutPlace(self._seed, step, group, sample))
            for group, prompt in enumerate(prompts, start=first_place)
            for sample in range(group_size)
        ]

    def _play(
        self,
        episodes: Sequence[E],
        answers_to: Callable[[list[CompletionRequest]], Sequence[Any]],
    ) -> None:
        """Has episodes go on until all of them are over."""
        while live := [each for each in episodes if not each.is_over]:
            answers = answers_to([each.request() for each in live])
            for episode, answer in zip(live, answers, strict=True):
                episode.add_completion(answer)
            self._step_environment(live)


def request_seed(seed: int, step: int, place: int, sample: int, turn: int = 0) -> int:
    """A 31-bit seed for one request; those of a prompt's samples count up.

    Args:
        seed: The run's.
        step: Number of the step.
        place: Of the prompt in its step.
        sample: Place in the prompt's group.
        turn: How many turns of the policy came before. Of the first turn nothing is added, so that
            it is drawn as a completion without turns is.
    """
    key = f"{seed}/{step}/{place}" + (f"/{turn}" if turn else "")
    first = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big") >> 2
    return first + sample


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
            decoded(self._tokenizer, answer.token_ids),
            group=self._place.group,
            sample=self._place.sample,
        )


class SingleTurnRollouts(RolloutEngine[SingleTurnEpisode]):
    """Samples completions, which somebody else scores."""

    def episode(
        self, prompt: Prompt, place: RolloutPlace, *, holds: bool = False
    ) -> SingleTurnEpisode:
        """A rollout that has not begun; one whose completion is held never gets it."""
        return SingleTurnEpisode(prompt, place, tokenizer=self._tokenizer)

    def run_held(
        self,
        prompts: Sequence[Prompt],
        *,
        num_generations_per_prompt: int,
        step: int,
        first_place: int = 0,
        discards_weights: bool = False,
    ) -> HeldRollouts:
        """As `RolloutEngine.run_held`, in one call of each engine."""
        count, size = len(prompts), num_generations_per_prompt
        places = range(first_place, first_place + count)
        first_seeds = np.array([request_seed(self._seed, step, place, 0) for place in places])
        prompt, sample = np.divmod(np.arange(count * size), size)
        ids = [each.token_ids for each in prompts]
        generation = cast("Generation", self._generation)
        completions = generation.generate_held(
            ids, prompt, first_seeds[prompt] + sample, discards_weights=discards_weights
        )
        return HeldRollouts(
            HeldSource(completions),
            np.arange(count * size),
            tuple(prompts),
            prompt,
            prompt + first_place,
            sample,
        )

    def _step_environment(self, episodes: Sequence[SingleTurnEpisode]) -> None:
        """There is none: each episode is over."""
