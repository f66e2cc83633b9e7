"""Generation with transformers' loop, for models without an inference engine."""

from typing import Any

import torch

from nemo_rl_core.backends.decoding.draws import Decoding
from nemo_rl_core.backends.decoding.requests import Completed, DecodingRequest, padded_on_the_left


@torch.no_grad()
def complete(
    model: Any, requests: list[DecodingRequest], decoding: Decoding, *, stop_token_ids: list[int]
) -> list[Completed]:
    """Completes prompts with the model's KV cache; `decoding` samples the tokens.

    Args:
        model: A transformers causal model, whole on this rank.
        requests: The rows.
        decoding: Sampler of the same rows, at their start.
        stop_token_ids: Tokens that end a completion; may be empty.
    """
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    if not requests:
        return []
    config = GenerationConfig(
        max_new_tokens=max(request.max_new_tokens for request in requests),
        eos_token_id=stop_token_ids or None,
        pad_token_id=stop_token_ids[0] if stop_token_ids else 0,  # behind the end of a row
    )

    def force_sampled_token(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        tokens = decoding.draw(logits).to(logits.device)
        # The loop takes the largest logit, which must be the sampled token.
        return torch.zeros_like(logits).scatter_(1, tokens[:, None], 1.0)

    def ended(ids: torch.Tensor, _: torch.Tensor, **__: Any) -> torch.Tensor:
        return decoding.ended.to(ids.device)

    ids, mask = padded_on_the_left([request.prompt for request in requests])
    published = model.generation_config
    model.generation_config = GenerationConfig()  # would fill the fields that `config` leaves open
    try:
        model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=config,
            logits_processor=LogitsProcessorList([force_sampled_token]),
            stopping_criteria=StoppingCriteriaList([ended]),
        )
    finally:
        model.generation_config = published
    return decoding.completed()
