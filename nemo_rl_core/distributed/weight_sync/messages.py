"""Messages of a link: JSON frames of its control group, and buckets of bytes with checksums.

The control group is a gloo process group, separate from those of the trainer's and the engine's
ranks: rank 0 is the trainer's rank that sends, the others are engine workers. A process that dies
closes its connections, so its peers get an error at once; a stuck process runs into the timeout.

A bucket is one flat array of bytes, which works with shared memory, collectives and Ray's object
store. The receiver recomputes every checksum over the received bytes. The checksum is XXH3 with 128
bits: it detects corruption and mix-ups, not attacks, and is about fifty times as fast as a
cryptographic one, which would take longer than everything else. For bytes on a GPU, the checksum
covers sums that the GPU computes, since copying the bytes to the host took most of a transfer.
"""

import hmac
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import prod
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from nemo_rl_core.distributed.weight_sync.routes import TransportName
from nemo_rl_core.errors import ConsistencyError, TransferError

DEFAULT_BUCKET_BYTES = 256 * 1024**2
_ALIGNMENT_BYTES = 16
_WORDS_PER_ROW = 4097
"""Odd, so that a common change of all words, such as of their sign, does not cancel modulo 2^64."""


@dataclass(frozen=True)
class TensorSpec:
    """Position of a tensor, or of a piece of one, in a bucket.

    Attributes:
        offset: Offset of its first byte in the bucket.
        num_bytes: Number of its bytes in the bucket.
        start: Offset of the first of these bytes in the tensor; 0 except for later pieces.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int
    start: int = 0

    @property
    def tensor_bytes(self) -> int:
        """Number of bytes of the full tensor."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return prod(self.shape) * itemsize

    def tensor(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the full tensor as a view of its bytes."""
        return flat[: self.tensor_bytes].view(getattr(torch, self.dtype)).view(self.shape)


@dataclass(frozen=True)
class WeightBucket:
    """Named tensors as flat bytes.

    Attributes:
        payload: `[num_bytes]` of uint8; a tensor if it is in a transport's memory.
    """

    specs: tuple[TensorSpec, ...]
    payload: np.ndarray | torch.Tensor
    digest: str

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields views of a payload without pieces; the caller must not write to them."""
        flat = torch.as_tensor(self.payload)
        for spec in self.specs:
            yield spec.name, spec.tensor(flat[spec.offset :])


def make_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    allocate: Callable[[int], torch.Tensor] | None = None,
    splits_tensors: bool = False,
) -> Iterator[WeightBucket]:
    """Fills buckets of about `bucket_bytes`; a larger tensor gets one or more separate buckets.

    Args:
        allocate: Returns memory of a size for a bucket, on any device; by default each bucket gets
            a new array.
        splits_tensors: Whether a larger tensor is cut into pieces, each in a separate bucket, so
            that no bucket is larger than `bucket_bytes` (at least 16).
    """
    pending: list[tuple[TensorSpec, torch.Tensor]] = []
    offset = 0
    for name, tensor in named_tensors:
        if pending and offset + tensor.nbytes > bucket_bytes:
            yield _packed(pending, allocate)
            pending, offset = [], 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        spec = TensorSpec(name, tuple(tensor.shape), dtype, offset, tensor.nbytes)
        if splits_tensors and tensor.nbytes > max(bucket_bytes, _ALIGNMENT_BYTES):
            yield from _pieces(spec, tensor.detach(), bucket_bytes, allocate)
            continue
        pending.append((spec, tensor.detach()))
        offset += _aligned(tensor.nbytes)
    if pending:
        yield _packed(pending, allocate)


def _pieces(
    full: TensorSpec,
    tensor: torch.Tensor,
    bucket_bytes: int,
    allocate: Callable[[int], torch.Tensor] | None,
) -> Iterator[WeightBucket]:
    flat = _flat(tensor)
    step = max(bucket_bytes // _ALIGNMENT_BYTES, 1) * _ALIGNMENT_BYTES
    for start in range(0, flat.nbytes, step):
        piece = flat[start : start + step]
        spec = replace(full, num_bytes=piece.nbytes, start=start)
        yield _packed([(spec, piece)], allocate)


def _packed(
    parts: list[tuple[TensorSpec, torch.Tensor]], allocate: Callable[[int], torch.Tensor] | None
) -> WeightBucket:
    num_bytes = sum(_aligned(spec.num_bytes) for spec, _ in parts)
    payload = np.empty(num_bytes, dtype=np.uint8) if allocate is None else allocate(num_bytes)
    target = torch.as_tensor(payload)
    for spec, tensor in parts:
        end = spec.offset + spec.num_bytes
        target[spec.offset : end].copy_(_flat(tensor))
        # Padding is zeroed, so that equal weights have equal bytes in reused memory.
        target[end : spec.offset + _aligned(spec.num_bytes)] = 0
    specs = tuple(spec for spec, _ in parts)
    return WeightBucket(specs, payload, bucket_digest(specs, payload))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _aligned(num_bytes: int) -> int:
    """Rounds up, so that the next tensor is aligned for any dtype."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def bucket_digest(specs: tuple[TensorSpec, ...], payload: np.ndarray | torch.Tensor) -> str:
    """Computes the checksum of names, shapes, dtypes and the bytes in memory."""
    digest = xxhash.xxh3_128(repr(specs).encode())
    if isinstance(payload, torch.Tensor) and payload.is_cuda:
        digest.update(word_sums(payload))
        return digest.hexdigest()
    on_host = payload.numpy() if isinstance(payload, torch.Tensor) else payload
    digest.update(np.ascontiguousarray(on_host).data)
    return digest.hexdigest()


def word_sums(payload: torch.Tensor) -> bytes:
    """Computes the sums of rows and columns of a payload's words on the payload's device.

    The words form a matrix of `_WORDS_PER_ROW` columns; the remaining words, less than a row, are
    included unchanged. A change of up to three words is always detected, and so is a swap of two:
    for all sums to be unchanged, differences must cancel in every row and every column, which takes
    at least four words at the corners of a rectangle. Each sum reads the words once and writes
    nothing, and integer sums do not depend on the order.

    Returns:
        The sums modulo 2^64 and the remaining words: 96 to 128 KiB for a bucket of 256 MiB.
    """
    words = payload.view(torch.int64)
    num_rows = len(words) // _WORDS_PER_ROW
    matrix = words[: num_rows * _WORDS_PER_ROW].view(num_rows, _WORDS_PER_ROW)
    remaining = words[num_rows * _WORDS_PER_ROW :]
    return torch.cat([matrix.sum(dim=1), matrix.sum(dim=0), remaining]).cpu().numpy().tobytes()


def combined_digest(digests: Iterable[str]) -> str:
    """Returns one digest of a full transfer."""
    return xxhash.xxh3_128("".join(digests).encode()).hexdigest()


def compare_digests(*, sent: str, received: str) -> None:
    """Checks that the received weights are the sent ones."""
    if sent != received:
        raise ConsistencyError(
            "the weights received by the rollout engine are not those that the trainer sent",
            expected=f"checksum {sent}",
            got=f"checksum {received}",
            fix="run the same command again: it resumes from the last save; if the error comes "
            "back, suspect memory or the transport",
        )


SENDER = 0
"""The sender's rank in the group; receivers follow."""
_LENGTH_BYTES = 8
_HEAD_BYTES = 8 * 1024
_SIGNATURE_BYTES = 32


@dataclass(frozen=True)
class LinkSpec:
    """Parameters with which both ends of a link connect.

    Attributes:
        host: Address of a `TCPStore`, which listens while endpoints may join.
        timeout_seconds: How long an endpoint waits for the others.
        token: Secret of both ends, passed through Ray. It signs all messages, since every user of
            the machines can connect to the store and to gloo.
        sender: Rank of the trainer that sends. Each sender has a separate link at the same store.
    """

    host: str
    port: int
    num_receivers: int
    transport: TransportName
    timeout_seconds: float
    token: str = field(repr=False)
    sender: int = 0


class ControlGroup:
    """One endpoint's membership in the group; waits until all have joined.

    Args:
        rank: `SENDER`, or the receiver's index, starting at 1.

    Raises:
        TransferError: If the others do not join in time; in any method, if one of them is gone.
    """

    def __init__(self, link: LinkSpec, rank: int) -> None:
        timeout = timedelta(seconds=link.timeout_seconds)
        with _transfer_errors():
            store = TCPStore(link.host, link.port, is_master=False, timeout=timeout)
            self.store = PrefixStore(f"sender {link.sender}", store)
            self._group: ProcessGroupGloo | None = ProcessGroupGloo(
                PrefixStore("control", self.store), rank, link.num_receivers + 1, timeout
            )
        self.link, self.rank = link, rank
        self._num_signed = 0

    def _signature(self, message: bytes, rank: int) -> bytes:
        """Returns the signature of the next message; all ranks sign and check the same sequence."""
        self._num_signed += 1
        context = f"{self.link.sender} {rank} {self._num_signed} ".encode()
        return hmac.digest(self.link.token.encode(), context + message, "sha256")

    def _check(self, message: bytes, signature: bytes, rank: int) -> None:
        if not hmac.compare_digest(signature, self._signature(message, rank)):
            raise TransferError(
                "a message of a weight transfer is not from this run",
                expected="a signature with the token of the link",
                got=f"a wrong signature, in a message as rank {rank}",
                fix="find out who connects to the ports of this run; then run the same command "
                "again: it resumes from the last save",
            )

    def send(self, frame: dict[str, Any]) -> None:
        """Sends a frame to all receivers."""
        encoded = json.dumps(frame).encode()
        encoded = self._signature(encoded, SENDER) + encoded
        # One message for most frames, so that receivers wake up only once.
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
        signature, encoded = encoded[:_SIGNATURE_BYTES], encoded[_SIGNATURE_BYTES:]
        self._check(encoded, signature, SENDER)
        frame: dict[str, Any] = json.loads(encoded)
        return frame

    def gather(self, text: str) -> list[str]:
        """Returns the texts of all receivers in rank order; all have the same length."""
        gathered = []
        for rank in range(1, self.link.num_receivers + 1):
            message, signature = text.encode(), bytes(_SIGNATURE_BYTES)
            if rank == self.rank:
                signature = self._signature(message, rank)
            buffer = torch.frombuffer(bytearray(signature + message), dtype=torch.uint8)
            self.broadcast(buffer, rank)
            received = buffer.numpy().tobytes()
            signature, message = received[:_SIGNATURE_BYTES], received[_SIGNATURE_BYTES:]
            if rank != self.rank:
                self._check(message, signature, rank)
            gathered.append(message.decode(errors="replace"))
        return gathered

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Fills the tensor on all ranks with that of rank `root`."""
        self.start_broadcast(tensor, root)()

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Callable[[], None]:
        """Starts a `broadcast`; returns a function that waits for its end."""
        with _transfer_errors():
            if self._group is None:
                raise RuntimeError("the link was closed after an error")
            work = self._group.broadcast(tensor, root)  # type: ignore[attr-defined]

        def wait() -> None:
            with _transfer_errors():
                work.wait()

        return wait

    def close(self) -> None:
        """Leaves the group; endpoints that wait for this one get an error."""
        self._group = None


@contextmanager
def _transfer_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # from gloo or the store
        raise TransferError(
            "a weight transfer was interrupted",
            expected="trainer and engine workers at both ends",
            got=str(error).splitlines()[0],
            fix="run the same command again: it resumes from the last save; look above for the "
            "first error of a worker",
        ) from error
