"""Proof of conversions between transformers and Megatron."""

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
_MAX_TOKENS_PER_PASS = 2048


@dataclass(frozen=True)
class ConversionReport:
    """Results of a proof.

    Attributes:
        num_tensors: Tensors of the transformers folder.
        num_equal: Tensors that are bit-identical in the checkpoint, and after transformers ->
            Megatron -> transformers. Equal to `num_tensors`, since any difference raises.
        num_rows: Compared sequences.
        num_tokens: Compared logprobs.
        max_absolute_difference: Largest difference of the logprobs, in nats.
        max_relative_difference: The same, divided by the largest absolute logprob.
        tolerance: Bound on the absolute difference.
    """

    num_tensors: int
    num_equal: int
    num_rows: int
    num_tokens: int
    max_absolute_difference: float
    max_relative_difference: float
    tolerance: float


def prove(
    source: Path,
    converted: Path,
    rows: Sequence[Sequence[int]],
    *,
    tolerance: float = 1e-4,
    training: MegatronTraining = _ONE_RANK,
) -> ConversionReport:
    """Compares a transformers folder and a Megatron checkpoint: all tensors, and logprobs of rows.

    Tensors, one at a time: the checkpoint's native weights, and the result of transformers ->
    Megatron -> transformers; both must be bit-identical to the folder's (in the wider dtype if
    dtypes differ). Logprobs: of the native weights in Megatron's model and of the folder in
    transformers', both in float32.

    Args:
        source: The source of the conversion, in either format.
        converted: The converted folder, in the other format.
        rows: Token ids, at least two per row.
        tolerance: Bound on the difference of two logprobs, in nats.
        training: The layout of Megatron's model.

    Raises:
        ConsistencyError: Names the first tensor, or the row and token, that differ.
        ModelError: If not exactly one of the two is a Megatron checkpoint.
        WorkerError: If a rank raises.
    """
    checkpoint, folder = _folder_and_checkpoint(source, converted)
    native_dtype(checkpoint)  # refuses a damaged one here
    batch = collate(rows, [[True] * len(row) for row in rows])

    def compare() -> tuple[int, str | None, torch.Tensor | None]:
        return _compared(folder, checkpoint, batch, training)

    found = run_ranks(compare, world_size=num_ranks_of(training))
    num_tensors, differing, _ = found[0]
    if differing is not None:
        raise ConsistencyError(
            f"the conversion of {source} is not faithful",
            expected="every tensor equal to the bit",
            got=differing,
            fix=f"discard {converted}; the source is unchanged. If only the dtype differs, "
            "convert to the dtype of the source",
        )
    # The last rank is one of the last pipeline stage.
    logprobs = found[-1][2]
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
        expected="one folder with trainer/.metadata, and one without",
        got=f"{source} and {converted}",
        fix="name the checkpoint's own folder, not model/ or trainer/ in it",
    )


def _compared(
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
