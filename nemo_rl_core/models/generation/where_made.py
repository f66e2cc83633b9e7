"""Completions that stay where an engine has made them, as a trainer reads them.

`generate` runs in an engine's worker, with its backend as the first argument.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_rl_core.data.pretrained import decoded, load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate_completions
from nemo_rl_core.distributed.held_rows import Block, HeldRows, as_block

_tokenizer = lru_cache(maxsize=2)(load_tokenizer)


@dataclass(frozen=True)
class HeldCompletions:
    """Completions of `B` requests: lengths here, all else in blocks.

    Attributes:
        input_lengths: `[B]` tokens of prompts and completions.
        completion_lengths: `[B]` tokens of the completions.
        truncated: `[B]` bool: a bound ended the completion.
        tokens: `[B]`, with the columns `input_ids`, `token_mask` (1 on the completion) and
            `generation_logprobs`.
        texts: `[B]`, with the column `texts`: the completions, decoded.
    """

    input_lengths: "np.ndarray[Any, np.dtype[np.int64]]"
    completion_lengths: "np.ndarray[Any, np.dtype[np.int64]]"
    truncated: "np.ndarray[Any, np.dtype[np.bool_]]"
    tokens: HeldRows
    texts: HeldRows


def requests_of_engine(
    prompts: Sequence[Sequence[int]],
    prompt: "np.ndarray[Any, np.dtype[np.int64]]",
    seeds: "np.ndarray[Any, np.dtype[np.int64]]",
    engine: int,
    num_engines: int,
) -> dict[str, Any]:
    """What one of several engines completes: consecutive requests, with each prompt once.

    Args:
        prompts: Token ids of `P` prompts, which the worker makes a tensor of.
        prompt: `[B]`, rising: which of the prompts each request has.
        seeds: `[B]`.
        engine: Index of the engine; the first ones have one request more where need be.
        num_engines: How many.
    """
    rows, left_over = divmod(len(prompt), num_engines)
    start = engine * rows + min(engine, left_over)
    own = range(start, start + rows + (engine < left_over))
    if not own:
        return {"prompts": prompts[:1], "prompt": prompt[:0], "seeds": seeds[:0]}
    first, last = int(prompt[own[0]]), int(prompt[own[-1]])
    return {
        "prompts": prompts[first : last + 1],
        "prompt": prompt[own.start : own.stop] - first,
        "seeds": seeds[own.start : own.stop],
    }


def generate(
    backend: Any, *, batch: Mapping[str, Any], greedy: bool, model_folder: Path
) -> tuple[dict[str, Any], Block, Block]:
    """Completes what `requests_of_engine` gives; returns the lengths, and two blocks."""
    prompts = collate_completions(batch["prompts"], [()] * len(batch["prompts"]))
    chosen = torch.from_numpy(batch["prompt"].copy())
    requests = BatchedDataDict(
        {name: prompts[name][chosen] for name in ("input_ids", "input_lengths")}
    )
    requests["seeds"] = torch.from_numpy(batch["seeds"].copy())
    output = backend.generate(requests, greedy=greedy)
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
