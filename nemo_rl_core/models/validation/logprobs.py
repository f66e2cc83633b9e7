"""Whether a trainer and an engine give the same tokens the same probability."""

import torch
from torch import Tensor

from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConsistencyError
from nemo_rl_core.functional.importance import token_mult_prob_error
from nemo_rl_core.models.interfaces import GenerationInterface, PolicyInterface


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
    added: dict[str, Tensor] = {}
    if "input_lengths" not in test_data:
        added["input_lengths"] = test_data["attention_mask"].sum(dim=1)
    if "seeds" not in test_data:
        added["seeds"] = torch.arange(len(test_data["input_ids"]))
    return BatchedDataDict({**test_data, **added})


def as_training_batch(output: BatchedDataDict) -> BatchedDataDict:
    """What an engine has generated, as a trainer reads it: the completions alone count.

    Raises:
        ConsistencyError: If there are none.
    """
    ids, ends = output["output_ids"], output["unpadded_sequence_lengths"]
    starts = ends - output["generation_lengths"]
    place = torch.arange(1, ids.shape[1])  # position t of a mask stands for token t + 1
    mask = (place >= starts[:, None]) & (place < ends[:, None])
    if not mask.any():
        raise ConsistencyError(
            "the engine has generated no token, so there is nothing to compare",
            expected="prompts that leave room for a completion",
            got=f"{len(ids)} rows without one",
        )
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": ends,
            "token_mask": mask,
            "sample_mask": torch.ones(len(ids)),
        }
    )
