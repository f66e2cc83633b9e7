"""Checks of weights while an engine loads them, one tensor at a time; a few rows are kept."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from nemo_rl_core.checkpoints.weights import require_finite
from nemo_rl_core.errors import ConsistencyError
from nemo_rl_core.model_files.weights import check_weights

_SAMPLED_ROWS = 256
_INTERLEAVED = "query_key_value"
"""Fused projections of BLOOM; vLLM reorders their heads."""
NamedTensors = Iterable[tuple[str, torch.Tensor]]


class IncomingWeights:
    """The tensors of one update.

    Args:
        parameters: The engine's parameters by its names for them, before the update.
        rename: Function that returns the engine's name for a tensor; None if it drops the tensor.
    """

    def __init__(
        self,
        expected: Any,
        parameters: Mapping[str, torch.Tensor],
        *,
        is_tensor_parallel: bool,
        source: str,
        rename: Callable[[str], str | None] = lambda name: name,
    ) -> None:
        self._expected, self._source, self._is_tensor_parallel = (
            expected,
            source,
            is_tensor_parallel,
        )
        self._rename = rename
        # Weights rounded to 8 bits, and perhaps transposed, cannot be compared with the sent ones.
        self._engine_shapes = {
            name: tuple(tensor.shape)
            for name, tensor in parameters.items()
            if tensor.dtype.itemsize > 1
        }
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._samples: dict[str, torch.Tensor] = {}
        self._lengths: dict[str, int] = {}
        self._has_failed = False

    def checked(self, named_tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors, then checks all names and shapes."""
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
            self._has_failed = True
            raise

    def refuse_wrong(self, rest: NamedTensors) -> None:
        """Checks the remaining tensors after the engine has rejected one."""
        if not self._has_failed:  # otherwise `checked` has raised already
            deque(self.checked(rest), maxlen=0)

    def refuse_stale(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Compares the engine's parameters with the sent tensors, as far as their layout allows.

        vLLM fuses and repacks most matrices, but keeps the names of embeddings, norms and some
        biases; a failed reload is visible in these. Only some rows of matrices are compared.
        """
        for name, sent in self._samples.items():
            loaded = _sample(parameters[name][: self._lengths[name]])
            # vLLM keeps some vectors in a different dtype, such as those of xIELU in Apertus.
            if not torch.equal(loaded, sent.to(loaded)):
                raise ConsistencyError(
                    f"vLLM still has old weights in {name!r} after an update",
                    fix="run the same command again; it resumes from the last save",
                )
        if not self._samples:
            raise ConsistencyError("none of the sent weights can be compared with vLLM's model")

    def _comparable(self, name: str, sent: torch.Tensor) -> str | None:
        """Returns the name of the engine's parameter that equals a sent tensor, or None."""
        shape = tuple(sent.shape)
        if _INTERLEAVED in name:
            return None
        if name not in self._engine_shapes:  # renamed, or part of a fused matrix
            renamed = self._rename(name) or ""
            # A different last component means different values: `A` of Mamba 2 is `-exp(A_log)`.
            is_same = renamed.rpartition(".")[2] == name.rpartition(".")[2]
            return renamed if is_same and self._engine_shapes.get(renamed) == shape else None
        engine_shape = self._engine_shapes[name]
        if not engine_shape or engine_shape[1:] != shape[1:] or not sent.numel():
            return None
        fits = engine_shape == shape or (
            not self._is_tensor_parallel and engine_shape[0] >= shape[0]
        )
        return name if fits else None


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 1 else tensor[:: -(-len(tensor) // _SAMPLED_ROWS)]
