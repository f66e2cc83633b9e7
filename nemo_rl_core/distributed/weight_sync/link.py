"""What the controller holds between the workers of a policy and those of an engine."""

import weakref
from contextlib import suppress
from typing import Any, ClassVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nemo_rl_core.distributed.weight_sync.bucket import compare_digests
from nemo_rl_core.distributed.weight_sync.control import LinkSpec
from nemo_rl_core.distributed.weight_sync.transport import (
    Location,
    choose_transport,
    current_location,
    current_machine,
)
from nemo_rl_core.distributed.worker_group import RayWorkerGroup, finish_together
from nemo_rl_core.errors import WorkerError

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
        spec: What the endpoints know of this link.

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
        sender: Location = trainer.run_single_worker("__ray_call__", _location_of)
        receivers = engine.run_all_workers_single_data("__ray_call__", _location_of)
        here = current_machine()
        all_here = all(each.machine == here for each in (sender, *receivers))
        host = "127.0.0.1" if all_here else _own_address()
        self._store: TCPStore | None = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.spec = LinkSpec(
            host=host,
            port=self._store.port,
            num_receivers=engine.world_size,
            transport=choose_transport(sender, receivers),
            timeout_seconds=min(timeout_seconds or _MAX_WAIT_SECONDS, _MAX_WAIT_SECONDS),
        )

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
            The digest of what was sent, and has arrived at every worker.

        Raises:
            ConsistencyError: If something else has arrived.
            WorkerError: If either end is lost or fails. After any error the link is closed.
        """
        trainer, engine = self._trainer, self._engine()
        assert engine is not None
        # The trainer learns only from here of engines that are gone.
        open_links = [link.spec for link in self.by_engine.values() if link._trainer is trainer]
        try:
            sending = [
                trainer.start_single_worker("send_weights", self.spec, open_links, rank=rank)
                for rank in range(trainer.world_size)
            ]
            receiving = [
                engine.start_single_worker("receive_weights", self.spec, rank, rank=rank, **options)
                for rank in range(engine.world_size)
            ]
            sent, received = finish_together(
                [(trainer, sending), (engine, receiving)], self._timeout_seconds
            )
            for digest in received:
                compare_digests(sent=sent[0], received=digest)
        except BaseException:
            self._forget()
            raise
        return str(sent[0])

    def close(self) -> None:
        """Frees what the trainer holds for this engine."""
        self._forget()
        if self._trainer.world_size:
            # A trainer that was lost holds nothing any more.
            with suppress(WorkerError):
                self._trainer.run_single_worker("close_link", self.spec)

    def _forget(self) -> None:
        self._store = None  # an endpoint that still waits for a lost one gets an error now
        engine = self._engine()
        if engine is not None:
            self.by_engine.pop(engine, None)


def _location_of(_: Any) -> Location:
    return current_location()


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())
