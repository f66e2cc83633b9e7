"""A transfer of all weights, bucket by bucket, with a checksum of what arrived."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from nemo_rl_core.distributed.weight_sync.buckets import (
    TensorSpec,
    WeightBucket,
    combined_digest,
    compare_digests,
    make_buckets,
    received_digest,
)
from nemo_rl_core.distributed.weight_sync.carriers import make_carrier
from nemo_rl_core.distributed.weight_sync.channel import SENDER, Channel, WeightRoute
from nemo_rl_core.errors import ConsistencyError

STREAM_BUCKET_BYTES = 16 * 1024**2
"""Few enough that a checksum finds in the processor's cache what was just packed or received."""

Load = Callable[[Iterator[tuple[str, torch.Tensor]]], None]


class WeightSender:
    """The trainer's end of a route, for any number of transfers.

    Args:
        route: From a `RouteHost`.
        bucket_bytes: About how much goes at once.

    Attributes:
        route: The same.

    Raises:
        TransferError: If the receivers do not come in time.
    """

    def __init__(self, route: WeightRoute, *, bucket_bytes: int = STREAM_BUCKET_BYTES) -> None:
        self.route = route
        self._channel = Channel(route, SENDER)
        self._carrier = make_carrier(self._channel)
        self._bucket_bytes = bucket_bytes

    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
        """Sends all weights; returns when every receiver has loaded them.

        Args:
            named_tensors: Of any type and layout; read one by one.

        Returns:
            The digest of all buckets.

        Raises:
            ConsistencyError: If a receiver has got something else.
            TransferError: If one is gone. After either, this end is closed.
        """
        try:
            return self._sent(named_tensors)
        except BaseException:
            self._channel.close()
            raise

    def _sent(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
        carrier, digests = self._carrier, []
        carrier.begin()
        for bucket in make_buckets(
            named_tensors, bucket_bytes=self._bucket_bytes, allocate=carrier.buffer
        ):
            payload = torch.as_tensor(bucket.payload)
            frame: dict[str, Any] = {
                "specs": [asdict(spec) for spec in bucket.specs],
                "digest": bucket.digest,
                "num_bytes": payload.nbytes,
            }
            # A bucket of nothing but empty tensors has no bytes for anything to carry.
            if payload.nbytes:
                frame["reference"] = carrier.reference(payload)
            self._channel.send(frame)
            if payload.nbytes:
                carrier.push(payload)
            digests.append(bucket.digest)
        digest = combined_digest(digests)
        self._channel.send({"end": digest})
        for received in self._channel.gathered(digest):
            compare_digests(sent=digest, received=received)
        return digest


class WeightReceiver:
    """An engine worker's end of a route, for any number of transfers.

    Args:
        route: From a `RouteHost`.
        place: Among the receivers, from 0.

    Attributes:
        route: The same.

    Raises:
        TransferError: If the others do not come in time.
    """

    def __init__(self, route: WeightRoute, *, place: int = 0) -> None:
        self.route = route
        self._channel = Channel(route, place + 1)
        self._carrier = make_carrier(self._channel)

    def receive(self, load: Load) -> str:
        """Takes one transfer.

        Args:
            load: Gets all names and tensors, each checked before it is handed over. They may lie in
                the sender's memory: they must not be written to, and hold only until `load`
                returns. It must read all of them.

        Returns:
            The digest of what arrived.

        Raises:
            ConsistencyError: If bytes changed on the way, or `load` left some.
            TransferError: If the sender is gone. After any error, that of `load` included, this end
                is closed, and the sender gets an error, too.
        """
        arrived: list[str] = []
        tensors = self._checked_tensors(arrived)
        try:
            load(tensors)
            if next(tensors, None) is not None:
                raise ConsistencyError("new weights were loaded in part", expected="all of them")
        except BaseException:
            self._channel.close()
            raise
        digest = combined_digest(arrived)
        self._channel.gathered(digest)
        return digest

    def _checked_tensors(self, arrived: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        self._carrier.begin()
        while "end" not in (frame := self._channel.receive()):
            bucket = self._bucket(frame)
            compare_digests(sent=bucket.digest, received=received_digest(bucket))
            arrived.append(bucket.digest)
            yield from bucket.named_tensors()
        compare_digests(sent=frame["end"], received=combined_digest(arrived))

    def _bucket(self, frame: dict[str, Any]) -> WeightBucket:
        specs = tuple(
            TensorSpec(**{**fields, "shape": tuple(fields["shape"])}) for fields in frame["specs"]
        )
        payload = torch.empty(0, dtype=torch.uint8)
        if frame["num_bytes"]:
            payload = self._carrier.pull(frame["reference"], frame["num_bytes"])
        return WeightBucket(specs, payload, frame["digest"])
