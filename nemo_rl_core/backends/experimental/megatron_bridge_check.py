"""Checks of a model of Megatron-Bridge against its folder: all weights, and logprobs of a probe.

The bridge itself only checks the shapes of weights. It translates a config field by field and
ignores unknown fields, so the model may compute something different.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_rl_core.checkpoints.weight_files import open_weights, weight_files
from nemo_rl_core.config.megatron_types import BRIDGE, bridge_version
from nemo_rl_core.config.model import DType
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate
from nemo_rl_core.errors import ModelError
from nemo_rl_core.model_files.loading import load_causal_model

_LENGTHS = (32, 17, 8)
PROOF_TOKENS = 57
"""Token budget that puts all rows of the proof into one micro-batch."""
_ROUNDING = 3
"""Multiple of the measured effect of rounding that the mean difference may reach."""
_BOUND = 1e-3
"""Mean difference in nats that is allowed in addition."""
_FIX = "use the dtensor backend, which trains any causal model of transformers"


def refuse_changed_weights(exported: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Raises `ModelError` on every rank if exported weights differ from those of the folder.

    Every rank reads `exported` to the end, since it is a collective.
    """
    is_first = dist.get_rank() == 0
    files = [open_weights(path) for path in weight_files(folder)] if is_first else []
    file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    differing: list[str] = []
    for name, tensor in exported:
        if is_first:
            file = file_of.get(name)
            stored = None if file is None else file.get_tensor(name).to(tensor.dtype)
            if stored is None or not torch.equal(stored, tensor.cpu()):
                differing.append(name)
    dist.broadcast_object_list(box := [differing], src=0)
    if box[0]:
        raise ModelError(
            f"{BRIDGE} {bridge_version()} changes weights of {folder.name!r} in a round trip",
            expected="exported weights that are bitwise identical to the folder's",
            got=f"{len(box[0])} different weights, such as {box[0][0]}",
            fix=_FIX,
        )


def refuse_different_logprobs(
    logprobs: Callable[[BatchedDataDict], torch.Tensor],
    folder: Path,
    *,
    dtype: DType,
    temperature: float,
) -> None:
    """Compares the model's logprobs with those of transformers, on three rows of random tokens.

    Raises `ModelError` on every rank if they differ by more than rounding explains.

    Rank 0 loads the float32 model into its host's memory for this.

    Args:
        logprobs: Collective that returns `[B, T-1]` logprobs of a batch, packed within
            `PROOF_TOKENS`.
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
            f"transformers cannot compute {folder.name!r}, which {BRIDGE} has built",
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
            f"{BRIDGE} {bridge_version()} builds a model that computes different logprobs than "
            f"{folder.name!r} in transformers",
            expected=f"a mean difference of at most {bound:.3g} nats",
            got=f"{difference:.3g}",
            fix=_FIX,
        )


def _expected(
    folder: Path, dtype: DType, temperature: float
) -> tuple[list[list[int]], torch.Tensor, float]:
    """Returns rows, their float32 logprobs `[B, T-1]`, and the mean effect of rounding on these."""
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
    logprobs = torch.zeros(len(rows), max(_LENGTHS) - 1)
    for index, row in enumerate(rows):
        ids = torch.tensor(row)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float() / temperature
        chosen = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        logprobs[index, : len(chosen)] = chosen
    return logprobs


def _mean_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().sum() / sum(length - 1 for length in _LENGTHS))
