"""Completions by transformers' own loop, for a model without an inference engine."""

from typing import Any

import torch

from nemo_rl_core.backends.decoding.draws import Decoding
from nemo_rl_core.backends.decoding.requests import Completed, DecodingRequest, padded_on_the_left


@torch.no_grad()
def complete(
    model: Any, requests: list[DecodingRequest], decoding: Decoding, *, stop_token_ids: list[int]
) -> list[Completed]:
    """Lets a model complete prompts with its KV cache; `decoding` draws the tokens.

    Args:
        model: A transformers causal model, whole on this rank.
        requests: The rows.
        decoding: Of the same rows, at their start.
        stop_token_ids: Tokens that end a completion.
    """
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    if not requests:
        return []
    # Neutral, so that of the model's own generation config nothing is used.
    config = GenerationConfig(
        max_new_tokens=max(request.max_new_tokens for request in requests),
        eos_token_id=stop_token_ids,
        pad_token_id=stop_token_ids[0],
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
    )

    def drawn(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        tokens = decoding.draw(logits).to(logits.device)
        # The loop takes the largest: that is to be the one drawn.
        return torch.zeros_like(logits).scatter_(1, tokens[:, None], 1.0)

    def ended(ids: torch.Tensor, _: torch.Tensor, **__: Any) -> torch.Tensor:
        return decoding.ended.to(ids.device)

    ids, mask = padded_on_the_left([request.prompt for request in requests])
    model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        generation_config=config,
        logits_processor=LogitsProcessorList([drawn]),
        stopping_criteria=StoppingCriteriaList([ended]),
    )
    return decoding.completed()
