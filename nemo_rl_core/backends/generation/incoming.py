"""Checks of weights while an engine loads them, one tensor at a time.

Nothing is kept but a few rows: an engine that held all tensors until the last one has been checked
would need the memory of a second model.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from nemo_rl_core.backends.training.dtensor.matching import check_weights
from nemo_rl_core.checkpoints.weights import require_finite
from nemo_rl_core.errors import ConsistencyError

_SAMPLED_ROWS = 256
_INTERLEAVED = "query_key_value"
"""Fused projections of BLOOM, whose heads vLLM puts in another order."""
NamedTensors = Iterable[tuple[str, torch.Tensor]]


class IncomingWeights:
    """The tensors of one update.

    Args:
        expected: As `empty_model` returns it.
        held: The engine's parameters by its own names, before the update.
        is_split: Whether this rank may hold a shard of a parameter, padded to a round number of
            rows.
        source: Name of the tensors' source in error messages.
        rename: Returns the engine's name of a tensor that is sent; None if it drops the tensor.
    """

    def __init__(
        self,
        expected: Any,
        held: Mapping[str, torch.Tensor],
        *,
        is_split: bool,
        source: str,
        rename: Callable[[str], str | None] = lambda name: name,
    ) -> None:
        self._expected, self._source, self._is_split = expected, source, is_split
        self._rename = rename
        # What is rounded to 8 bits, and perhaps transposed, equals nothing that is sent.
        self._held = {
            name: tuple(tensor.shape) for name, tensor in held.items() if tensor.dtype.itemsize > 1
        }
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._samples: dict[str, torch.Tensor] = {}
        self._lengths: dict[str, int] = {}
        self._is_broken_off = False

    def checked(self, named_tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields them; after the last one, checks names and shapes of all.

        Raises:
            ModelError: Names a tensor with NaN or infinity, or what is missing, surplus or of
                another shape.
        """
        try:
            for name, tensor in named_tensors:
                self._shapes[name] = tuple(tensor.shape)
                require_finite(self._source, [(name, tensor)])
                if (parameter := self._comparable(name, tensor)) is not None:
                    self._samples[parameter] = _sample(tensor).clone()
                    self._lengths[parameter] = len(tensor)
                yield name, tensor
            check_weights(self._expected, self._shapes, self._source)
        except Exception:
            self._is_broken_off = True
            raise

    def refuse_wrong(self, rest: NamedTensors) -> None:
        """After the engine has refused one of them: raises what is wrong with the tensors, if any.

        Args:
            rest: Those that it has not read.

        Raises:
            ModelError: As `checked`.
        """
        if not self._is_broken_off:  # else the error is the tensors' own
            deque(self.checked(rest), maxlen=0)

    def refuse_stale(self, held: Mapping[str, torch.Tensor]) -> None:
        """Compares what the engine holds now with the sent tensors, as far as the layout allows.

        vLLM fuses and re-packs most matrices, but keeps embeddings, norms and some biases under
        their own names; a failed reload is visible in these. Of matrices, some rows are compared.

        Args:
            held: The engine's parameters by its own names.

        Raises:
            ConsistencyError: If one is not what was sent, or none can be compared.
        """
        for name, sent in self._samples.items():
            loaded = _sample(held[name][: self._lengths[name]])
            # vLLM keeps some vectors in another dtype, such as the xIELU's of Apertus.
            if not torch.equal(loaded, sent.to(loaded)):
                raise ConsistencyError(
                    f"vLLM still holds old weights in {name!r} after an update",
                    fix="run the same command again: it resumes from the last save",
                )
        if not self._samples:
            raise ConsistencyError("no weight that was sent could be found in vLLM's model")

    def _comparable(self, name: str, sent: torch.Tensor) -> str | None:
        """Name of the engine's parameter that keeps a sent tensor unchanged; None without any."""
        shape = tuple(sent.shape)
        if _INTERLEAVED in name:
            return None
        if name not in self._held:  # perhaps under another name, or as a part of a fused matrix
            renamed = self._rename(name) or ""
            # Another last part holds other values: `A` of Mamba 2 is `-exp(A_log)`.
            is_same = renamed.rpartition(".")[2] == name.rpartition(".")[2]
            return renamed if is_same and self._held.get(renamed) == shape else None
        loaded = self._held[name]
        if not loaded or loaded[1:] != shape[1:] or not sent.numel():
            return None
        fits = loaded == shape or (not self._is_split and loaded[0] >= shape[0])
        return name if fits else None


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """All of a vector; of a matrix, rows at equal distances."""
    return tensor if tensor.dim() == 1 else tensor[:: -(-len(tensor) // _SAMPLED_ROWS)]
