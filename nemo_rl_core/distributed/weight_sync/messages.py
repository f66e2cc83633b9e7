"""What goes over a link: JSON frames of its control group, and checked buckets of bytes.

The control group is a gloo process group besides those that a trainer's or an engine's ranks form
among themselves: rank 0 is the trainer's first rank, the others are the engine's workers. A process
that dies closes its connections, so that its peers get an error at once; one that is stuck runs
into the timeout.

A bucket is one flat array of bytes, which shared memory, a collective and Ray's object store carry
equally well. The receiver recomputes every checksum over the bytes that arrived. The checksum is
XXH3 with 128 bits: it guards against damage and mix-ups, not against malice, and is some fifty
times as fast as a cryptographic one, which would take longer than all the rest. Of bytes on a GPU,
it is taken of two sums that the GPU computes: to copy the bytes to the host took most of a
transfer.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from nemo_rl_core.errors import ConsistencyError, TransferError

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


TransportName = Literal["shared_memory", "cuda_ipc", "gloo", "nccl"]
SENDER = 0
"""The sender's rank in the group; receivers follow."""
_LENGTH_BYTES = 8
_HEAD_BYTES = 8 * 1024


@dataclass(frozen=True)
class LinkSpec:
    """What both ends of a link must know to meet.

    Attributes:
        host: Where a `TCPStore` listens, as long as endpoints may join.
        port: Its port.
        num_receivers: How many engine workers take every transfer.
        transport: How the bytes move; see `choose_transport`.
        timeout_seconds: For which one endpoint waits for the others.
    """

    host: str
    port: int
    num_receivers: int
    transport: TransportName
    timeout_seconds: float


class ControlGroup:
    """One endpoint's membership in the group; waits until all have joined.

    Args:
        link: Where they meet.
        rank: `SENDER`, or the receiver's index from 1 on.

    Attributes:
        store: What they meet at.

    Raises:
        TransferError: If the others do not join in time; of every method, if one of them is gone.
    """

    def __init__(self, link: LinkSpec, rank: int) -> None:
        timeout = timedelta(seconds=link.timeout_seconds)
        with _transfer_errors():
            self.store = TCPStore(link.host, link.port, is_master=False, timeout=timeout)
            self._group: ProcessGroupGloo | None = ProcessGroupGloo(
                PrefixStore("control", self.store), rank, link.num_receivers + 1, timeout
            )
        self.link, self.rank = link, rank

    def send(self, frame: dict[str, Any]) -> None:
        """Sends a frame to all receivers."""
        encoded = json.dumps(frame).encode()
        # One message for all but the longest: receivers need not be woken twice.
        head = len(encoded).to_bytes(_LENGTH_BYTES, "big") + encoded[:_HEAD_BYTES]
        padded = bytearray(head.ljust(_LENGTH_BYTES + _HEAD_BYTES))
        self.broadcast(torch.frombuffer(padded, dtype=torch.uint8), SENDER)
        if len(encoded) > _HEAD_BYTES:
            rest = bytearray(encoded[_HEAD_BYTES:])
            self.broadcast(torch.frombuffer(rest, dtype=torch.uint8), SENDER)

    def receive(self) -> dict[str, Any]:
        """Receives the next frame of the sender."""
        padded = torch.empty(_LENGTH_BYTES + _HEAD_BYTES, dtype=torch.uint8)
        self.broadcast(padded, SENDER)
        head = padded.numpy().tobytes()
        length = int.from_bytes(head[:_LENGTH_BYTES], "big")
        encoded = head[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if length > _HEAD_BYTES:
            rest = torch.empty(length - _HEAD_BYTES, dtype=torch.uint8)
            self.broadcast(rest, SENDER)
            encoded += rest.numpy().tobytes()
        frame: dict[str, Any] = json.loads(encoded)
        return frame

    def gather(self, own: str) -> list[str]:
        """The string of every receiver, in order of rank; all are of one length."""
        gathered = []
        for rank in range(1, self.link.num_receivers + 1):
            buffer = torch.frombuffer(bytearray(own.encode()), dtype=torch.uint8)
            self.broadcast(buffer, rank)
            gathered.append(buffer.numpy().tobytes().decode(errors="replace"))
        return gathered

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Fills the tensor with that of rank `root`, on all ranks."""
        with _transfer_errors():
            if self._group is None:
                raise RuntimeError("the link was closed after an error")
            self._group.broadcast(tensor, root).wait()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Leaves; endpoints that wait for this one get an error now."""
        self._group = None


@contextmanager
def _transfer_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of gloo and of the store alike
        raise TransferError(
            "a transfer of weights broke off",
            expected="trainer and engine workers at both ends of it",
            got=str(error).splitlines()[0],
            fix="run the same command again: it resumes from the last save; look above for the "
            "first error of a worker",
        ) from error
