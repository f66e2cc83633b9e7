"""What is asked of an engine, and what it answers, one record each.

Whoever rolls out speaks in these; a batch of tensors is only how `GenerationInterface.generate`
takes many at once. An engine that streams takes the same records one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.models.interfaces import GenerationInterface


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Tokens to be continued.

    Attributes:
        token_ids: All that came before, prompt and earlier turns.
        seed: Of this request alone, 31 bits.
        stop_strings: Texts that end the answer; they are part of it.
        max_new_tokens: At most so many; None leaves it to the engine's config.
    """

    token_ids: tuple[int, ...]
    seed: int
    stop_strings: tuple[str, ...] = ()
    max_new_tokens: int | None = None


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
    ends = output["unpadded_sequence_lengths"].tolist()
    starts = (output["unpadded_sequence_lengths"] - output["generation_lengths"]).tolist()
    return [
        CompletionResult(
            tuple(ids[start:end].tolist()), tuple(logprobs[start:end].tolist()), bool(truncated)
        )
        for ids, logprobs, truncated, start, end in zip(
            output["output_ids"],
            output["logprobs"],
            output["truncated"].tolist(),
            starts,
            ends,
            strict=True,
        )
    ]


def as_batch(requests: Sequence[CompletionRequest]) -> BatchedDataDict:
    """At least one request as `GenerationInterface.generate` takes them."""
    lengths = [len(request.token_ids) for request in requests]
    input_ids = torch.zeros(len(requests), max(lengths), dtype=torch.long)
    for row, request in enumerate(requests):
        input_ids[row, : lengths[row]] = torch.tensor(request.token_ids)
    batch = BatchedDataDict(
        {
            "input_ids": input_ids,
            "input_lengths": torch.tensor(lengths),
            "seeds": torch.tensor([request.seed for request in requests]),
        }
    )
    if any(request.stop_strings for request in requests):
        batch["stop_strings"] = [list(request.stop_strings) or None for request in requests]
    limits = [request.max_new_tokens for request in requests]
    if None not in limits:
        batch["max_new_tokens"] = torch.tensor(limits)
    return batch
