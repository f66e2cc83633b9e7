"""The way of weights from a policy's workers to an engine's, as the controlling process sees it."""

from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from nemo_rl_core.distributed.weight_sync import (
    Location,
    RouteHost,
    WeightRoute,
    carrier_between,
    compare_digests,
    machine_of_this_process,
)
from nemo_rl_core.distributed.worker_group import RayWorkerGroup, finish_together
from nemo_rl_core.errors import WorkerError

_MAX_WAIT_SECONDS = 600.0


class WeightLine:
    """One route, for any number of transfers; a new one is needed after a transfer that failed.

    Args:
        trainer: Workers whose backend is a `SendsWeights`.
        engine: Workers whose backend is a `ReceivesWeights`.
        timeout_seconds: For which one end waits for the others; ten minutes at most.

    Raises:
        WorkerError: If a worker is lost.
    """

    def __init__(
        self, trainer: RayWorkerGroup, engine: RayWorkerGroup, timeout_seconds: float | None
    ) -> None:
        self.trainer, self._timeout_seconds = trainer, timeout_seconds
        sender: Location = trainer.run_single_worker("weight_location")
        receivers: list[Location] = engine.run_all_workers_single_data("weight_location")
        here = machine_of_this_process()
        all_here = all(place.machine == here for place in (sender, *receivers))
        self._host = RouteHost(
            num_receivers=engine.world_size,
            carrier=carrier_between(sender, receivers),
            host="127.0.0.1" if all_here else _own_address(),
            timeout_seconds=min(timeout_seconds or _MAX_WAIT_SECONDS, _MAX_WAIT_SECONDS),
        )

    @property
    def route(self) -> WeightRoute:
        """How the two ends find one another."""
        return self._host.route

    def transfer(self, engine: RayWorkerGroup, **options: Any) -> str:
        """Hands all weights over.

        Args:
            engine: The same workers.
            **options: For its `receive_weights`.

        Returns:
            The digest of what was sent, and has arrived at every worker of the engine.

        Raises:
            ConsistencyError: If something else has arrived.
            WorkerError: If either end is lost or fails.
        """
        route, trainer = self.route, self.trainer
        # Of engines that are gone, nobody else tells the trainer.
        kept = [line.route for line in _lines.values() if line.trainer is trainer]
        sending = [
            trainer.start_single_worker("send_weights", route, kept, rank=rank)
            for rank in range(trainer.world_size)
        ]
        receiving = [
            engine.start_single_worker("receive_weights", route, rank, rank=rank, **options)
            for rank in range(engine.world_size)
        ]
        try:
            sent, received = finish_together(
                [(trainer, sending), (engine, receiving)], self._timeout_seconds
            )
        except BaseException:
            self._host.close()  # an end that still waits for the lost one has an error now
            raise
        for digest in received:
            compare_digests(sent=sent[0], received=digest)
        return str(sent[0])


# An engine's workers that are gone take their line with them.
_lines: "WeakKeyDictionary[RayWorkerGroup, WeightLine]" = WeakKeyDictionary()


def transfer_weights(
    trainer: RayWorkerGroup,
    engine: RayWorkerGroup,
    *,
    timeout_seconds: float | None,
    **options: Any,
) -> str:
    """As `WeightLine.transfer`, over the line that the last call between these two has used.

    Args:
        trainer: Workers of the policy.
        engine: Workers of the engine, whose last transfer may have come from another policy.
        timeout_seconds: For which one end waits for the others, and the longest for the whole.
        **options: For the engine's `receive_weights`.
    """
    line = _lines.pop(engine, None)  # comes back if all goes well
    if line is None or line.trainer is not trainer:
        if line is not None:
            _close(line)
        line = WeightLine(trainer, engine, timeout_seconds)
    digest = line.transfer(engine, **options)
    _lines[engine] = line
    return digest


def close_line(engine: RayWorkerGroup) -> None:
    """Gives back what the trainer holds for this engine; a no-op where nothing was sent."""
    line = _lines.pop(engine, None)
    if line is not None:
        _close(line)


def _close(line: WeightLine) -> None:
    if line.trainer.world_size:
        # Of a trainer that was lost, nothing is left to be given back.
        with suppress(WorkerError):
            line.trainer.run_single_worker("close_route", line.route)


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())
