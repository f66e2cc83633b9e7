"""A link between the workers of a policy and those of an engine: its two endpoints, its controller.

The workers send all weights, bucket by bucket, with a checksum of what arrived. An endpoint is
opened by the first transfer over its link and kept for the next one: the pages that the bytes lie
in take the system longer to allocate than to fill. One that has failed is dropped at once, and its
memory with it.
"""

import gc
import secrets
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nemo_rl_core.distributed.ports import LOOPBACK, host_store
from nemo_rl_core.distributed.weight_sync.messages import (
    SENDER,
    ControlGroup,
    LinkSpec,
    TensorSpec,
    WeightBucket,
    bucket_digest,
    combined_digest,
    compare_digests,
    make_buckets,
)
from nemo_rl_core.distributed.weight_sync.places import current_location, current_machine
from nemo_rl_core.distributed.weight_sync.transport import TRANSPORTS
from nemo_rl_core.distributed.worker_group import RayWorkerGroup, finish_together
from nemo_rl_core.errors import ConsistencyError, WorkerError
from nemo_rl_core.planning.routes import Location, choose_routes

NamedTensors = Iterator[tuple[str, torch.Tensor]]


class SendsWeights:
    """A rank of a trainer, which a training backend inherits; it has an endpoint a link.

    Attributes:
        sent_dtype: The type that engines compute with; None sends each tensor in its own.
    """

    sent_dtype: torch.dtype | None = None
    _endpoints: "dict[LinkSpec, Endpoint] | None" = None

    @abstractmethod
    def named_weights(self) -> NamedTensors:
        """Whole weights; every rank iterates to the end."""

    def weights_to_send(self) -> NamedTensors:
        """Whole weights in the type that engines compute with; every rank iterates to the end."""
        for name, weight in self.named_weights():
            yield name, weight.to(self.sent_dtype or weight.dtype)

    def release_memory(self, *, keeps_weights: bool = False) -> None:
        """Gives away what memory of the GPU this rank does not need until it computes again.

        By default that is what torch's allocator keeps for later.

        Args:
            keeps_weights: Whether the weights are needed at once, for a transfer.
        """
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()

    def send_weights(self, link: LinkSpec | None, open_links: Collection[LinkSpec] = ()) -> str:
        """Sends all weights; every rank of the trainer is called at once.

        Args:
            link: To those of the engine's ranks that this one sends to; opened where it is new.
                None for a rank that only gathers.
            open_links: To engines that still run; the endpoints of all others are closed.

        Returns:
            The digest of what was sent; an empty string without a link.

        Raises:
            ConsistencyError: If something else has arrived.
            TransferError: If a receiver is gone, or does not join in time.
        """
        weights = self.weights_to_send()
        self.release_memory(keeps_weights=True)
        # Engines wake when the first bucket arrives, on the GPUs of all ranks.
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
            # Gathering is a collective: all ranks go through it, whatever becomes of the transfer.
            deque(weights, maxlen=0)
            self.release_memory()  # what comes next is generation

    def close_link(self, link: LinkSpec) -> None:
        """Frees what a link holds; a no-op where it is not open."""
        (self._endpoints or {}).pop(link, None)


class ReceivesWeights:
    """A rank of an engine, which a generation backend inherits."""

    _endpoint: "Endpoint | None" = None

    @abstractmethod
    def take_weights(self, named_tensors: NamedTensors) -> None:
        """Replaces all weights and empties every cache that old ones filled.

        Args:
            named_tensors: Whole ones, all of which must be read. They hold only until this returns,
                and must not be written to.
        """

    def receive_weights(self, link: LinkSpec, index: int) -> str:
        """Takes one transfer; every rank of every engine is called at once.

        Args:
            link: Opened where it is new; the older one is closed then.
            index: Of this worker among the receivers, from 0.

        Returns:
            The digest of what arrived.

        Raises:
            ConsistencyError: If bytes changed on the way.
            TransferError: If the sender is gone, or does not join in time.
        """
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is None or endpoint.link != link:
            endpoint = Endpoint(link, index + 1)
        digest = endpoint.receive(self.take_weights)
        self._endpoint = endpoint  # only after success
        return digest


class Endpoint:
    """One process's end of a link, for any number of transfers.

    Args:
        link: What both ends know of it.
        group_rank: `SENDER`, or the receiver's index from 1 on.
        bucket_bytes: About how much the sender packs at once; by default the transport's.

    Attributes:
        link: The same.

    Raises:
        TransferError: If the others do not join in time.
        ResourceError: If the transport needs a GPU, and this process sees none.
    """

    def __init__(self, link: LinkSpec, group_rank: int, *, bucket_bytes: int | None = None) -> None:
        self.link = link
        self._control = ControlGroup(link, group_rank)
        self._transport = TRANSPORTS[link.transport](self._control)
        self._bucket_bytes = bucket_bytes or self._transport.bucket_bytes

    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
        """Sends all weights; returns when every receiver has loaded them.

        Args:
            named_tensors: Of any type and layout; read one by one.

        Returns:
            The digest of all buckets.

        Raises:
            ConsistencyError: If a receiver has got something else.
            TransferError: If one is gone. After any error this endpoint is closed.
        """
        transport, digests = self._transport, []
        with self._closed_on_error():
            transport.begin()
            for bucket in make_buckets(
                named_tensors,
                bucket_bytes=self._bucket_bytes,
                allocate=transport.allocate,
                splits_tensors=transport.splits_tensors,
            ):
                payload = torch.as_tensor(bucket.payload)
                frame: dict[str, Any] = {
                    "specs": [asdict(spec) for spec in bucket.specs],
                    "digest": bucket.digest,
                    "num_bytes": payload.nbytes,
                }
                # A bucket of nothing but empty tensors has no bytes to move.
                if payload.nbytes:
                    frame["reference"] = transport.reference(payload)
                transport.settle()  # this bucket was packed while the last one was taken
                self._control.send(frame)
                if payload.nbytes:
                    transport.push(payload)
                digests.append(bucket.digest)
            digest = combined_digest(digests)
            transport.settle()
            self._control.send({"end": digest})
            for received in self._control.gather(digest):
                compare_digests(sent=digest, received=received)
            transport.end()
        return digest

    def receive(self, load: Callable[[NamedTensors], None]) -> str:
        """Takes one transfer.

        Args:
            load: Gets all names and tensors, each checked before. They may lie in the sender's
                memory: they must not be written to, and hold only until `load` returns. It must
                read all of them.

        Returns:
            The digest of what arrived.

        Raises:
            ConsistencyError: If bytes changed on the way, or `load` left some.
            TransferError: If the sender is gone. After any error, that of `load` included, this
                endpoint is closed, and the sender gets an error, too.
        """
        arrived: list[str] = []
        tensors = self._checked_tensors(arrived)
        with self._closed_on_error():
            load(tensors)
            if next(tensors, None) is not None:
                raise ConsistencyError("new weights were loaded in part", expected="all of them")
            digest = combined_digest(arrived)
            self._control.gather(digest)
        return digest

    def _checked_tensors(self, arrived: list[str]) -> NamedTensors:
        """Yields the tensors of each bucket, and appends its digest to `arrived`."""
        self._transport.begin()
        whole: torch.Tensor | None = None  # of the tensor that comes in pieces
        while "end" not in (frame := self._control.receive()):
            specs = tuple(
                TensorSpec(**{**fields, "shape": tuple(fields["shape"])})
                for fields in frame["specs"]
            )
            if specs[0].is_piece and specs[0].start == 0:
                whole = self._transport.own_memory(specs[0].whole_bytes + _PADDING_BYTES)
            payload = self._pulled(frame, whole[specs[0].start :] if whole is not None else None)
            compare_digests(sent=frame["digest"], received=bucket_digest(specs, payload))
            arrived.append(frame["digest"])
            if whole is None:
                yield from WeightBucket(specs, payload, frame["digest"]).named_tensors()
            elif specs[0].start + specs[0].num_bytes == specs[0].whole_bytes:
                tensor, whole = specs[0].tensor(whole), None
                yield specs[0].name, tensor
        compare_digests(sent=frame["end"], received=combined_digest(arrived))

    def _pulled(self, frame: dict[str, Any], room: torch.Tensor | None) -> torch.Tensor:
        """The bytes of a bucket, in `room` where a tensor comes in pieces."""
        num_bytes = frame["num_bytes"]
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        out = self._transport.own_memory(num_bytes) if room is None else room[:num_bytes]
        return self._transport.pull(frame["reference"], out)

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._control.close()
            self._transport.close()
            raise


_PADDING_BYTES = 16  # at most, behind the last piece of a tensor
_MAX_WAIT_SECONDS = 600.0


class WeightLink:
    """Connects two worker groups for any number of transfers, until one fails.

    Callers take the link of two groups from `between`.

    Args:
        trainer: Workers whose backend is a `SendsWeights`.
        engine: Workers whose backend is a `ReceivesWeights`.
        timeout_seconds: The longest for a whole transfer, None for no limit. An endpoint waits as
            long for the others, but at most ten minutes.

    Attributes:
        by_engine: The open link of each engine's workers; it goes with them.
        specs: What the endpoints know of this link, by the rank of the trainer that sends.

    Raises:
        WorkerError: If a worker is lost.
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
        here = current_machine()
        all_here = all(each.machine == here for each in (*senders, *receivers))
        host = LOOPBACK if all_here else _own_address()
        self._store: TCPStore | None = host_store(host, 0, wait_for_workers=False)
        token = secrets.token_hex(32)
        self.specs: dict[int, LinkSpec] = {}
        self._places: dict[int, tuple[LinkSpec, int]] = {}
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
                self._places[receiver] = (spec, index)

    @classmethod
    def between(
        cls, trainer: RayWorkerGroup, engine: RayWorkerGroup, *, timeout_seconds: float | None
    ) -> "WeightLink":
        """The open link of these two, or a new one; an engine has one link, so another is closed.

        Args:
            trainer: Workers of the policy.
            engine: Workers of the engine, whose last transfer may have come from another policy.
            timeout_seconds: For a new link.
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

        Args:
            **options: For the engine's `receive_weights`.

        Returns:
            The digest of what the first rank with a receiver has sent. Every worker has received
            what its sender sent, and senders with one transport have sent the same.

        Raises:
            ConsistencyError: If something else has arrived.
            WorkerError: If either end is lost or fails. After any error the link is closed.
        """
        trainer, engine = self._trainer, self._engine()
        assert engine is not None
        # The trainer learns only from here of engines that are gone.
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
                    "receive_weights", *self._places[rank], rank=rank, **options
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
        by_transport: dict[str, str] = {}  # which have buckets and checksums of their own
        for sender, spec in self.specs.items():
            first = by_transport.setdefault(spec.transport, sent[sender])
            if first != sent[sender]:
                raise ConsistencyError(
                    f"rank {sender} of the trainer has other weights than the first that sends",
                    expected=f"checksum {first}",
                    got=f"checksum {sent[sender]}",
                    fix="run the same command again: it resumes from the last save; if it comes "
                    "back, suspect that rank's GPU or memory",
                )
        for receiver, (spec, _) in self._places.items():
            compare_digests(sent=sent[spec.sender], received=received[receiver])

    def close(self) -> None:
        """Frees what the trainer holds for this engine."""
        self._forget()
        if self._trainer.world_size:
            # A trainer that was lost holds nothing any more.
            with suppress(WorkerError):
                for sender, spec in self.specs.items():
                    self._trainer.run_single_worker("close_link", spec, rank=sender)

    def _forget(self) -> None:
        self._store = None  # an endpoint that still waits for a lost one gets an error now
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
