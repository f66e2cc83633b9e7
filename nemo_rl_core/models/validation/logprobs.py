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
    """Returns whether trainer and engine agree on the logprobs of the engine's samples.

    Args:
        training_backend: Trainer with the engine's weights and temperature.
        inference_backend: Engine that completes the prompts of `test_data`.
        test_data: Same as in `log_probability_error`.
        threshold: Largest `token_mult_prob_error` that counts as agreement; at least 1.

    Returns:
        True within the threshold; False for NaN.

    Raises:
        ConsistencyError: If the engine generated nothing to compare.
    """
    return log_probability_error(training_backend, inference_backend, test_data) <= threshold


def log_probability_error(
    training_backend: PolicyInterface,
    inference_backend: GenerationInterface,
    test_data: BatchedDataDict,
) -> float:
    """Computes `token_mult_prob_error = mean exp|gen - prev|` of tokens that the engine draws.

    Args:
        training_backend: The trainer.
        inference_backend: The engine.
        test_data: Prompts `input_ids [B, T]`, padded on the right, with `input_lengths [B]` or
            `attention_mask [B, T]`; `seeds [B]` are the row numbers by default.

    Returns:
        The error; 1 if all logprobs are equal.

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
    """Returns prompts with all columns that an engine reads."""
    batch = with_lengths(test_data)
    if "seeds" not in batch:
        batch["seeds"] = torch.arange(len(batch["input_ids"]))
    return batch
