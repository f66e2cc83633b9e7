"""Verification of conversions between transformers and Megatron."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.backends.transformers_logprobs import transformers_logprobs
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.converters.folders import StoredWeights
from nemo_rl_core.converters.megatron import is_megatron_checkpoint, native_dtype, num_ranks_of
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import rank
from nemo_rl_core.errors import ConsistencyError, ModelError

_ONE_RANK = MegatronTraining()


@dataclass(frozen=True)
class ConversionReport:
    """Results of `prove`.

    Attributes:
        num_equal: Number of tensors that are bitwise identical in the checkpoint and after
            transformers -> Megatron -> transformers. Equal to `num_tensors`, since any difference
            raises.
        max_absolute_difference: Largest difference between two logprobs of a token.
        max_relative_difference: `max_absolute_difference` divided by the largest absolute logprob.
    """

    num_tensors: int
    num_equal: int
    num_rows: int
    num_tokens: int
    max_absolute_difference: float
    max_relative_difference: float
    tolerance: float


def prove(
    source: Path, converted: Path, rows: Sequence[Sequence[int]], *, tolerance: float = 1e-4
) -> ConversionReport:
    """Compares a transformers folder and a Megatron checkpoint: all tensors, and logprobs of rows.

    The checkpoint's native weights and the result of transformers -> Megatron -> transformers must
    both be bitwise identical to the folder's weights (in the wider dtype if dtypes differ).
    Logprobs of the native weights in Megatron's model are compared with those of the folder in
    transformers' model, both in float32.

    Args:
        source: The source of the conversion, in either format.
        converted: The converted folder, in the other format.
        rows: Token ids, at least two per row.
        tolerance: Bound on the difference of two logprobs, in nats.
    """
    checkpoint, folder = _folder_and_checkpoint(source, converted)
    native_dtype(checkpoint)  # refuses a damaged checkpoint
    batch = collate(rows, [[True] * len(row) for row in rows])

    def compare() -> tuple[int, str | None, torch.Tensor | None]:
        return compare_conversion(folder, checkpoint, batch, _ONE_RANK)

    results = run_ranks(compare, world_size=num_ranks_of(_ONE_RANK))
    num_tensors, differing, _ = results[0]
    if differing is not None:
        raise ConsistencyError(
            f"the conversion of {source} is not faithful",
            expected="every tensor bitwise identical",
            got=differing,
            fix=f"discard {converted}; the source is unchanged. If only the dtype differs, "
            "convert to the dtype of the source",
        )
    # The last rank is in the last pipeline stage.
    logprobs = results[-1][2]
    assert logprobs is not None
    reference = transformers_logprobs(folder, batch)
    absolute = _largest_difference(logprobs, reference, batch, tolerance=tolerance)
    return ConversionReport(
        num_tensors=num_tensors,
        num_equal=num_tensors,
        num_rows=len(rows),
        num_tokens=int(batch["token_mask"].sum()),
        max_absolute_difference=absolute,
        max_relative_difference=absolute / reference.abs().max().item(),
        tolerance=tolerance,
    )


def _folder_and_checkpoint(source: Path, converted: Path) -> tuple[Path, Path]:
    match is_megatron_checkpoint(source), is_megatron_checkpoint(converted):
        case True, False:
            return source, converted
        case False, True:
            return converted, source
    raise ModelError(
        "only a conversion between Megatron and transformers can be proven",
        expected="one folder with trainer/.metadata and one without",
        got=f"{source} and {converted}",
        fix="name the checkpoint folder itself, not model/ or trainer/ in it",
    )


def _largest_difference(
    megatron: torch.Tensor, reference: torch.Tensor, batch: BatchedDataDict, *, tolerance: float
) -> float:
    difference = (megatron - reference).abs()
    largest = difference.max().item()
    if not largest <= tolerance:
        # NaN counts as the largest difference.
        row, index = divmod(int(difference.argmax()), difference.shape[1])
        raise ConsistencyError(
            "Megatron's model and transformers' disagree",
            expected=f"logprobs within {tolerance} of each other",
            got=f"row {row}, token {index + 1} "
            f"(id {int(batch['input_ids'][row, index + 1])}): {megatron[row, index].item()!r} "
            f"in Megatron, {reference[row, index].item()!r} in transformers",
            fix="do not use the conversion; the source is unchanged",
        )
    return largest


_MAX_TOKENS_PER_PASS = 2048


def compare_conversion(
    folder: Path, checkpoint: Path, batch: BatchedDataDict, training: MegatronTraining
) -> tuple[int, str | None, torch.Tensor | None]:
    """Returns the number of tensors, the first differing one, and the last stage's logprobs.

    Runs on each rank, in float32, which represents every bfloat16 exactly.
    """
    from nemo_rl_core.backends.training.megatron.checkpoint import load_native_weights
    from nemo_rl_core.backends.training.megatron.model import build_model
    from nemo_rl_core.backends.training.megatron.topology import initialize_topology
    from nemo_rl_core.backends.training.megatron.weights import iter_hf_weights, load_hf_weights

    initialize_topology(training)
    stored = StoredWeights(folder)
    models = build_model(folder, training, "float32")
    load_hf_weights(models, folder)
    round_trip = _first_differing(stored, iter_hf_weights(models))
    load_native_weights(checkpoint / "trainer", models)
    native = _first_differing(stored, iter_hf_weights(models))
    logprobs = _megatron_logprobs(models, batch)
    return len(stored.names), round_trip or native, logprobs


def _first_differing(
    stored: StoredWeights, weights: Iterator[tuple[str, torch.Tensor]]
) -> str | None:
    """Returns the first tensor that differs from the folder; only rank 0 compares."""
    differing: str | None = None
    remaining = set(stored.names)
    for name, tensor in weights:
        if rank() > 0 or differing is not None:
            continue
        if name not in remaining:
            differing = f"{name}, which the transformers folder does not have"
            continue
        remaining.remove(name)
        expected = stored.read(name)
        if not bitwise_equal(expected, tensor):
            differing = _describe(name, expected, tensor)
    # A folder may store a tied head a second time; the model has it once.
    if differing is None and rank() == 0 and (missing := sorted(remaining - {_HEAD})):
        differing = f"{missing[0]}, which is missing after the conversion"
    return differing


_HEAD = "lm_head.weight"


def bitwise_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same bits in the wider of their dtypes, including NaN.

    Example:
        >>> bitwise_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
        False
        >>> bitwise_equal(torch.tensor([0.5]), torch.tensor([0.5], dtype=torch.bfloat16))
        True
    """
    wider = torch.promote_types(first.dtype, second.dtype)
    bits = [one.detach().to(wider).flatten().view(torch.uint8) for one in (first, second)]
    return first.shape == second.shape and torch.equal(*bits)


def _describe(name: str, expected: torch.Tensor, actual: torch.Tensor) -> str:
    if expected.shape != actual.shape:
        return f"{name} of shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    indices = (expected.float() != actual.float()).nonzero()
    if not len(indices):
        return f"{name}: equal values with different bits"
    index = tuple(indices[0].tolist())
    values = f"{actual[index].item()!r}, not {expected[index].item()!r}"
    return f"{name}{list(index)} is {values} ({len(indices)} of {expected.numel()} values differ)"


def _megatron_logprobs(models: list[Any], batch: BatchedDataDict) -> torch.Tensor | None:
    """Computes `[B, T-1]` logprobs by the backend's passes, on ranks of the last stage."""
    from megatron.core import parallel_state

    from nemo_rl_core.backends.training.megatron.heads import LogprobHead
    from nemo_rl_core.backends.training.megatron.parts import MegatronMicrobatch, make_parts
    from nemo_rl_core.backends.training.megatron.step import run_parts

    head = LogprobHead(models[-1], vocab_size=models[-1].hf_config.vocab_size, temperature=1.0)
    device = next(models[0].parameters()).device
    max_tokens = max(_MAX_TOKENS_PER_PASS, int(batch["input_lengths"].max()))
    parts = make_parts(batch, models[0].config, max_tokens=max_tokens, device=device)

    def consume(
        hidden: torch.Tensor, part: MegatronMicrobatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden.new_zeros(()), head.logprobs(hidden, part.batch, part.rows)

    results = run_parts(models, parts, consume, forward_only=True)
    if not parallel_state.is_pipeline_last_stage():
        return None
    logprobs = torch.zeros(batch["token_mask"].shape)
    for part, values in zip((part for part in parts if part.indices), results, strict=True):
        logprobs[list(part.indices), : values.shape[1]] = values.cpu()
    return logprobs
