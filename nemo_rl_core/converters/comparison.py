"""Comparison of two models: their logprobs on the same tokens, and their weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.converters.folders import StoredWeights
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.process_group import rank

_MAX_TOKENS_PER_PASS = 2048


def compare_conversion(
    folder: Path, checkpoint: Path, batch: BatchedDataDict, training: MegatronTraining
) -> tuple[int, str | None, torch.Tensor | None]:
    """On each rank: number of tensors, first differing tensor, and logprobs of the last stage.

    Everything in float32, which represents every bfloat16 exactly.
    """
    from nemo_rl_core.backends.training.megatron.checkpoint import load_native_weights
    from nemo_rl_core.backends.training.megatron.model import build_model
    from nemo_rl_core.backends.training.megatron.topology import initialize_topology
    from nemo_rl_core.backends.training.megatron.weights import iter_hf_weights, load_hf_weights

    initialize_topology(training)
    stored = StoredWeights(folder)
    models = build_model(folder, training, "float32")
    load_hf_weights(models, folder)
    there_and_back = _first_differing(stored, iter_hf_weights(models))
    load_native_weights(checkpoint / "trainer", models)
    native = _first_differing(stored, iter_hf_weights(models))
    logprobs = _megatron_logprobs(models, batch)
    return len(stored.names), there_and_back or native, logprobs


def _first_differing(
    stored: StoredWeights, weights: Iterator[tuple[str, torch.Tensor]]
) -> str | None:
    """The first tensor that differs from the folder; every rank iterates, rank 0 compares."""
    differing: str | None = None
    left = set(stored.names)
    for name, tensor in weights:
        if rank() > 0 or differing is not None:
            continue
        if name not in left:
            differing = f"{name}, which the transformers folder does not have"
            continue
        left.remove(name)
        expected = stored.read(name)
        if not equal_to_the_bit(expected, tensor):
            differing = _described(name, expected, tensor)
    # A folder may hold a tied head a second time; the model has it once.
    if differing is None and rank() == 0 and (missing := sorted(left - {_HEAD})):
        differing = f"{missing[0]}, which is missing after the conversion"
    return differing


_HEAD = "lm_head.weight"


def equal_to_the_bit(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Returns whether two tensors have the same bits in the wider of their dtypes, NaN included.

    Example:
        >>> equal_to_the_bit(torch.tensor([0.0]), torch.tensor([-0.0]))
        False
        >>> equal_to_the_bit(torch.tensor([0.5]), torch.tensor([0.5], dtype=torch.bfloat16))
        True
    """
    wider = torch.promote_types(first.dtype, second.dtype)
    bits = [one.detach().to(wider).flatten().view(torch.uint8) for one in (first, second)]
    return first.shape == second.shape and torch.equal(*bits)


def _described(name: str, expected: torch.Tensor, actual: torch.Tensor) -> str:
    if expected.shape != actual.shape:
        return f"{name} of shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    indices = (expected.float() != actual.float()).nonzero()
    if not len(indices):
        return f"{name}: values that are equal and bits that are not"
    index = tuple(indices[0].tolist())
    values = f"{actual[index].item()!r}, not {expected[index].item()!r}"
    return f"{name}{list(index)} is {values} ({len(indices)} of {expected.numel()} values differ)"


def _megatron_logprobs(models: list[Any], batch: BatchedDataDict) -> torch.Tensor | None:
    """`[B, T-1]` on ranks of the last pipeline stage, through the backend's own passes."""
    from megatron.core import parallel_state

    from nemo_rl_core.backends.training.megatron.heads import LogprobHead
    from nemo_rl_core.backends.training.megatron.parts import MegatronMicrobatch, make_parts
    from nemo_rl_core.backends.training.megatron.step import run_parts

    head = LogprobHead(models[-1], vocab_size=models[-1].hf_config.vocab_size, temperature=1.0)
    device = next(models[0].parameters()).device
    parts = make_parts(batch, models[0].config, max_tokens=_largest_pass(batch), device=device)

    def consume(
        hidden: torch.Tensor, part: MegatronMicrobatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden.new_zeros(()), head.logprobs(hidden, part.batch, part.rows)

    results = run_parts(models, parts, consume, forward_only=True)
    if not parallel_state.is_pipeline_last_stage():
        return None
    whole = torch.zeros(batch["token_mask"].shape)
    for part, given in zip((part for part in parts if part.indices), results, strict=True):
        whole[list(part.indices), : given.shape[1]] = given.cpu()
    return whole


def _largest_pass(batch: BatchedDataDict) -> int:
    return max(_MAX_TOKENS_PER_PASS, int(batch["input_lengths"].max()))
