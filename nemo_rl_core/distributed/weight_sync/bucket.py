"""Weights on their way from trainer to engine: buckets of bytes with a checksum each.

A bucket is one flat array of bytes, which shared memory, a collective and Ray's object store carry
equally well. The receiver recomputes every checksum over the bytes that arrived.

The checksum is XXH3 with 128 bits: it guards against damage and mix-ups, not against malice, and is
some fifty times as fast as a cryptographic one, which would take longer than all the rest. Of
bytes on a GPU, it is taken of two sums that the GPU computes: to copy the bytes to the host took
most of a transfer.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from nemo_rl_core.errors import ConsistencyError

DEFAULT_BUCKET_BYTES = 256 * 1024**2
_ALIGNMENT_BYTES = 16
_ODD_NUMBERS = (0x1E3779B97F4A7C15, 0x5851F42D4C957F2D)  # odd, so that products can be undone
_WITHOUT_SIGN = 2**35 - 1


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
        payload: `[num_bytes]` of uint8; a tensor where it lies in a transport's memory.
        digest: Of names, shapes, types and bytes, as the sender had them.
    """

    specs: tuple[TensorSpec, ...]
    payload: np.ndarray | torch.Tensor
    digest: str

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views on the payload; the caller must not write to them."""
        flat = torch.as_tensor(self.payload)
        for spec in self.specs:
            part = flat[spec.offset : spec.offset + spec.num_bytes]
            yield spec.name, part.view(getattr(torch, spec.dtype)).view(spec.shape)


def make_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    allocate: Callable[[int], torch.Tensor] | None = None,
) -> Iterator[WeightBucket]:
    """Fills buckets of about `bucket_bytes`; a larger tensor gets one of its own.

    Args:
        named_tensors: Of any type and layout; read one by one.
        bucket_bytes: When a bucket is full.
        allocate: Gives so many bytes to pack a bucket into, on any device; by default each gets an
            array of its own.
    """
    pending: list[tuple[str, torch.Tensor]] = []
    pending_bytes = 0
    for name, tensor in named_tensors:
        if pending and pending_bytes + tensor.nbytes > bucket_bytes:
            yield _bucket(pending, allocate)
            pending, pending_bytes = [], 0
        pending.append((name, tensor.detach()))
        pending_bytes += tensor.nbytes
    if pending:
        yield _bucket(pending, allocate)


def _bucket(
    named_tensors: list[tuple[str, torch.Tensor]],
    allocate: Callable[[int], torch.Tensor] | None,
) -> WeightBucket:
    num_bytes = sum(_aligned(tensor.nbytes) for _, tensor in named_tensors)
    payload = np.empty(num_bytes, dtype=np.uint8) if allocate is None else allocate(num_bytes)
    flat = torch.as_tensor(payload)
    specs, offset = [], 0
    for name, tensor in named_tensors:
        end, next_offset = offset + tensor.nbytes, offset + _aligned(tensor.nbytes)
        flat[offset:end].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        flat[end:next_offset] = 0  # equal weights are equal bytes, also where memory is used again
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name, tuple(tensor.shape), dtype, offset, tensor.nbytes))
        offset = next_offset
    return WeightBucket(tuple(specs), payload, bucket_digest(tuple(specs), payload))


def _aligned(num_bytes: int) -> int:
    """Rounded up, so that the next tensor starts where any type may start."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def bucket_digest(specs: tuple[TensorSpec, ...], payload: np.ndarray | torch.Tensor) -> str:
    """The checksum of names, shapes, types and bytes, computed from what lies in memory now."""
    digest = xxhash.xxh3_128(repr(specs).encode())
    if isinstance(payload, torch.Tensor) and payload.is_cuda:
        digest.update(repr(word_sums(payload)).encode())
        return digest.hexdigest()
    on_host = payload.numpy() if isinstance(payload, torch.Tensor) else payload
    digest.update(np.ascontiguousarray(on_host).data)
    return digest.hexdigest()


def word_sums(payload: torch.Tensor) -> list[int]:
    """Two sums over the words of bytes, computed where these lie.

    A word is mixed with its place by an invertible map before it is added, so that a change of one
    word always changes both sums, and an exchange of words or of several changes escapes with a
    chance of 2^-64 a sum.

    Args:
        payload: `[num_bytes]` of uint8, a multiple of 8.
    """
    words = payload.view(torch.int64)
    places = torch.arange(1, len(words) + 1, device=payload.device)
    sums = []
    for odd in _ODD_NUMBERS:
        mixed = words ^ (places * odd)
        mixed = mixed * (2 * places + odd)
        mixed = mixed ^ ((mixed >> 29) & _WITHOUT_SIGN)  # a shift that brings in zeros
        sums.append((mixed * odd).sum())
    return [int(each) for each in torch.stack(sums).tolist()]


def combined_digest(digests: Iterable[str]) -> str:
    """One digest of a whole transfer."""
    return xxhash.xxh3_128("".join(digests).encode()).hexdigest()


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
