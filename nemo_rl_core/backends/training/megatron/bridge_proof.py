"""Proof of a model of Megatron-Bridge against its folder: all weights, and logprobs of a probe.

The bridge's own checks end with the shapes of weights. It translates a config field by field and
goes on without the fields that it does not know, so that a model may compute something else.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_rl_core.backends.training.dtensor.loading import load_causal_model
from nemo_rl_core.checkpoints.weight_files import open_weights, weight_files
from nemo_rl_core.config.megatron_types import BRIDGE, bridge_version
from nemo_rl_core.config.model import DType
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.errors import ModelError

_LENGTHS = (32, 17, 8)
PROOF_TOKENS = 57
"""The token budget at which all rows of the proof are in one micro-batch."""
_ROUNDING = 3
_BOUND = 1e-3
_FIX = "use the dtensor backend, which trains any causal model of transformers"


def refuse_other_weights(exported: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Compares the model's weights, converted back, with the folder's.

    Args:
        exported: Of `weights.iter_hf_weights`; a collective, which every rank reads to its end.
        folder: Whose weights were loaded.

    Raises:
        ModelError: On every rank, if a weight is not equal to the bit in the model's dtype.
    """
    is_first = dist.get_rank() == 0
    files = [open_weights(path) for path in weight_files(folder)] if is_first else []
    found = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    differing: list[str] = []
    for name, tensor in exported:
        if is_first:
            stored = found[name].get_tensor(name).to(tensor.dtype) if name in found else None
            if stored is None or not torch.equal(stored, tensor.cpu()):
                differing.append(name)
    dist.broadcast_object_list(box := [differing], src=0)
    if box[0]:
        raise ModelError(
            f"{BRIDGE} {bridge_version()} does not convert {folder.name!r} there and back",
            expected="every weight equal to the folder's, to the bit",
            got=f"{len(box[0])} that differ, {box[0][0]} first",
            fix=_FIX,
        )


def refuse_other_logprobs(
    logprobs: Callable[[BatchedDataDict], torch.Tensor],
    folder: Path,
    *,
    dtype: DType,
    temperature: float,
) -> None:
    """Compares the model's logprobs with those of transformers, on three rows of random tokens.

    Rank 0 holds the model in its host's memory for this, in float32.

    Args:
        logprobs: `[B, T-1]` of a batch, packed within `PROOF_TOKENS`; a collective of all ranks.
        folder: Of the model.
        dtype: Dtype of the matrix products.
        temperature: Divisor of the logits.

    Raises:
        ModelError: On every rank, if the mean difference is larger than rounding to the dtype
            explains.
    """
    box: list[tuple[list[list[int]], torch.Tensor, float] | str] = [""]
    if dist.get_rank() == 0:
        try:
            box = [_expected(folder, dtype, temperature)]
        except Exception as error:  # noqa: BLE001  (the other ranks would wait)
            box = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], str):
        raise ModelError(
            f"transformers cannot compute {folder.name!r}, of which {BRIDGE} built a model",
            expected="logprobs to compare with",
            got=box[0],
            fix=_FIX,
        )
    rows, expected, rounding = box[0]
    batch = collate(rows, [[False] + [True] * (len(row) - 1) for row in rows])
    difference = _mean_difference(logprobs(batch), expected)
    bound = _BOUND + _ROUNDING * rounding
    if not difference <= bound:
        raise ModelError(
            f"{BRIDGE} {bridge_version()} builds a model that computes something else than "
            f"{folder.name!r}",
            expected=f"logprobs of transformers, within {bound:.3g} nats in the mean",
            got=f"{difference:.3g}",
            fix=_FIX,
        )


def _expected(
    folder: Path, dtype: DType, temperature: float
) -> tuple[list[list[int]], torch.Tensor, float]:
    """The rows, transformers' `[B, T-1]` logprobs in float32, and what rounding changes in them."""
    model = load_causal_model(folder)
    generator = torch.Generator().manual_seed(0)
    size = int(model.config.vocab_size)
    rows = [torch.randint(size, (length,), generator=generator).tolist() for length in _LENGTHS]
    exact = _logprobs(model, rows, temperature)
    if dtype == "float32":
        return rows, exact, 0.0
    rounded = _logprobs(model.to(getattr(torch, dtype)), rows, temperature)
    return rows, exact, _mean_difference(rounded, exact)


@torch.no_grad()
def _logprobs(model: torch.nn.Module, rows: list[list[int]], temperature: float) -> torch.Tensor:
    whole = torch.zeros(len(rows), max(_LENGTHS) - 1)
    for index, row in enumerate(rows):
        ids = torch.tensor(row)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / temperature
        chosen = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        whole[index, : len(chosen)] = chosen
    return whole


def _mean_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().sum() / sum(length - 1 for length in _LENGTHS))
