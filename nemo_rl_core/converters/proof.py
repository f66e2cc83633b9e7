"""Proof of conversions between transformers and Megatron."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nemo_rl_core.backends.transformers_logprobs import transformers_logprobs
from nemo_rl_core.config.training import MegatronTraining
from nemo_rl_core.converters.comparison import compare_conversion
from nemo_rl_core.converters.megatron import is_megatron_checkpoint, native_dtype, num_ranks_of
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.errors import ConsistencyError, ModelError

_ONE_RANK = MegatronTraining()


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
        return compare_conversion(folder, checkpoint, batch, training)

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
