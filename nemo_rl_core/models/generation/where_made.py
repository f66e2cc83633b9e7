"""Completions that stay where an engine has made them, as a trainer reads them.

`generate`, `go_on`, `submit` and `hand_over` run in an engine's worker, with its backend as the
first argument.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch

from nemo_rl_core.data.pretrained import decoded, load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import (
    BatchedDataDict,
    collate_completions,
    flat_tensor,
)
from nemo_rl_core.distributed.held_rows import (
    Block,
    HeldRows,
    InProcess,
    as_block,
    from_block,
)

_tokenizer = lru_cache(maxsize=2)(load_tokenizer)


@dataclass(frozen=True)
class HeldCompletions:
    """Completions of `B` requests: lengths here, all else in blocks.

    Attributes:
        input_lengths: `[B]` tokens of prompts and completions.
        completion_lengths: `[B]` tokens of the completions.
        truncated: `[B]` bool: a bound ended the completion.
        tokens: `[B]`, with the columns `input_ids`, `token_mask` (1 where the policy wrote, in
            earlier turns, too), `generation_logprobs` and, of a streaming engine,
            `weight_versions`.
        texts: `[B]`, with the columns `texts`, the completions decoded, and `last_token_ids`,
            None where a completion is empty.
    """

    input_lengths: "np.ndarray[Any, np.dtype[np.int64]]"
    completion_lengths: "np.ndarray[Any, np.dtype[np.int64]]"
    truncated: "np.ndarray[Any, np.dtype[np.bool_]]"
    tokens: HeldRows
    texts: HeldRows


@dataclass(frozen=True, eq=False)
class RequestParts(Sequence[dict[str, Any]]):
    """What neighbouring engines complete, a part an engine, with each prompt once.

    Attributes:
        prompts: Token ids, of which workers make tensors.
        prompt: `[n]`, rising: which of the prompts each request has.
        seeds: `[n]`.
        ends: Behind which request each engine's end.
    """

    prompts: Sequence[Sequence[int]]
    prompt: "np.ndarray[Any, np.dtype[np.int64]]"
    seeds: "np.ndarray[Any, np.dtype[np.int64]]"
    ends: Sequence[int]

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, place: int | slice) -> "dict[str, Any] | list[dict[str, Any]]":
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        own = slice(self.ends[place - 1] if place > 0 else 0, self.ends[place])
        return _requests(self.prompts, self.prompt[own], self.seeds[own])


def _requests(prompts: Sequence[Sequence[int]], prompt: Any, seeds: Any) -> dict[str, Any]:
    if not len(prompt):
        return {"prompts": prompts[:1], "prompt": prompt, "seeds": seeds}
    first, last = int(prompt[0]), int(prompt[-1])
    return {"prompts": prompts[first : last + 1], "prompt": prompt - first, "seeds": seeds}


_NEARBY_ENGINES = 8
"""So many, about those of a machine, read their requests together."""


def requests_of_engines(
    prompts: Sequence[Sequence[int]],
    prompt: "np.ndarray[Any, np.dtype[np.int64]]",
    seeds: "np.ndarray[Any, np.dtype[np.int64]]",
    num_engines: int,
) -> list[RequestParts]:
    """Consecutive requests for each engine; the first engines have one more where need be.

    Args:
        prompts: Token ids of `P` prompts.
        prompt: `[B]`, rising: which of the prompts each request has.
        seeds: `[B]`.
        num_engines: How many.
    """
    rows, left_over = divmod(len(prompt), num_engines)
    ends = [(engine + 1) * rows + min(engine + 1, left_over) for engine in range(num_engines)]
    found, start = [], 0
    for first in range(0, num_engines, _NEARBY_ENGINES):
        inner = ends[first : first + _NEARBY_ENGINES]
        own = _requests(prompts, prompt[start : inner[-1]], seeds[start : inner[-1]])
        found.append(RequestParts(**own, ends=[end - start for end in inner]))
        start = inner[-1]
    return found


def parts_of_engines(requests: BatchedDataDict, num_engines: int) -> list[list[Block]]:
    """Consecutive requests for each engine, as those of a machine read them together."""
    # As arrays: a tensor is pickled with all that it is a part of.
    parts = [as_block(requests.chunk(engine, num_engines)) for engine in range(num_engines)]
    starts = range(0, num_engines, _NEARBY_ENGINES)
    return [parts[start : start + _NEARBY_ENGINES] for start in starts]


def generate(
    backend: Any,
    batch: Mapping[str, Any],
    *,
    model_folder: Path,
    sleep: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], Block, Block]:
    """Samples what a part of `RequestParts` asks for.

    Args:
        backend: The engine's.
        batch: The part.
        model_folder: Of the tokenizer.
        sleep: How the engine sleeps afterwards; None where it stays awake.

    Returns:
        The lengths, and two blocks: of tokens, and of texts.
    """
    backend.wake()
    prompts = collate_completions(batch["prompts"], [()] * len(batch["prompts"]))
    chosen = torch.from_numpy(batch["prompt"].copy())
    requests = BatchedDataDict(
        {name: prompts[name][chosen] for name in ("input_ids", "input_lengths")}
    )
    requests["seeds"] = torch.from_numpy(batch["seeds"].copy())
    output = backend.generate(requests, greedy=False)
    if sleep is not None:
        backend.sleep(**sleep)
    return _completed(output, {}, model_folder)


def go_on(backend: Any, batch: Block, *, model_folder: Path) -> tuple[dict[str, Any], Block, Block]:
    """As `generate`, of an engine that is awake, and of requests behind rows of blocks.

    Args:
        backend: The engine's.
        batch: A part of `parts_of_engines`.
        model_folder: Of the tokenizer.
    """
    requests, earlier = whole_requests(BatchedDataDict(from_block(batch)))
    return _completed(backend.generate(requests, greedy=False), earlier, model_folder)


def _completed(
    output: Mapping[str, Any], earlier: Mapping[str, torch.Tensor], model_folder: Path
) -> tuple[dict[str, Any], Block, Block]:
    """What an engine has generated: the lengths, and the blocks of tokens and of texts.

    Args:
        output: The engine's.
        earlier: Values of the tokens before, as `whole_requests` returns them.
        model_folder: Of the tokenizer.
    """
    ends, lengths = output["unpadded_sequence_lengths"], output["generation_lengths"]
    starts = ends - lengths
    place = torch.arange(output["output_ids"].shape[1])
    is_token = place < ends[:, None]
    ids = torch.where(is_token, output["output_ids"], 0)
    is_new = (is_token & (place >= starts[:, None]))[:, 1:]
    tokens = {
        "input_ids": ids,
        "token_mask": is_new,
        "generation_logprobs": torch.where(is_new, output["logprobs"][:, 1:], 0.0),
    }
    rows = zip(ids.numpy(), starts.tolist(), ends.tolist(), strict=True)
    found = {
        "input_lengths": ends.numpy(),
        "completion_lengths": lengths.numpy(),
        "truncated": output["truncated"].numpy(),
    }
    texts = _said((row[start:end] for row, start, end in rows), model_folder)
    return found, as_block(_behind(earlier, range(len(ids)), tokens)), texts


def _said(completions: Iterable[Sequence[int]], model_folder: Path) -> Block:
    """The block of texts, of completions without the tokens before; none is empty."""
    tokenizer, found = _tokenizer(model_folder), list(completions)
    return {
        "texts": [decoded(tokenizer, each) for each in found],
        "last_token_ids": [int(each[-1]) if len(each) else None for each in found],
    }


def _behind(
    earlier: Mapping[str, torch.Tensor], rows: Sequence[int], tokens: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The columns of new tokens, with what earlier turns have put into the same rows.

    Args:
        earlier: Columns of some rows, 0 where those end.
        rows: Which rows of `tokens` these are.
        tokens: 0 but at new tokens, which come behind; `input_ids` are whole.
    """
    for name, values in earlier.items():
        if name != "input_ids":
            cut = values[:, : tokens[name].shape[1]]  # rows that have ended may have been longer
            tokens[name][list(rows), : cut.shape[1]] += cut
    return tokens


def whole_requests(batch: BatchedDataDict) -> tuple[BatchedDataDict, dict[str, torch.Tensor]]:
    """Requests with all their tokens, of those that go on behind rows of blocks.

    Args:
        batch: As for `generate`, and perhaps `before [B]`, `HeldRows` with the columns of
            `HeldCompletions.tokens`, and `before_lengths [B]`: how many of their tokens come before
            `input_ids`.

    Returns:
        The requests, and the columns `before` with a value a token of what came before, 0 where
        that ends; none where nothing did.
    """
    if "before" not in batch:
        return batch, {}
    columns = dict(batch)
    rows, lengths = columns.pop("before"), columns.pop("before_lengths")
    before, behind = rows.fetched(), columns["input_lengths"]
    total = lengths + behind
    ids = torch.zeros(len(total), int(total.max()) if len(total) else 0, dtype=torch.long)
    place = torch.arange(ids.shape[1])
    is_before = place < lengths[:, None]
    is_behind = ~is_before & (place < total[:, None])
    held = torch.arange(before["input_ids"].shape[1]) < lengths[:, None]
    asked = torch.arange(columns["input_ids"].shape[1]) < behind[:, None]
    ids[is_before] = before["input_ids"][held]
    ids[is_behind] = columns["input_ids"][asked]
    return BatchedDataDict({**columns, "input_ids": ids, "input_lengths": total}), before


def lengths_before(batch: BatchedDataDict) -> torch.Tensor:
    """`[B]`: all tokens before each completion, here and in rows of blocks."""
    lengths: torch.Tensor = batch["input_lengths"] + batch.get("before_lengths", 0)
    return lengths


def submit(
    backend: Any, *, names: Sequence[int], batch: BatchedDataDict, first_version: int
) -> None:
    """Hands requests to a streaming engine, also such as go on behind rows of blocks.

    Args:
        backend: The engine's.
        names: Its names of the requests.
        batch: As `whole_requests` takes it.
        first_version: As the engine takes it.
    """
    backend.submit(names, whole_requests(batch)[0], first_version)


def hand_over(
    backend: Any,
    *,
    names: Sequence[int],
    model_folder: Path,
    going_on: Sequence[int] = (),
    before: HeldRows | None = None,
) -> tuple[None, Block, Block]:
    """Completions of a streaming engine as two blocks: of tokens, and of texts.

    Args:
        backend: The engine's.
        names: Of completions that it keeps.
        model_folder: Of the tokenizer.
        going_on: Which of them, by their place, went on behind rows of blocks.
        before: These rows.
    """
    finished = backend.hand_over(names)
    completions = [each.completion for each in finished]
    batch = collate_completions(
        [each.prompt for each in finished], [each.token_ids for each in completions]
    )
    mask = batch["token_mask"]
    logprobs = torch.zeros(mask.shape)
    logprobs[mask] = flat_tensor((each.logprobs for each in completions), np.float32)
    versions = torch.zeros(mask.shape, dtype=torch.long)
    versions[mask] = flat_tensor((each.weight_versions for each in completions), np.int64)
    tokens = {
        "input_ids": batch["input_ids"],
        "token_mask": mask,
        "generation_logprobs": logprobs,
        "weight_versions": versions,
    }
    if before is not None:
        tokens = _behind(before.fetched(), going_on, tokens)
    texts = _said((each.token_ids for each in completions), model_folder)
    return None, as_block(tokens), texts


def without_tokens(prompts: Sequence[Sequence[int]]) -> HeldCompletions:
    """Completions of a stream that never came: of 0 tokens, in this process."""
    batch = collate_completions(prompts, [()] * len(prompts))
    mask = batch["token_mask"]
    tokens = {
        "input_ids": batch["input_ids"],
        "token_mask": mask,
        "generation_logprobs": torch.zeros(mask.shape),
        "weight_versions": torch.zeros(mask.shape, dtype=torch.long),
    }
    size = [len(prompts)]
    texts = InProcess({"texts": [""] * len(prompts), "last_token_ids": [None] * len(prompts)})
    return HeldCompletions(
        batch["input_lengths"].numpy(),
        np.zeros(len(prompts), np.int64),
        np.ones(len(prompts), np.bool_),
        HeldRows.of_blocks([InProcess(as_block(tokens))], size),
        HeldRows.of_blocks([texts], size),
    )


def joined(answers: "list[tuple[dict[str, Any], Any, Any]]") -> HeldCompletions:
    """The engines' answers, whose blocks are references, in order."""
    sizes = [len(found["input_lengths"]) for found, _, _ in answers]
    columns = {
        name: np.concatenate([found[name] for found, _, _ in answers]) for name in answers[0][0]
    }
    tokens, texts = ([answer[place] for answer in answers] for place in (1, 2))
    return HeldCompletions(
        **columns,
        tokens=HeldRows.of_blocks(tokens, sizes),
        texts=HeldRows.of_blocks(texts, sizes),
    )
