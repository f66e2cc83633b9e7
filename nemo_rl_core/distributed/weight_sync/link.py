"""Links between the workers of a policy and of an engine: endpoints and their controller.

The first transfer over a link opens an endpoint, which is kept for later transfers, because
allocating pages takes longer than filling them.

A bucket is one flat array of bytes, which works with shared memory and collectives. The receiver
recomputes every checksum over the received bytes. The checksum is XXH3 with 128 bits: it detects
corruption and mix-ups, not attacks, and is about fifty times as fast as a cryptographic one, which
would take longer than everything else. For bytes on a GPU, the checksum covers sums that the GPU
computes, since copying the bytes to the host took most of a transfer.
"""

import gc
import secrets
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import xxhash
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nemo_rl_core.distributed.ports import LOOPBACK, host_store
from nemo_rl_core.distributed.weight_sync.routes import (
    Location,
    choose_routes,
    current_location,
    current_machine,
)
from nemo_rl_core.distributed.weight_sync.transport import (
    SENDER,
    TRANSPORTS,
    ControlGroup,
    LinkSpec,
)
from nemo_rl_core.distributed.worker_group import RayWorkerGroup, finish_together
from nemo_rl_core.errors import ConsistencyError, WorkerError

NamedTensors = Iterator[tuple[str, torch.Tensor]]

_MAX_WAIT_SECONDS = 600.0
_ALIGNMENT_BYTES = 16
_WORDS_PER_ROW = 4097
"""Odd, so that a common change of all words, such as of their sign, does not cancel modulo 2^64."""


class SendsWeights:
    """Base class of training backends that send weights; a rank has one endpoint per link.

    Attributes:
        sent_dtype: Dtype of the engines; None sends each tensor in its own dtype.
    """

    sent_dtype: torch.dtype | None = None
    _endpoints: "dict[LinkSpec, Endpoint] | None" = None

    @abstractmethod
    def named_weights(self) -> NamedTensors:
        """Yields full weights; every rank iterates to the end."""

    def weights_to_send(self) -> NamedTensors:
        """Yields full weights in the engines' dtype; every rank iterates to the end."""
        for name, weight in self.named_weights():
            yield name, weight.to(self.sent_dtype or weight.dtype)

    def release_memory(self, *, keeps_weights: bool = False) -> None:
        """Frees GPU memory that this rank does not need until it computes again.

        By default frees the cache of torch's allocator.
        """
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()

    def send_weights(self, link: LinkSpec | None, open_links: Collection[LinkSpec] = ()) -> str:
        """Sends all weights; called on every rank of the trainer at once.

        Args:
            link: Link to the engine ranks that this rank sends to, opened if new; None if this
                rank only gathers.
            open_links: Links to running engines; the endpoints of all others are closed.
        """
        weights = self.weights_to_send()
        self.release_memory(keeps_weights=True)
        # Engines wake up when the first bucket arrives, on the GPUs of all ranks.
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()
        try:
            opened = self._endpoints or {}
            endpoint = opened.pop(link, None) if link else None
            self._endpoints = {each: opened[each] for each in open_links if each in opened}
            if link is None:
                return ""
            endpoint = endpoint or Endpoint(link, SENDER)
            digest = endpoint.send(weights)
            self._endpoints[link] = endpoint  # only after success
            return digest
        finally:
            # Gathering is a collective: all ranks finish it, even if the transfer fails.
            deque(weights, maxlen=0)
            self.release_memory()  # generation comes next

    def close_link(self, link: LinkSpec) -> None:
        """Frees the memory of a link, if it is open."""
        (self._endpoints or {}).pop(link, None)


class ReceivesWeights:
    """Base class of generation backends that receive weights."""

    _endpoint: "Endpoint | None" = None

    @abstractmethod
    def take_weights(self, named_tensors: NamedTensors) -> None:
        """Replaces all weights and empties every cache that depends on the old ones.

        Args:
            named_tensors: Full tensors, all of which must be read. They are only valid until this
                returns, and must not be written to.
        """

    def receive_weights(self, link: LinkSpec, index: int) -> str:
        """Receives one transfer; called on every rank of every engine at once."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is None or endpoint.link != link:
            endpoint = Endpoint(link, index + 1)
        digest = endpoint.receive(self.take_weights)
        self._endpoint = endpoint  # only after success
        return digest


class Endpoint:
    """One process's end of a link, for any number of transfers.

    After any error it is closed, and the other ends get an error too.

    Args:
        group_rank: `SENDER`, or the receiver's index, starting at 1.
        bucket_bytes: Approximate size of a bucket; by default the transport's.
    """

    def __init__(self, link: LinkSpec, group_rank: int, *, bucket_bytes: int | None = None) -> None:
        self.link = link
        self._control = ControlGroup(link, group_rank)
        self._transport = TRANSPORTS[link.transport](self._control)
        self._bucket_bytes = bucket_bytes or self._transport.bucket_bytes

    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
        """Sends all weights; returns when every receiver has loaded them."""
        transport, total = self._transport, xxhash.xxh3_128()
        with self._closed_on_error():
            for bucket in make_buckets(
                named_tensors,
                bucket_bytes=self._bucket_bytes,
                allocate=transport.allocate,
                splits_tensors=transport.splits_tensors,
            ):
                frame = {
                    "specs": [asdict(spec) for spec in bucket.specs],
                    "digest": bucket.digest,
                    "num_bytes": bucket.payload.nbytes,
                }
                # A bucket with only empty tensors has no bytes to move.
                transport.send(frame, bucket.payload if bucket.payload.nbytes else None)
                total.update(bucket.digest.encode())
            digest = total.hexdigest()
            transport.send({"end": digest})
            for received in self._control.gather(digest):
                compare_digests(sent=digest, received=received)
            transport.end()
        return digest

    def receive(self, load: Callable[[NamedTensors], None]) -> str:
        """Receives one transfer.

        Args:
            load: Reads all names and tensors, whose checksums were compared. They may be in the
                sender's memory: they are only valid until `load` returns, and must not be written
                to.
        """
        total = xxhash.xxh3_128()
        tensors = self._checked_tensors(total)
        with self._closed_on_error():
            load(tensors)
            if next(tensors, None) is not None:
                raise ConsistencyError("only a part of the new weights was loaded", expected="all")
            digest = total.hexdigest()
            self._control.gather(digest)
        return digest

    def _checked_tensors(self, total: xxhash.xxh3_128) -> NamedTensors:
        """Yields the tensors of a transfer, and adds the digest of each bucket to `total`."""
        full: torch.Tensor | None = None  # bytes of a tensor that arrives in pieces
        while "end" not in (frame := self._control.broadcast(SENDER)):
            specs = tuple(
                TensorSpec(**{**fields, "shape": tuple(fields["shape"])})
                for fields in frame["specs"]
            )
            first, end = specs[0], specs[0].start + specs[0].num_bytes
            if first.num_bytes < first.tensor_bytes and first.start == 0:
                full = self._transport.own_memory(first.tensor_bytes + _ALIGNMENT_BYTES)
            payload = torch.empty(0, dtype=torch.uint8)
            if num_bytes := frame["num_bytes"]:
                piece = None if full is None else full[first.start : first.start + num_bytes]
                payload = self._transport.pull(frame, piece)
            compare_digests(sent=frame["digest"], received=bucket_digest(specs, payload))
            total.update(frame["digest"].encode())
            if full is None:
                for spec in specs:
                    yield spec.name, spec.tensor(payload[spec.offset :])
            elif end == first.tensor_bytes:
                tensor, full = first.tensor(full), None
                yield first.name, tensor
        compare_digests(sent=frame["end"], received=total.hexdigest())

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._control.close()
            self._transport.close()
            raise


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
    """Named tensors as flat bytes `[num_bytes]` of uint8 in a transport's memory."""

    specs: tuple[TensorSpec, ...]
    payload: torch.Tensor
    digest: str


def make_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    bucket_bytes: int,
    allocate: Callable[[int], torch.Tensor],
    splits_tensors: bool = False,
) -> Iterator[WeightBucket]:
    """Fills buckets of about `bucket_bytes`; a larger tensor gets one or more separate buckets.

    Args:
        allocate: Returns memory of a size for a bucket, on any device.
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
    allocate: Callable[[int], torch.Tensor],
) -> Iterator[WeightBucket]:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    step = max(bucket_bytes // _ALIGNMENT_BYTES, 1) * _ALIGNMENT_BYTES
    for start in range(0, flat.nbytes, step):
        piece = flat[start : start + step]
        spec = replace(full, num_bytes=piece.nbytes, start=start)
        yield _packed([(spec, piece)], allocate)


def _packed(
    parts: list[tuple[TensorSpec, torch.Tensor]], allocate: Callable[[int], torch.Tensor]
) -> WeightBucket:
    last = parts[-1][0]
    payload = allocate(_aligned(last.offset + last.num_bytes))
    for spec, tensor in parts:
        end = spec.offset + spec.num_bytes
        payload[spec.offset : end].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        # Padding is zeroed, so that equal weights have equal bytes in reused memory.
        payload[end : _aligned(end)] = 0
    specs = tuple(spec for spec, _ in parts)
    return WeightBucket(specs, payload, bucket_digest(specs, payload))


def _aligned(num_bytes: int) -> int:
    """Rounds up, so that the next tensor is aligned for any dtype."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def bucket_digest(specs: tuple[TensorSpec, ...], payload: torch.Tensor) -> str:
    """Computes the checksum of names, shapes, dtypes and the bytes in memory."""
    digest = xxhash.xxh3_128(repr(specs).encode())
    digest.update(word_sums(payload) if payload.is_cuda else payload.numpy().data)
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


class WeightLink:
    """Connects two worker groups for any number of transfers, until one fails.

    Callers get the link of two groups from `between`.

    Args:
        timeout_seconds: Time limit of a full transfer; None for no limit. An endpoint waits as long
            for the others, but at most ten minutes.
    """

    by_engine: ClassVar["weakref.WeakKeyDictionary[RayWorkerGroup, WeightLink]"] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(
        self, trainer: RayWorkerGroup, engine: RayWorkerGroup, timeout_seconds: float | None
    ) -> None:
        self._trainer, self._engine = trainer, weakref.ref(engine)
        self._timeout_seconds = timeout_seconds
        senders: list[Location] = _locations(trainer)
        receivers = _locations(engine)
        own_machine = current_machine()
        is_one_machine = all(each.machine == own_machine for each in (*senders, *receivers))
        host = LOOPBACK if is_one_machine else _own_address()
        self._store: TCPStore | None = host_store(host, 0, wait_for_workers=False)
        token = secrets.token_hex(32)
        self.specs: dict[int, LinkSpec] = {}
        self._receivers: dict[int, tuple[LinkSpec, int]] = {}
        for route in choose_routes(senders, receivers):
            spec = LinkSpec(
                host=host,
                port=self._store.port,
                num_receivers=len(route.receivers),
                transport=route.transport,
                timeout_seconds=min(timeout_seconds or _MAX_WAIT_SECONDS, _MAX_WAIT_SECONDS),
                sender=route.sender,
                token=token,
            )
            self.specs[route.sender] = spec
            for index, receiver in enumerate(route.receivers):
                self._receivers[receiver] = (spec, index)

    @classmethod
    def between(
        cls, trainer: RayWorkerGroup, engine: RayWorkerGroup, *, timeout_seconds: float | None
    ) -> "WeightLink":
        """Returns the open link of two groups, or a new one.

        An engine has one link, so its link to another policy is closed.
        """
        link = cls.by_engine.get(engine)
        if link is not None and link._trainer is trainer:
            return link
        if link is not None:
            link.close()
        link = cls.by_engine[engine] = cls(trainer, engine, timeout_seconds)
        return link

    def transfer(self, **options: Any) -> str:
        """Copies all weights to every worker of the engine.

        Returns:
            The digest of the weights that the first sender sent. Every worker received what its
            sender sent, and senders with the same transport sent the same weights.
        """
        trainer, engine = self._trainer, self._engine()
        assert engine is not None
        # This is how the trainer learns that engines are gone.
        open_links = [
            spec
            for link in self.by_engine.values()
            if link._trainer is trainer
            for spec in link.specs.values()
        ]
        try:
            sending = [
                trainer.start_single_worker(
                    "send_weights", self.specs.get(rank), open_links, rank=rank
                )
                for rank in range(trainer.world_size)
            ]
            receiving = [
                engine.start_single_worker(
                    "receive_weights", *self._receivers[rank], rank=rank, **options
                )
                for rank in range(engine.world_size)
            ]
            sent, received = finish_together(
                [(trainer, sending), (engine, receiving)], self._timeout_seconds
            )
            self._compare(sent, received)
        except BaseException:
            self._forget()
            raise
        return str(sent[min(self.specs)])

    def _compare(self, sent: Sequence[str], received: Sequence[str]) -> None:
        by_transport: dict[str, str] = {}  # transports have different buckets, and so checksums
        for sender, spec in self.specs.items():
            first = by_transport.setdefault(spec.transport, sent[sender])
            if first != sent[sender]:
                raise ConsistencyError(
                    f"rank {sender} of the trainer sent weights that differ from those of the "
                    "first sender",
                    expected=f"checksum {first}",
                    got=f"checksum {sent[sender]}",
                    fix="run the same command again: it resumes from the last save; if the error "
                    "comes back, suspect that rank's GPU or memory",
                )
        for receiver, (spec, _) in self._receivers.items():
            compare_digests(sent=sent[spec.sender], received=received[receiver])

    def close(self) -> None:
        """Frees the trainer's memory for this engine."""
        self._forget()
        if self._trainer.world_size:
            # A lost trainer has nothing to free.
            with suppress(WorkerError):
                for sender, spec in self.specs.items():
                    self._trainer.run_single_worker("close_link", spec, rank=sender)

    def _forget(self) -> None:
        self._store = None  # an endpoint that waits for a lost one now gets an error
        engine = self._engine()
        if engine is not None:
            self.by_engine.pop(engine, None)


def _locations(group: RayWorkerGroup) -> list[Location]:
    return group.run_all_workers_single_data("__ray_call__", _location_of)


def _location_of(_: Any) -> Location:
    return current_location()


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())
