"""Weights on their way from trainer to engine: buckets of bytes with a checksum each.

A bucket is one flat array of bytes, so that Ray's object store hands it to the engine's process
through shared memory without a copy. The receiver recomputes every checksum over the bytes that
arrived and returns their digest; the controller compares it with the sender's.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from nemo_rl_core.errors import ConsistencyError

DEFAULT_BUCKET_BYTES = 256 * 1024**2
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class TensorSpec:
    """Where one tensor lies in a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class WeightBucket:
    """Some named tensors as flat bytes.

    Attributes:
        specs: The tensors, in the order they were added.
        payload: `[num_bytes]` of uint8.
        digest: Of names, shapes, types and bytes, as the sender had them.
    """

    specs: tuple[TensorSpec, ...]
    payload: np.ndarray
    digest: str

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views on the payload; the caller must not write to them."""
        flat = torch.from_numpy(np.asarray(self.payload))
        for spec in self.specs:
            part = flat[spec.offset : spec.offset + spec.num_bytes]
            yield spec.name, part.view(getattr(torch, spec.dtype)).view(spec.shape)


def make_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Iterator[WeightBucket]:
    """Fills buckets of about `bucket_bytes`; a larger tensor gets one of its own."""
    pending: list[tuple[str, torch.Tensor]] = []
    pending_bytes = 0
    for name, tensor in named_tensors:
        if pending and pending_bytes + tensor.nbytes > bucket_bytes:
            yield _bucket(pending)
            pending, pending_bytes = [], 0
        pending.append((name, tensor.detach()))
        pending_bytes += tensor.nbytes
    if pending:
        yield _bucket(pending)


def _bucket(named_tensors: list[tuple[str, torch.Tensor]]) -> WeightBucket:
    sizes = (_aligned(tensor.nbytes) for _, tensor in named_tensors)
    payload = np.zeros(sum(sizes), dtype=np.uint8)
    flat = torch.from_numpy(payload)
    specs, offset = [], 0
    for name, tensor in named_tensors:
        source = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        flat[offset : offset + tensor.nbytes].copy_(source)
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name, tuple(tensor.shape), dtype, offset, tensor.nbytes))
        offset += _aligned(tensor.nbytes)
    return WeightBucket(tuple(specs), payload, _digest(tuple(specs), payload))


def _aligned(num_bytes: int) -> int:
    """Rounded up, so that the next tensor starts where any type may start."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _digest(specs: tuple[TensorSpec, ...], payload: np.ndarray) -> str:
    digest = hashlib.blake2b(repr(specs).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(payload).data)
    return digest.hexdigest()


def received_digest(bucket: WeightBucket) -> str:
    """The digest of what lies in the bucket now, whatever its sender claimed."""
    return _digest(bucket.specs, bucket.payload)


def combined_digest(digests: Iterable[str]) -> str:
    """One digest of a whole transfer."""
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()


def compare_digests(*, sent: str, received: str) -> None:
    """Stops the run if what arrived is not what was sent.

    Raises:
        ConsistencyError: If the digests differ.
    """
    if sent != received:
        raise ConsistencyError(
            "the weights that arrived in the rollout engine are not those that the trainer sent",
            expected=f"checksum {sent}",
            got=f"checksum {received}",
            fix="run the same command again: it resumes from the last save; if it comes back, "
            "suspect memory or the transport",
        )
