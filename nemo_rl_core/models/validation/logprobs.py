"""Whether a trainer and an engine give the same tokens the same probability."""

import torch

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.models.columns import as_training_batch, with_lengths
from nemo_rl_core.models.interfaces import GenerationInterface, PolicyInterface
from nemo_rl_core.models.policy.custom import CustomPolicyAdapter
from nemo_rl_core.models.validation.gate import token_mult_prob_error


def validate_log_probability_consistency(
    training_backend: PolicyInterface,
    inference_backend: GenerationInterface,
    test_data: BatchedDataDict,
    threshold: float = 1.05,
) -> bool:
    """Returns whether trainer and engine agree on the logprobs of the engine's samples.

    Args:
        training_backend: Trainer with the engine's weights.
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

    If the temperature of the trainer is 1 and that of the engine is not, completions are greedy,
    for which engines report logprobs of temperature 1.

    Args:
        training_backend: The trainer. A custom one may return `[B, T, V]` logprobs.
        inference_backend: The engine.
        test_data: Prompts `input_ids [B, T]`, padded on the right, with `input_lengths [B]` or
            `attention_mask [B, T]`; `seeds [B]` are the row numbers by default.

    Returns:
        The error; 1 if all logprobs are equal.

    Raises:
        ConsistencyError: If the engine generated nothing to compare.
        ConfigError: If the temperatures cannot be compared.
    """
    drawn_at = getattr(getattr(inference_backend, "config", None), "temperature", 1.0)
    scored_at = getattr(training_backend, "temperature", drawn_at)
    is_greedy = scored_at != drawn_at
    if is_greedy and scored_at != 1:
        raise ConfigError(
            "trainer and engine have different temperatures",
            expected=f"a trainer of temperature {drawn_at:g} or 1",
            got=f"{scored_at:g}",
            fix=f"HuggingFacePolicy(..., temperature={drawn_at or 1:g})",
        )
    inference_backend.prepare_for_generation()
    output = inference_backend.generate(as_requests(test_data), greedy=is_greedy)
    inference_backend.finish_generation()
    batch = as_training_batch(output)
    policy = CustomPolicyAdapter(training_backend, temperature=1.0 if is_greedy else drawn_at)
    trained = policy.get_logprobs(batch)["logprobs"]
    return float(token_mult_prob_error(output["logprobs"][:, 1:], trained, batch["token_mask"]))


def as_requests(test_data: BatchedDataDict) -> BatchedDataDict:
    """Returns prompts with all columns that an engine reads."""
    batch = with_lengths(test_data)
    if "seeds" not in batch:
        batch["seeds"] = torch.arange(len(batch["input_ids"]))
    return batch
