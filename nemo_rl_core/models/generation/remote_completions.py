"""Requests to engines and their completions, whose tokens stay in the object store.

`complete`, `submit` and `take_remotely` run in an engine's worker.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch

from nemo_rl_core.data.pretrained import decoded, load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import (
    BatchedDataDict,
    Block,
    InProcess,
    RemoteRows,
    as_block,
    collate,
    collate_completions,
    flat_tensor,
    from_block,
)
from nemo_rl_core.models.columns import joined_outputs
from nemo_rl_core.models.interfaces import GenerationInterface
from nemo_rl_core.types import Completion

_tokenizer = lru_cache(maxsize=2)(load_tokenizer)


@dataclass(frozen=True)
class RemoteCompletions:
    """Completions of `B` requests: local lengths, and remote tokens and texts.

    Attributes:
        input_lengths: `[B]` number of tokens of prompt and completion.
        completion_lengths: `[B]` number of tokens of the completion.
        truncated: `[B]` bool, True if a bound ended the completion.
        tokens: `[B]` rows with the columns `input_ids`, `token_mask` (1 for tokens of the policy,
            also in earlier turns), `generation_logprobs` and, in asynchronous training,
            `weight_versions`.
        texts: `[B]` rows with the columns `texts`, the decoded completions, and `last_token_ids`,
            None if a completion is empty.
        has_logprobs: Whether the engine returned logprobs; without, `generation_logprobs` are NaN
            at the tokens of the policy.
    """

    input_lengths: "np.ndarray[Any, np.dtype[np.int64]]"
    completion_lengths: "np.ndarray[Any, np.dtype[np.int64]]"
    truncated: "np.ndarray[Any, np.dtype[np.bool_]]"
    tokens: RemoteRows
    texts: RemoteRows
    has_logprobs: bool = True

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Completion],
        texts: Sequence[str],
        *,
        streams: bool,
    ) -> "RemoteCompletions":
        """Puts completions into blocks of this process, with versions if an engine streams them."""
        batch, size = _token_columns(prompts, completions, streams=streams), [len(prompts)]
        tokens = {name: batch[name] for name in batch if name in _OF_TOKENS}
        ids = [each.token_ids for each in completions]
        last = [each[-1] if each else None for each in ids]
        block_of_texts = {"texts": list(texts), "last_token_ids": last}
        return cls(
            batch["input_lengths"].numpy(),
            np.array([len(each) for each in ids], np.int64),
            np.array([each.truncated for each in completions], np.bool_),
            RemoteRows.of_blocks([InProcess(as_block(tokens))], size),
            RemoteRows.of_blocks([InProcess(block_of_texts)], size),
        )


_OF_TOKENS = frozenset({"input_ids", "token_mask", "generation_logprobs", "weight_versions"})


def _token_columns(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion], *, streams: bool
) -> BatchedDataDict:
    """Collates completions; raises ValueError if one does not have one logprob per token."""
    written: torch.Tensor | slice = slice(None)
    if any(each.generated for each in completions):
        pairs = list(zip(prompts, completions, strict=True))
        batch = collate(
            [(*prompt, *each.token_ids) for prompt, each in pairs],
            [(*[False] * len(prompt), *each.token_mask) for prompt, each in pairs],
        )
        written = flat_tensor((each.token_mask for each in completions), np.bool_)
    else:  # builds the masks without one Python object per token
        batch = collate_completions(prompts, [each.token_ids for each in completions])
    mask = batch["token_mask"]
    columns: dict[str, tuple[torch.Tensor, Any, list[Any]]] = {
        # float32, as torch converts a list of Python floats.
        "generation_logprobs": (
            torch.zeros(mask.shape),
            np.float32,
            [each.logprobs for each in completions],
        )
    }
    if streams:
        versions = [each.weight_versions for each in completions]
        columns["weight_versions"] = torch.zeros(mask.shape, dtype=torch.long), np.int64, versions
    for name, (column, kind, values) in columns.items():
        for row, (each, of_row) in enumerate(zip(completions, values, strict=True)):
            if len(each.token_ids) != len(of_row):
                raise ValueError(
                    f"rollout {row}: {len(each.token_ids)} tokens but {len(of_row)} values of them"
                )
        column[mask] = flat_tensor(values, kind)[written]
        batch[name] = column
    return batch


@dataclass(frozen=True, eq=False)
class Requests:
    """`B` requests to complete tokens, with each prompt stored once.

    Attributes:
        prompts: Token ids of the prompts; workers convert them to tensors.
        prompt_indices: `[B]`, the index of each request's prompt in `prompts`.
        columns: `seeds [B]` and, optionally, `stop_strings` and `max_new_tokens` of `generate`;
            `before [B]`, `RemoteRows` with the columns of `RemoteCompletions.tokens`; and
            `before_lengths [B]`, the number of their tokens that precede the prompt.
        separately: Whether an engine completes each request in a batch of one row, so that no bit
            depends on which requests come together.
    """

    prompts: Sequence[Sequence[int]]
    prompt_indices: "np.ndarray[Any, np.dtype[np.int64]]"
    columns: Block
    separately: bool = False

    def __len__(self) -> int:
        return len(self.prompt_indices)

    def slice(self, start: int, end: int) -> "Requests":
        """Returns consecutive requests with only their prompts."""
        used, indices = np.unique(self.prompt_indices[start:end], return_inverse=True)
        prompts = [self.prompts[each] for each in used.tolist()] or self.prompts[:1]
        columns = {name: column[start:end] for name, column in self.columns.items()}
        return Requests(prompts, indices, columns, self.separately)

    def batch(self) -> BatchedDataDict:
        """Returns the columns of `generate`, and those of the tokens before, if any."""
        prompts = collate_completions(self.prompts, [()] * len(self.prompts))
        chosen = torch.from_numpy(self.prompt_indices.copy())  # arrays of the store are read-only
        ids = {name: prompts[name][chosen] for name in ("input_ids", "input_lengths")}
        return BatchedDataDict({**ids, **from_block(self.columns)})


@dataclass(frozen=True, eq=False)
class RequestParts(Sequence[Requests]):
    """The requests of some neighboring engines, stored together; each item is one engine's part.

    Attributes:
        ends: Index one past the last request of each engine.
    """

    requests: Requests
    ends: Sequence[int]

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> Requests: ...
    @overload
    def __getitem__(self, index: slice) -> list[Requests]: ...
    def __getitem__(self, index: int | slice) -> Requests | list[Requests]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return self.requests.slice(self.ends[index - 1] if index > 0 else 0, self.ends[index])


_NEARBY_ENGINES = 8
"""Number of engines, about those of one machine, that read one stored part of the requests."""


def parts_of_engines(requests: Requests, num_engines: int) -> list[RequestParts]:
    """Divides requests into consecutive parts; the first engines may have one more."""
    rows, left_over = divmod(len(requests), num_engines)
    ends = [(engine + 1) * rows + min(engine + 1, left_over) for engine in range(num_engines)]
    parts, start = [], 0
    for first in range(0, num_engines, _NEARBY_ENGINES):
        engine_ends = ends[first : first + _NEARBY_ENGINES]
        part = requests.slice(start, engine_ends[-1])
        parts.append(RequestParts(part, [end - start for end in engine_ends]))
        start = engine_ends[-1]
    return parts


def complete(
    backend: Any,
    requests: Requests,
    *,
    model_folder: Path,
    greedy: bool,
    sleep: Mapping[str, Any] | None,
    weight_version: int | None = None,
) -> tuple[dict[str, Any], Block, Block]:
    """Samples completions of an engine's requests.

    Args:
        sleep: Arguments of the engine's `sleep` afterwards; None if the engine is awake and stays
            awake.
        weight_version: Version to record for all new tokens, if any.

    Returns:
        The lengths, the block of tokens and the block of texts.
    """
    if sleep is not None:
        backend.wake()
    generate = partial(backend.generate, greedy=greedy)
    completed = _completed(generate, requests, _tokenizer(model_folder), weight_version)
    if sleep is not None:
        backend.sleep(**sleep)
    return completed


class InProcessEngine:
    """Completes requests in this process with an engine that only has `generate`."""

    def __init__(self, generation: GenerationInterface, tokenizer: Any) -> None:
        self._generation, self._tokenizer = generation, tokenizer

    def prepare_for_generation(self) -> None:
        """Calls the same method of the engine."""
        self._generation.prepare_for_generation()

    def finish_generation(self, *, discards_weights: bool = False) -> None:
        """Calls the same method of the engine."""
        self._generation.finish_generation(discards_weights=discards_weights)

    def complete(
        self,
        requests: Requests,
        *,
        greedy: bool = False,
        releases_memory: bool = False,
        discards_weights: bool = False,
        weight_version: int | None = None,
    ) -> RemoteCompletions:
        """Completes requests, as in `Generation.complete`."""
        if releases_memory:
            self.prepare_for_generation()
        lengths, tokens, texts = _completed(
            lambda batch: self._generation.generate(batch, greedy),
            requests,
            self._tokenizer,
            weight_version,
        )
        if releases_memory:
            self.finish_generation(discards_weights=discards_weights)
        return joined([(lengths, InProcess(tokens), InProcess(texts))])


def _completed(
    generate: Callable[[BatchedDataDict], BatchedDataDict],
    requests: Requests,
    tokenizer: Any,
    weight_version: int | None,
) -> tuple[dict[str, Any], Block, Block]:
    """Completes requests; returns the lengths, the block of tokens and the block of texts."""
    batch, earlier = requests.batch(), dict[str, torch.Tensor]()
    if "before" in batch:
        batch, earlier = full_requests(batch)
    if requests.separately and batch.size:
        singles = [batch.select_indices([row]) for row in range(batch.size)]
        for single in singles:
            single["input_ids"] = single["input_ids"][:, : int(single["input_lengths"])]
        output = joined_outputs([generate(single) for single in singles])
    else:
        output = generate(batch)
    ends, lengths = output["unpadded_sequence_lengths"], output["generation_lengths"]
    starts = ends - lengths
    position = torch.arange(output["output_ids"].shape[1])
    is_token = position < ends[:, None]
    ids = torch.where(is_token, output["output_ids"], 0).long()
    is_new = (is_token & (position >= starts[:, None]))[:, 1:]
    logprobs = (
        output["logprobs"][:, 1:].float() if "logprobs" in output else torch.tensor(torch.nan)
    )
    tokens = {
        "input_ids": ids,
        "token_mask": is_new,
        "generation_logprobs": torch.where(is_new, logprobs, 0.0),
    }
    if weight_version is not None:
        tokens["weight_versions"] = is_new * weight_version
    rows = zip(ids.numpy(), starts.tolist(), ends.tolist(), strict=True)
    columns = {
        "input_lengths": ends.numpy(),
        "completion_lengths": lengths.numpy(),
        "truncated": output["truncated"].numpy(),
        "has_logprobs": np.full(len(ids), "logprobs" in output),
    }
    texts = _texts((row[start:end] for row, start, end in rows), tokenizer)
    if earlier:
        tokens = _with_earlier(earlier, range(len(ids)), tokens)
    return columns, as_block(tokens), texts


def _texts(completions: Iterable[Sequence[int]], tokenizer: Any) -> Block:
    token_ids = list(completions)
    return {
        "texts": [decoded(tokenizer, each) for each in token_ids],
        "last_token_ids": [int(each[-1]) if len(each) else None for each in token_ids],
    }


def _with_earlier(
    earlier: Mapping[str, torch.Tensor], rows: Sequence[int], tokens: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Adds the values of earlier turns to the columns of new tokens.

    Args:
        earlier: Columns of earlier turns, 0 past their end.
        tokens: Columns that are 0 except at new tokens; `input_ids` are complete.
    """
    for name, values in earlier.items():
        if name != "input_ids":
            cut = values[:, : tokens[name].shape[1]]  # rows that have ended may have been longer
            tokens[name][list(rows), : cut.shape[1]] += cut
    return tokens


def full_requests(batch: BatchedDataDict) -> tuple[BatchedDataDict, dict[str, torch.Tensor]]:
    """Returns requests with all their tokens, including those of remote rows.

    Returns:
        The requests, and the columns of the tokens before, 0 past their end; no columns if no
        request follows other tokens.
    """
    if "before" not in batch:
        return batch, {}
    columns = dict(batch)
    rows, lengths = columns.pop("before"), columns.pop("before_lengths")
    # Rows without tokens before may lack columns of the others.
    continued = np.flatnonzero(np.asarray(lengths))
    if not len(continued):
        return BatchedDataDict(columns), {}
    before = {}
    for name, values in rows[continued].fetched().items():
        before[name] = values.new_zeros(len(rows), values.shape[1])
        before[name][continued] = values
    new_lengths = columns["input_lengths"]
    total = lengths + new_lengths
    ids = torch.zeros(len(total), int(total.max()) if len(total) else 0, dtype=torch.long)
    position = torch.arange(ids.shape[1])
    is_before = position < lengths[:, None]
    is_new = ~is_before & (position < total[:, None])
    is_remote_token = torch.arange(before["input_ids"].shape[1]) < lengths[:, None]
    is_local_token = torch.arange(columns["input_ids"].shape[1]) < new_lengths[:, None]
    ids[is_before] = before["input_ids"][is_remote_token]
    ids[is_new] = columns["input_ids"][is_local_token]
    return BatchedDataDict({**columns, "input_ids": ids, "input_lengths": total}), before


def lengths_before(batch: BatchedDataDict) -> torch.Tensor:
    """Returns `[B]`, the number of tokens before each completion, local and remote."""
    lengths: torch.Tensor = batch["input_lengths"] + batch.get("before_lengths", 0)
    return lengths


def submit(
    backend: Any, *, request_ids: Sequence[int], batch: BatchedDataDict, first_version: int
) -> None:
    """Submits requests to a streaming engine; they may continue remote tokens."""
    backend.submit(request_ids, full_requests(batch)[0], first_version)


def take_remotely(
    backend: Any,
    *,
    request_ids: Sequence[int],
    model_folder: Path,
    continued: Sequence[int] = (),
    before: RemoteRows | None = None,
    has_versions: bool = True,
) -> tuple[None, Block, Block]:
    """Returns completions of a streaming engine as a block of tokens and a block of texts."""
    finished = backend.take_completions(request_ids)
    completions = [each.completion for each in finished]
    prompts = [each.prompt for each in finished]
    batch = _token_columns(prompts, completions, streams=has_versions)
    tokens = {name: batch[name] for name in batch if name in _OF_TOKENS}
    if before is not None:
        tokens = _with_earlier(before.fetched(), continued, tokens)
    texts = _texts((each.token_ids for each in completions), _tokenizer(model_folder))
    return None, as_block(tokens), texts


def without_tokens(prompts: Sequence[Sequence[int]]) -> RemoteCompletions:
    """Returns local completions of 0 tokens, for requests that were never completed."""
    nothing = [Completion((), (), truncated=True)] * len(prompts)
    return RemoteCompletions.of(prompts, nothing, [""] * len(prompts), streams=True)


def joined(answers: "list[tuple[dict[str, Any], Any, Any]]") -> RemoteCompletions:
    """Joins the answers of the engines, whose blocks are references, in order."""
    sizes = [len(lengths["input_lengths"]) for lengths, _, _ in answers]
    columns = {
        name: np.concatenate([lengths[name] for lengths, _, _ in answers]) for name in answers[0][0]
    }
    has_logprobs = bool(columns.pop("has_logprobs").all())
    tokens, texts = ([answer[index] for answer in answers] for index in (1, 2))
    return RemoteCompletions(
        **columns,
        tokens=RemoteRows.of_blocks(tokens, sizes),
        texts=RemoteRows.of_blocks(texts, sizes),
        has_logprobs=has_logprobs,
    )
