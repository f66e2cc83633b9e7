"""Whether a trainer and an engine give the same tokens the same probability."""

import torch

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.models.columns import as_training_batch, with_lengths
from nemo_rl_core.models.interfaces import GenerationInterface, PolicyInterface
from nemo_rl_core.models.validation.gate import token_mult_prob_error


def validate_log_probability_consistency(
    training_backend: PolicyInterface,
    inference_backend: GenerationInterface,
    test_data: BatchedDataDict,
    threshold: float = 1.05,
) -> bool:
    """Whether the trainer's logprobs are those that the engine reports of its own samples.

    Args:
        training_backend: Holds the weights that the engine holds; of the engine's temperature.
        inference_backend: Completes the prompts of `test_data`.
        test_data: As `log_probability_error` takes it.
        threshold: The largest `token_mult_prob_error` that counts as agreement; 1 is the least.

    Returns:
        True within the threshold; never for what is not a number.

    Raises:
        ConsistencyError: If the engine generated nothing to compare.
    """
    return log_probability_error(training_backend, inference_backend, test_data) <= threshold


def log_probability_error(
    training_backend: PolicyInterface,
    inference_backend: GenerationInterface,
    test_data: BatchedDataDict,
) -> float:
    """`token_mult_prob_error = mean exp|gen - prev|` over what the engine generates.

    Args:
        training_backend: The trainer.
        inference_backend: The engine.
        test_data: Prompts `input_ids [B, T]`, padded on the right, with `input_lengths [B]` or
            `attention_mask [B, T]`; `seeds [B]` where they are not to be the row numbers.

    Returns:
        1 where all logprobs are equal.

    Raises:
        ConsistencyError: If the engine generated nothing to compare.
    """
    inference_backend.prepare_for_generation()
    output = inference_backend.generate(as_requests(test_data), greedy=False)
    inference_backend.finish_generation()
    batch = as_training_batch(output)
    trained = training_backend.get_logprobs(batch)["logprobs"]
    return float(token_mult_prob_error(output["logprobs"][:, 1:], trained, batch["token_mask"]))


def as_requests(test_data: BatchedDataDict) -> BatchedDataDict:
    """Prompts with all the columns that an engine reads."""
    batch = with_lengths(test_data)
    if "seeds" not in batch:
        batch["seeds"] = torch.arange(len(batch["input_ids"]))
    return batch
