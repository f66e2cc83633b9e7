"""The workers' side of a link: all weights, bucket by bucket, with a checksum of what arrived.

An endpoint is opened by the first transfer over its link and kept for the next one: the pages that
the bytes lie in take the system longer to allocate than to fill. One that has failed is dropped at
once, and its memory with it.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from nemo_rl_core.distributed.process_group import rank
from nemo_rl_core.distributed.weight_sync.bucket import (
    TensorSpec,
    WeightBucket,
    bucket_digest,
    combined_digest,
    compare_digests,
    make_buckets,
)
from nemo_rl_core.distributed.weight_sync.control import SENDER, ControlGroup, LinkSpec
from nemo_rl_core.distributed.weight_sync.transport import TRANSPORTS
from nemo_rl_core.errors import ConsistencyError

STREAM_BUCKET_BYTES = 16 * 1024**2
"""Few enough that a checksum finds in the processor's cache what was just packed or received."""

NamedTensors = Iterator[tuple[str, torch.Tensor]]


class SendsWeights:
    """A rank of a trainer, which a training backend inherits; rank 0 has an endpoint a link.

    Attributes:
        sent_dtype: The type that engines compute with; None sends each tensor in its own.
    """

    sent_dtype: torch.dtype | None = None
    _endpoints: "dict[LinkSpec, Endpoint] | None" = None

    @abstractmethod
    def named_weights(self) -> NamedTensors:
        """Whole weights; every rank iterates to the end."""

    def send_weights(self, link: LinkSpec, open_links: Collection[LinkSpec] = ()) -> str:
        """Sends all weights; every rank of the trainer is called at once.

        Args:
            link: To the engine; opened where it is new.
            open_links: To engines that still run; the endpoints of all others are closed.

        Returns:
            On rank 0 the digest of what was sent, elsewhere an empty string.

        Raises:
            ConsistencyError: If something else has arrived.
            TransferError: If a receiver is gone, or does not join in time.
        """
        weights = ((name, w.to(self.sent_dtype or w.dtype)) for name, w in self.named_weights())
        try:
            if torch.cuda.is_available():
                # The engine wakes now, and may need what this process's allocator keeps in reserve.
                torch.cuda.empty_cache()
            if rank() != 0:
                return ""
            opened = self._endpoints or {}
            endpoint = opened.pop(link, None) or Endpoint(link, SENDER)
            self._endpoints = {each: opened[each] for each in open_links if each in opened}
            digest = endpoint.send(weights)
            self._endpoints[link] = endpoint  # only after success
            return digest
        finally:
            # Gathering is a collective: all ranks go through it, whatever becomes of the transfer.
            deque(weights, maxlen=0)

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
        bucket_bytes: About how much the sender packs at once.

    Attributes:
        link: The same.

    Raises:
        TransferError: If the others do not join in time.
        ResourceError: If the transport needs a GPU, and this process sees none.
    """

    def __init__(
        self, link: LinkSpec, group_rank: int, *, bucket_bytes: int = STREAM_BUCKET_BYTES
    ) -> None:
        self.link = link
        self._control = ControlGroup(link, group_rank)
        self._transport = TRANSPORTS[link.transport](self._control)
        self._bucket_bytes = bucket_bytes

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
                named_tensors, bucket_bytes=self._bucket_bytes, allocate=transport.allocate
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
                self._control.send(frame)
                if payload.nbytes:
                    transport.push(payload)
                digests.append(bucket.digest)
            digest = combined_digest(digests)
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
        while "end" not in (frame := self._control.receive()):
            payload = torch.empty(0, dtype=torch.uint8)
            if frame["num_bytes"]:
                payload = self._transport.pull(frame["reference"], frame["num_bytes"])
            specs = tuple(
                TensorSpec(**{**fields, "shape": tuple(fields["shape"])})
                for fields in frame["specs"]
            )
            compare_digests(sent=frame["digest"], received=bucket_digest(specs, payload))
            arrived.append(frame["digest"])
            yield from WeightBucket(specs, payload, frame["digest"]).named_tensors()
        compare_digests(sent=frame["end"], received=combined_digest(arrived))

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._control.close()
            raise
