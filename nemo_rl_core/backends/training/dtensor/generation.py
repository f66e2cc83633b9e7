"""Completions by transformers' own loop, for a policy without an inference engine."""

from collections.abc import Collection
from typing import Any

import torch

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict


@torch.no_grad()
def generate(
    model: Any,
    batch: BatchedDataDict,
    *,
    greedy: bool,
    max_new_tokens: int,
    temperature: float,
    stop_token_ids: Collection[int],
    seed: int,
) -> BatchedDataDict:
    """Completes each row of `input_ids [B, T]` up to `input_lengths [B]`.

    Args:
        model: A transformers causal model, whole on this rank.
        batch: The prompts, padded on the right.
        greedy: The likeliest token each time; else one drawn under `temperature`.
        max_new_tokens: Of a completion, its stop token included.
        temperature: What logits are divided by before drawing.
        stop_token_ids: Tokens that end a completion.
        seed: Of the draws of this call; the process's own random state stays as it was.

    Returns:
        `output_ids [B, T']` prompts and completions, padded on the right; `logprobs [B, T']` of the
        drawn tokens in nats, 0 elsewhere (of the plain distribution where greedy);
        `generation_lengths [B]`, `unpadded_sequence_lengths [B]`, and `truncated [B]`: whether no
        stop token came.
    """
    from transformers import GenerationConfig

    prompts, width = batch["input_lengths"], batch["input_ids"].shape[1]
    stops = sorted(stop_token_ids)
    drawn = {"do_sample": False} if greedy else {"do_sample": True, "temperature": temperature}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=stops,
        pad_token_id=stops[0],
        top_k=0,
        top_p=1.0,
        output_logits=True,
        return_dict_in_generate=True,
        **drawn,
    )
    # The prompt's last token must be the row's last: `[B, T]` places of tokens, moved to the right.
    moved = (torch.arange(width) - (width - prompts[:, None])).clamp(min=0)
    is_prompt = torch.arange(width) >= width - prompts[:, None]
    device = model.device
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        output = model.generate(
            input_ids=batch["input_ids"].gather(1, moved).to(device),
            attention_mask=is_prompt.long().to(device),
            generation_config=config,
        )
    completions = output.sequences[:, width:].cpu()
    scale = 1.0 if greedy else temperature
    logprobs = torch.stack(
        [
            torch.log_softmax(logits.float().cpu() / scale, -1).gather(1, tokens[:, None])[:, 0]
            for logits, tokens in zip(output.logits, completions.T, strict=True)
        ],
        dim=1,
    )
    stopped = torch.isin(completions, torch.tensor(stops))
    truncated = ~stopped.any(1)
    lengths = torch.where(truncated, completions.shape[1], stopped.int().argmax(1) + 1)
    return _joined(batch, completions, logprobs, lengths, truncated)


def _joined(
    batch: BatchedDataDict,
    completions: torch.Tensor,
    logprobs: torch.Tensor,
    lengths: torch.Tensor,
    truncated: torch.Tensor,
) -> BatchedDataDict:
    """Prompts with completions right behind them, whatever lay between."""
    ends = batch["input_lengths"] + lengths
    ids = torch.zeros(len(ends), int(ends.max()), dtype=torch.long)
    whole_logprobs = torch.zeros(ids.shape)
    for row, (start, end) in enumerate(
        zip(batch["input_lengths"].tolist(), ends.tolist(), strict=True)
    ):
        ids[row, :start] = batch["input_ids"][row, :start]
        ids[row, start:end] = completions[row, : end - start]
        whole_logprobs[row, start:end] = logprobs[row, : end - start]
    return BatchedDataDict(
        {
            "output_ids": ids,
            "generation_lengths": lengths,
            "unpadded_sequence_lengths": ends,
            "logprobs": whole_logprobs,
            "truncated": truncated,
        }
    )
