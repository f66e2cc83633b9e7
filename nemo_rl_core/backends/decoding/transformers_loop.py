"""Generation with transformers' loop, for models without an inference engine."""

import logging
import math
from typing import Any

import torch

from nemo_rl_core.backends.decoding.requests import (
    Completed,
    Decoding,
    DecodingRequest,
    as_batch,
    padded_on_the_left,
)
from nemo_rl_core.backends.training.rounding import rounding_bound, size_of
from nemo_rl_core.config.generation import SamplingConfig
from nemo_rl_core.config.model import DType
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ModelError
from nemo_rl_core.planning.model_parts import (
    independent_length,
    layers_of,
    reset_recurrent_states,
    reset_rotary,
)

_LOG = logging.getLogger(__name__)
_PROBE_TOKEN_ID = 5
"""A token id that is in any vocabulary and does not end a sequence in the probe."""
_NUM_PROBED = 4
_LONGEST_WINDOW = 512
"""Longest sliding window that the probe covers."""


def complete(
    model: Any,
    requests: list[DecodingRequest],
    config: SamplingConfig,
    *,
    greedy: bool,
    stop_token_ids: list[int],
    tokenizer: Any,
    max_batch_tokens: float,
) -> BatchedDataDict:
    """Completes prompts with the model's KV cache.

    If the batch may grow beyond `max_batch_tokens`, each row is completed separately, so that its
    tokens do not depend on other rows.

    Args:
        max_batch_tokens: Longest row of a batch, from `longest_batch`.
    """
    if not requests:
        return as_batch([], [])
    # Rows that have ended are padded to the length of the longest row of their batch.
    longest = max(len(each.prompt) for each in requests)
    longest += max(each.max_new_tokens for each in requests)
    completed: list[Completed] = []
    for batch in [requests] if longest <= max_batch_tokens else [[request] for request in requests]:
        decoding = Decoding(
            batch, config, greedy=greedy, stop_token_ids=stop_token_ids, tokenizer=tokenizer
        )
        _complete_together(model, batch, decoding, stop_token_ids)
        completed += decoding.completed()
    return as_batch(requests, completed)


@torch.no_grad()
def _complete_together(
    model: Any, requests: list[DecodingRequest], decoding: Decoding, stop_token_ids: list[int]
) -> None:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    config = GenerationConfig(
        max_new_tokens=max(request.max_new_tokens for request in requests),
        eos_token_id=stop_token_ids or None,
        pad_token_id=stop_token_ids[0] if stop_token_ids else 0,  # after the end of a row
    )

    def force_sampled_token(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        tokens = decoding.draw(logits).to(logits.device)
        # The loop takes the largest logit, which must be the sampled token.
        return torch.zeros_like(logits).scatter_(1, tokens[:, None], 1.0)

    def ended(ids: torch.Tensor, _: torch.Tensor, **__: Any) -> torch.Tensor:
        return decoding.ended.to(ids.device)

    _generate(
        model,
        [request.prompt for request in requests],
        generation_config=config,
        logits_processor=LogitsProcessorList([force_sampled_token]),
        stopping_criteria=StoppingCriteriaList([ended]),
    )


def _generate(model: Any, prompts: list[list[int]], **options: Any) -> Any:
    from transformers import GenerationConfig

    reset_rotary(model)
    reset_recurrent_states(model)
    ids, mask = padded_on_the_left(prompts)
    published, text = model.generation_config, model.config.get_text_config()
    returns_routers = getattr(text, "output_router_logits", None)
    # The published config would fill in the fields that the options leave unset.
    model.generation_config = GenerationConfig()
    if returns_routers:  # they feed a loss that fails with padded prompts and a cache
        text.output_router_logits = False
    try:
        return model.generate(
            input_ids=ids.to(model.device), attention_mask=mask.to(model.device), **options
        )
    finally:
        model.generation_config = published
        if returns_routers:
            text.output_router_logits = True


@torch.no_grad()
def longest_batch(model: Any) -> float:
    """Checks the loop, and returns the longest row up to which rows may be padded to one batch.

    It is 0 if padded prompts get other logprobs than separate ones, else the model's
    `independent_length`, infinity for no limit.
    """
    dtype: DType = "float32" if model.dtype == torch.float32 else "bfloat16"
    name = type(model).__name__
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    longer = [3, 5, 4, 6, 5] * (1 + window // 5 if window <= _LONGEST_WINDOW else 1)
    prompts = [longer, [4, 6, 3]]

    def one_by_one() -> torch.Tensor:
        return torch.cat([_probed(model, [prompt]) for prompt in prompts])

    separate, bound = one_by_one(), rounding_bound(one_by_one, layers_of(model), dtype)
    difference = size_of(separate - torch.stack([_forward(model, each) for each in prompts]), dtype)
    if not difference < bound:
        raise ModelError(
            f"transformers' generation loop computes different logprobs than {name}'s forward pass",
            expected=f"logprobs that differ by less than {bound:.3g}",
            got=f"{difference:.3g}",
            fix="generate with vLLM (generation.backend: vllm), or choose another model",
        )
    try:
        difference = size_of(separate - _probed(model, prompts), dtype)
    except RuntimeError as error:  # the padding mask does not fit a state (Falcon-H1)
        if type(error) is not RuntimeError:  # memory or communication
            raise
        difference = float("inf")
    if not difference < bound:
        _LOG.warning(
            "%s computes different logprobs (by %.3g) for padded prompts, so each prompt is "
            "completed separately",
            name,
            difference,
        )
        return 0
    return independent_length(model.config) or math.inf


def _probed(model: Any, prompts: list[list[int]]) -> torch.Tensor:
    """Returns `[B, 4, V]` logprobs of the next tokens from the generation loop."""
    from transformers import GenerationConfig, LogitsProcessorList

    def force(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(logits).index_fill_(
            1, torch.tensor(_PROBE_TOKEN_ID, device=logits.device), 1
        )

    output = _generate(
        model,
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=_NUM_PROBED, output_logits=True, return_dict_in_generate=True
        ),
        logits_processor=LogitsProcessorList([force]),
    )
    return torch.stack(output.logits, dim=1).float().log_softmax(-1)


def _forward(model: Any, prompt: list[int]) -> torch.Tensor:
    """Returns `[4, V]` logprobs of the same tokens from one forward pass."""
    ids = torch.tensor([prompt + [_PROBE_TOKEN_ID] * (_NUM_PROBED - 1)], device=model.device)
    logits: torch.Tensor = model(input_ids=ids).logits[0, -_NUM_PROBED:]
    return logits.float().log_softmax(-1)
