"""Completions that stay where an engine has made them, as a trainer reads them.

`generate` runs in an engine's worker, with its backend as the first argument.
"""

from collections.abc import Mapping, Sequence
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
from nemo_rl_core.distributed.held_rows import Block, HeldRows, InProcess, as_block

_tokenizer = lru_cache(maxsize=2)(load_tokenizer)


@dataclass(frozen=True)
class HeldCompletions:
    """Completions of `B` requests: lengths here, all else in blocks.

    Attributes:
        input_lengths: `[B]` tokens of prompts and completions.
        completion_lengths: `[B]` tokens of the completions.
        truncated: `[B]` bool: a bound ended the completion.
        tokens: `[B]`, with the columns `input_ids`, `token_mask` (1 on the completion),
            `generation_logprobs` and, of a streaming engine, `weight_versions`.
        texts: `[B]`, with the column `texts`: the completions, decoded.
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
    tokenizer = _tokenizer(model_folder)
    rows = zip(ids.numpy(), starts.tolist(), ends.tolist(), strict=True)
    texts = [decoded(tokenizer, row[start:end]) for row, start, end in rows]
    found = {
        "input_lengths": ends.numpy(),
        "completion_lengths": lengths.numpy(),
        "truncated": output["truncated"].numpy(),
    }
    return found, as_block(tokens), {"texts": texts}


def hand_over(
    backend: Any, *, names: Sequence[int], model_folder: Path
) -> tuple[None, Block, Block]:
    """Completions of a streaming engine as two blocks: of tokens, and of texts.

    Args:
        backend: The engine's.
        names: Of completions that it keeps.
        model_folder: Of the tokenizer.
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
    tokenizer = _tokenizer(model_folder)
    texts = [decoded(tokenizer, each.token_ids) for each in completions]
    return None, as_block(tokens), {"texts": texts}


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
    size, texts = [len(prompts)], InProcess({"texts": [""] * len(prompts)})
    return HeldCompletions(
        batch["input_lengths"].numpy(),
        np.zeros(len(prompts), np.int64),
        np.ones(len(prompts), np.bool_),
        HeldRows.of_blocks([InProcess(as_block(tokens))], size),
        HeldRows.of_blocks([texts], size).of_column("texts"),
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
        texts=HeldRows.of_blocks(texts, sizes).of_column("texts"),
    )
