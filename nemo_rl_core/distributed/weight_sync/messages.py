"""What goes over a link: JSON frames of its control group, and checked buckets of bytes.

The control group is a gloo process group besides those that a trainer's or an engine's ranks form
among themselves: rank 0 is the trainer's rank that sends, the others are engine workers. A process
that dies closes its connections, so that its peers get an error at once; one that is stuck runs
into the timeout.

A bucket is one flat array of bytes, which shared memory, a collective and Ray's object store carry
equally well. The receiver recomputes every checksum over the bytes that arrived. The checksum is
XXH3 with 128 bits: it guards against damage and mix-ups, not against malice, and is some fifty
times as fast as a cryptographic one, which would take longer than all the rest. Of bytes on a GPU,
it is taken of sums that the GPU computes: to copy the bytes to the host took most of a transfer.
"""

import hmac
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from nemo_rl_core.errors import ConsistencyError, TransferError
from nemo_rl_core.planning.routes import TransportName

DEFAULT_BUCKET_BYTES = 256 * 1024**2
_ALIGNMENT_BYTES = 16
_WORDS_A_ROW = 4097
"""Odd, so that a change that all words share, as of their sign, does not cancel modulo 2^64."""


@dataclass(frozen=True)
class TensorSpec:
    """Where one tensor lies in a bucket, or a piece of one.

    Attributes:
        name: Of the tensor.
        shape: Of the whole tensor.
        dtype: As torch calls it.
        offset: Of its first byte in the bucket.
        num_bytes: That the bucket has of it.
        start: Of the first of them in the tensor; 0 but for later pieces of a large one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int
    start: int = 0

    @property
    def whole_bytes(self) -> int:
        """Of the whole tensor."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return prod(self.shape) * itemsize

    @property
    def is_piece(self) -> bool:
        """Whether the rest of the tensor lies in other buckets."""
        return self.num_bytes < self.whole_bytes

    def tensor(self, flat: torch.Tensor) -> torch.Tensor:
        """The whole tensor as a view on its bytes."""
        return flat[: self.whole_bytes].view(getattr(torch, self.dtype)).view(self.shape)


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
        """Views on the payload, which has no pieces; the caller must not write to them."""
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
    """Fills buckets of about `bucket_bytes`; a larger tensor gets one of its own, or several.

    Args:
        named_tensors: Of any type and layout; read one by one.
        bucket_bytes: When a bucket is full.
        allocate: Gives so many bytes to pack a bucket into, on any device; by default each gets an
            array of its own.
        splits_tensors: Whether a larger tensor is cut into pieces, each in a bucket of its own, so
            that none is larger than `bucket_bytes` (or 16, which is the least).
    """
    pending: list[tuple[str, torch.Tensor]] = []
    pending_bytes = 0
    for name, tensor in named_tensors:
        if pending and pending_bytes + tensor.nbytes > bucket_bytes:
            yield _bucket(pending, allocate)
            pending, pending_bytes = [], 0
        if splits_tensors and tensor.nbytes > max(bucket_bytes, _ALIGNMENT_BYTES):
            yield from _pieces(name, tensor.detach(), bucket_bytes, allocate)
            continue
        pending.append((name, tensor.detach()))
        pending_bytes += _aligned(tensor.nbytes)
    if pending:
        yield _bucket(pending, allocate)


def _bucket(
    named_tensors: list[tuple[str, torch.Tensor]],
    allocate: Callable[[int], torch.Tensor] | None,
) -> WeightBucket:
    parts, offset = [], 0
    for name, tensor in named_tensors:
        shape, dtype = tuple(tensor.shape), _name_of(tensor.dtype)
        parts.append((TensorSpec(name, shape, dtype, offset, tensor.nbytes), tensor))
        offset += _aligned(tensor.nbytes)
    return _packed(parts, allocate)


def _pieces(
    name: str,
    tensor: torch.Tensor,
    bucket_bytes: int,
    allocate: Callable[[int], torch.Tensor] | None,
) -> Iterator[WeightBucket]:
    """Cuts a tensor into buckets of one piece each."""
    flat, shape, dtype = _flat(tensor), tuple(tensor.shape), _name_of(tensor.dtype)
    step = max(bucket_bytes // _ALIGNMENT_BYTES, 1) * _ALIGNMENT_BYTES
    for start in range(0, flat.nbytes, step):
        piece = flat[start : start + step]
        spec = TensorSpec(name, shape, dtype, 0, piece.nbytes, start)
        yield _packed([(spec, piece)], allocate)


def _packed(
    parts: list[tuple[TensorSpec, torch.Tensor]], allocate: Callable[[int], torch.Tensor] | None
) -> WeightBucket:
    num_bytes = sum(_aligned(spec.num_bytes) for spec, _ in parts)
    payload = np.empty(num_bytes, dtype=np.uint8) if allocate is None else allocate(num_bytes)
    to = torch.as_tensor(payload)
    for spec, tensor in parts:
        end = spec.offset + spec.num_bytes
        to[spec.offset : end].copy_(_flat(tensor))
        # Equal weights are equal bytes, also where memory is used again.
        to[end : spec.offset + _aligned(spec.num_bytes)] = 0
    specs = tuple(spec for spec, _ in parts)
    return WeightBucket(specs, payload, bucket_digest(specs, payload))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _aligned(num_bytes: int) -> int:
    """Rounded up, so that the next tensor starts where any type may start."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def bucket_digest(specs: tuple[TensorSpec, ...], payload: np.ndarray | torch.Tensor) -> str:
    """The checksum of names, shapes, types and bytes, computed from what lies in memory now."""
    digest = xxhash.xxh3_128(repr(specs).encode())
    if isinstance(payload, torch.Tensor) and payload.is_cuda:
        digest.update(word_sums(payload))
        return digest.hexdigest()
    on_host = payload.numpy() if isinstance(payload, torch.Tensor) else payload
    digest.update(np.ascontiguousarray(on_host).data)
    return digest.hexdigest()


def word_sums(payload: torch.Tensor) -> bytes:
    """The sums of the rows and of the columns of the bytes' words, computed where these lie.

    The words form a matrix of `_WORDS_A_ROW` columns; those left over, less than a row, stand for
    themselves. A change of up to three words is always found, and so is an exchange of two: to
    leave all sums as they are, differences must cancel in every row and in every column, which
    takes four words at the corners of a rectangle. Each sum reads the words once and writes
    nothing, and sums of integers do not depend on their order.

    Args:
        payload: `[num_bytes]` of uint8, a multiple of 8.

    Returns:
        The sums, modulo 2^64, and the words left over: 96 to 128 KiB of a bucket of 256 MiB.
    """
    words = payload.view(torch.int64)
    num_rows = len(words) // _WORDS_A_ROW
    matrix = words[: num_rows * _WORDS_A_ROW].view(num_rows, _WORDS_A_ROW)
    left = words[num_rows * _WORDS_A_ROW :]
    return torch.cat([matrix.sum(dim=1), matrix.sum(dim=0), left]).cpu().numpy().tobytes()


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


SENDER = 0
"""The sender's rank in the group; receivers follow."""
_LENGTH_BYTES = 8
_HEAD_BYTES = 8 * 1024
_SIGNATURE_BYTES = 32


@dataclass(frozen=True)
class LinkSpec:
    """What both ends of a link must know to meet.

    Attributes:
        host: Where a `TCPStore` listens, as long as endpoints may join.
        port: Its port.
        num_receivers: How many engine workers take every transfer.
        transport: How the bytes move; see `nemo_rl_core/planning/routes.py`.
        timeout_seconds: For which one endpoint waits for the others.
        token: Secret of both ends, which reaches them through Ray. It signs all messages, since
            every user of the machines can connect to the store and to gloo.
        sender: Rank of the trainer that sends. Each has a link of its own at the same store.
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
            meeting = TCPStore(link.host, link.port, is_master=False, timeout=timeout)
            self.store = PrefixStore(f"sender {link.sender}", meeting)
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
                "a message of a transfer of weights is not from this run",
                expected="a signature with the token of the link",
                got=f"another signature, as rank {rank}",
                fix="find out who connects to the ports of this run; then run the same command "
                "again: it resumes from the last save",
            )

    def send(self, frame: dict[str, Any]) -> None:
        """Sends a frame to all receivers."""
        encoded = json.dumps(frame).encode()
        encoded = self._signature(encoded, SENDER) + encoded
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
        signature, encoded = encoded[:_SIGNATURE_BYTES], encoded[_SIGNATURE_BYTES:]
        self._check(encoded, signature, SENDER)
        frame: dict[str, Any] = json.loads(encoded)
        return frame

    def gather(self, own: str) -> list[str]:
        """The string of every receiver, in order of rank; all are of one length."""
        gathered = []
        for rank in range(1, self.link.num_receivers + 1):
            message, signature = own.encode(), bytes(_SIGNATURE_BYTES)
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
        """Fills the tensor with that of rank `root`, on all ranks."""
        self.start_broadcast(tensor, root)()

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Callable[[], None]:
        """As `broadcast`; the function that is returned waits for its end."""
        with _transfer_errors():
            if self._group is None:
                raise RuntimeError("the link was closed after an error")
            work = self._group.broadcast(tensor, root)  # type: ignore[attr-defined]

        def wait() -> None:
            with _transfer_errors():
                work.wait()

        return wait

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
