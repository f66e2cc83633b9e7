"""Single-turn rollouts: groups of completions of the same prompt."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.models.interfaces import GenerationInterface
from nemo_rl_core.types import Completion, Prompt, Rollout


class RolloutEngine:
    """Samples completions, each under a seed of its own.

    A request's seed depends on the run's seed, the step, the prompt's place and the sample's place
    alone, so that a rerun, or a resumed run, draws the same tokens.

    Args:
        generation: The engine.
        tokenizer: Decodes completions; token ids are never made from text again.
        seed: The run's seed.
    """

    def __init__(self, generation: GenerationInterface, tokenizer: Any, *, seed: int) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._seed = seed

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        num_generations_per_prompt: int,
        step: int,
        first_place: int = 0,
        greedy: bool = False,
    ) -> list[Rollout]:
        """Completes every prompt, unscored.

        Args:
            prompts: `P` prompts.
            num_generations_per_prompt: G.
            step: Part of every request's seed.
            first_place: Of the first prompt, where the step asks more than once.
            greedy: Take the most likely token always.

        Returns:
            `P * G` rollouts; those of one prompt lie next to each other.
        """
        requests = [
            (prompt, request_seed(self._seed, step, place, sample))
            for place, prompt in enumerate(prompts, start=first_place)
            for sample in range(num_generations_per_prompt)
        ]
        output = self._generation.generate(_generation_batch(requests), greedy)
        texts = self._tokenizer.batch_decode(
            [ids for ids, _ in _completions(output)], skip_special_tokens=True
        )
        return [
            Rollout(prompt, Completion(tuple(ids), tuple(logprobs), bool(truncated)), text)
            for (prompt, _), (ids, logprobs), truncated, text in zip(
                requests, _completions(output), output["truncated"].tolist(), texts, strict=True
            )
        ]


def request_seed(seed: int, step: int, place: int, sample: int) -> int:
    """A 31-bit seed for one request."""
    key = f"{seed}/{step}/{place}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1


def _generation_batch(requests: Sequence[tuple[Prompt, int]]) -> BatchedDataDict:
    lengths = [len(prompt.token_ids) for prompt, _ in requests]
    input_ids = torch.zeros(len(requests), max(lengths), dtype=torch.long)
    for row, (prompt, _) in enumerate(requests):
        input_ids[row, : lengths[row]] = torch.tensor(prompt.token_ids)
    return BatchedDataDict(
        {
            "input_ids": input_ids,
            "input_lengths": torch.tensor(lengths),
            "seeds": torch.tensor([seed for _, seed in requests]),
        }
    )


def _completions(output: BatchedDataDict) -> list[tuple[list[int], list[float]]]:
    ends = output["unpadded_sequence_lengths"].tolist()
    starts = (output["unpadded_sequence_lengths"] - output["generation_lengths"]).tolist()
    return [
        (ids[start:end].tolist(), logprobs[start:end].tolist())
        for ids, logprobs, start, end in zip(
            output["output_ids"], output["logprobs"], starts, ends, strict=True
        )
    ]
