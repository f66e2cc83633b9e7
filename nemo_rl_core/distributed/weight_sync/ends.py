"""What a worker has to be at either end of a route: classes that a backend inherits from.

An end is opened by the first transfer over its route and kept for the next one: the pages that the
bytes lie in take the system longer to hand out than to fill. One that has failed is dropped at
once, and its memory with it.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Iterator

import torch

from nemo_rl_core.distributed.process_group import rank
from nemo_rl_core.distributed.weight_sync.carriers import Location, location_of_this_process
from nemo_rl_core.distributed.weight_sync.channel import WeightRoute
from nemo_rl_core.distributed.weight_sync.transfer import WeightReceiver, WeightSender


class HasPlace:
    """A worker that can say where it runs."""

    def weight_location(self) -> Location:
        """This process's place, of which `carrier_between` makes the carrier."""
        return location_of_this_process()


class SendsWeights(HasPlace):
    """One rank of a trainer; the first one has the ends of all routes that it serves."""

    _senders: dict[WeightRoute, WeightSender] | None = None

    @abstractmethod
    def sent_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole weights in the type that engines compute with; every rank iterates to the end."""

    def send_weights(self, route: WeightRoute, kept: Collection[WeightRoute] = ()) -> str:
        """Sends all weights; every rank of the trainer is called at once.

        Args:
            route: Opened where it is new.
            kept: Those to other engines that are still there; the ends of all others are closed.

        Returns:
            On rank 0 the digest of what was sent, and elsewhere nothing.

        Raises:
            TransferError: If a receiver is gone, or does not come in time.
        """
        weights = self.sent_weights()
        try:
            return self._sent(weights, route, kept) if rank() == 0 else ""
        finally:
            # Gathering is a collective: all ranks go through it, whatever becomes of the transfer.
            deque(weights, maxlen=0)

    def _sent(
        self,
        weights: Iterator[tuple[str, torch.Tensor]],
        route: WeightRoute,
        kept: Collection[WeightRoute],
    ) -> str:
        opened = self._senders or {}
        sender = opened.pop(route, None) or WeightSender(route)  # comes back if all goes well
        self._senders = {each: opened[each] for each in kept if each in opened}
        digest = sender.send(weights)
        self._senders[route] = sender
        return digest

    def close_route(self, route: WeightRoute) -> None:
        """Gives back what a route holds; a no-op where it is not open."""
        (self._senders or {}).pop(route, None)


class ReceivesWeights(HasPlace):
    """One rank of an engine."""

    _receiver: WeightReceiver | None = None

    @abstractmethod
    def take_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replaces all weights and empties every cache that old ones filled.

        Args:
            named_tensors: Whole ones, all of which must be read. They hold only until this returns,
                and must not be written to.
        """

    def receive_weights(self, route: WeightRoute, place: int) -> str:
        """Takes one transfer; every rank of every engine is called at once.

        Args:
            route: Opened where it is new; the older one is closed then.
            place: This worker's among the receivers, from 0.

        Returns:
            The digest of what arrived.

        Raises:
            ConsistencyError: If bytes changed on the way.
            TransferError: If the sender is gone, or does not come in time.
        """
        receiver, self._receiver = self._receiver, None  # comes back if all goes well
        if receiver is None or receiver.route != route:
            receiver = WeightReceiver(route, place=place)
        digest = receiver.receive(self.take_weights)
        self._receiver = receiver
        return digest
