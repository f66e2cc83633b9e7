"""Proof that a rollout engine computes with the right weights.

The engine completes a few fixed prompts, and a reference computes the logprobs of the same tokens
under the same weights: the policy that sent them, or transformers if they came from a folder.
Unlike the gate of a step, the proof needs no rollouts that the current weights have drawn.
"""

from pathlib import Path

import torch
from torch import Tensor

from nemo_rl_core.config.model import DType
from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.errors import ConsistencyError
from nemo_rl_core.models.validation.gate import check_consistency

_PROMPT_LENGTHS = (1, 2, 3, 5, 7, 9, 11, 13)
_NUM_NEW_TOKENS = 3
"""One token from prefill, and two from decoding, which uses other kernels."""


_LEAST_BOUND_OF_HALF, _LEAST_BOUND_OF_FP8 = 1.25, 1.5
_BOUND_ON_CPU = 1.002


def proof_bounds(
    gate: GateConfig, *, dtype: DType, is_quantized: bool, has_gpu: bool = True
) -> GateConfig:
    """Returns the bounds of proofs: those of the gate of a step, or wider ones for rounding.

    The prompts are random tokens, after which logits are large, but no token is likely. In bfloat16
    logits of 16 to 32 are multiples of 0.125: two correct engines of SmolLM2-135M differ by 1.06 to
    1.09 (six draws), and one in which a single layer of 30 is wrong by 1.55 to 481. The
    bound of FP8 is chosen, not measured. In float32 on a CPU, which has no TF32, correct engines
    differ from the trainer by less than 1e-4, and wrong ones by 0.01 and more (tiny models of all
    types), which the gate of a step would accept.
    """
    is_usual = gate.max_token_mult_prob_error <= GateConfig().max_token_mult_prob_error
    if dtype == "float32" and not (is_quantized or has_gpu) and is_usual:
        return gate.model_copy(update={"max_token_mult_prob_error": _BOUND_ON_CPU})
    least = 1.0
    if dtype != "float32":
        least = _LEAST_BOUND_OF_HALF
    if is_quantized:
        least = _LEAST_BOUND_OF_FP8
    token = max(gate.max_token_mult_prob_error, least)
    sequence = max(gate.max_sequence_mult_prob_error, 2 * least)
    return gate.model_copy(
        update={"max_token_mult_prob_error": token, "max_sequence_mult_prob_error": sequence}
    )


def proof_prompts(model_folder: Path, *, max_model_len: int) -> BatchedDataDict:
    """Draws a few short prompts of a model's ordinary tokens, the same in each call.

    Args:
        model_folder: Folder with the tokenizer. Added tokens are left out, as they may represent
            an image.

    Returns:
        `input_ids [B, T]`, `input_lengths [B]`, `seeds [B]` and `max_new_tokens [B]`.
    """
    tokenizer = load_tokenizer(model_folder)
    added = tokenizer.added_tokens_decoder
    ordinary = torch.tensor([token for token in range(len(tokenizer)) if token not in added])
    lengths = [length for length in _PROMPT_LENGTHS if length < max_model_len]
    drawn = torch.randint(
        len(ordinary), (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0)
    )
    return BatchedDataDict(
        {
            "input_ids": ordinary[drawn],
            "input_lengths": torch.tensor(lengths),
            "seeds": torch.arange(len(lengths)),
            "max_new_tokens": torch.full((len(lengths),), _NUM_NEW_TOKENS),
        }
    )


def check_proof(batch: BatchedDataDict, gate: GateConfig, *, reference: str) -> float:
    """Refuses an engine whose logprobs differ from those of the reference.

    Args:
        batch: Completions with the columns of `check_consistency`, with the same weights in both.
        reference: Name of the model that computed `prev_logprobs`, for errors.
    """
    return _measured(
        batch,
        gate,
        reference=reference,
        occasion="of fixed prompts, at the same weights",
        fix="the engine does not have the weights that it was given, or computes this architecture "
        "differently: try generation: {backend: hf}; if few sequences are off a little, it is "
        "numerics: try dtype: float32, take training.float8 out, or, where there is a trainer, "
        "raise the bounds of its gate",
    )


def check_unchanged(
    prompts: BatchedDataDict, first: Tensor, last: Tensor, gate: GateConfig
) -> None:
    """Refuses an engine whose logprobs have changed since it was given its weights.

    Args:
        prompts: Prompts from `proof_prompts`.
        first: `[B, T]` logprobs of the prompts when the engine was given the weights.
        last: `[B, T]` logprobs of the prompts after it has sampled with them.
    """
    lengths = prompts["input_lengths"]
    position = torch.arange(1, first.shape[1])
    _measured(
        BatchedDataDict(
            {
                "generation_logprobs": last[:, 1:],
                "prev_logprobs": first[:, 1:],
                "token_mask": position < lengths[:, None],
                "sample_mask": torch.ones(len(lengths)),
            }
        ),
        gate,
        reference="the same engine before",
        occasion="of fixed prompts, although it was given no weights in between",
        fix="something has changed the engine's weights in its memory; run the same command again: "
        "it resumes from the last save",
    )


def _measured(
    batch: BatchedDataDict, gate: GateConfig, *, reference: str, occasion: str, fix: str
) -> float:
    try:
        _, metrics = check_consistency(batch, gate, reference=reference)
    except ConsistencyError as error:
        raise ConsistencyError(
            f"{error.problem} ({occasion})", expected=error.expected, got=error.got, fix=fix
        ) from error
    return metrics["token_mult_prob_error"]
