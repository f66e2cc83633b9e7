"""The ends of routes in workers: kept from transfer to transfer, and dropped after a failure."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import join_process_group, rank
from nemo_rl_core.distributed.weight_sync import (
    ReceivesWeights,
    RouteHost,
    SendsWeights,
    WeightReceiver,
    WeightRoute,
    WeightSender,
)
from nemo_rl_core.errors import TransferError

Named = list[tuple[str, float]]


class Trainer(SendsWeights):
    """Two numbers a step, gathered over all ranks."""

    step = 0
    num_gathered = 0

    def sent_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("first", "second"):
            total = torch.tensor([float(self.step)])
            if dist.is_initialized():
                dist.all_reduce(total)
            self.num_gathered += 1
            yield name, total


class Engine(ReceivesWeights):
    def __init__(self) -> None:
        self.taken: list[Named] = []

    def take_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.taken.append([(name, tensor.item()) for name, tensor in named_tensors])


class BrokenEngine(Engine):
    def take_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        raise ValueError("no room")


def hosts(count: int) -> list[RouteHost]:
    return [RouteHost(num_receivers=1, carrier="shared_memory") for _ in range(count)]


def side_by_side(*ends: Callable[[], Any]) -> list[Any]:
    """What each returns or raises, in a thread of its own."""
    found: list[Any] = [None] * len(ends)

    def run(place: int) -> None:
        try:
            found[place] = ends[place]()
        except Exception as error:  # noqa: BLE001 (compared by the test)
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=500)
    return found


def transfer(trainer: Trainer, engine: Engine, route: WeightRoute, *kept: WeightRoute) -> list[Any]:
    return side_by_side(
        lambda: trainer.send_weights(route, kept), lambda: engine.receive_weights(route, 0)
    )


def test_a_route_serves_every_transfer_until_another_one_takes_its_place() -> None:
    trainer, engine = Trainer(), Engine()
    first, second = hosts(2)
    ends = []
    for trainer.step, host in enumerate([first, first, second], start=1):
        sent, received = transfer(trainer, engine, host.route)
        assert sent == received
        assert trainer._senders.keys() == {host.route}
        ends.append((trainer._senders[host.route], engine._receiver))
    assert engine.taken == [[("first", step), ("second", step)] for step in (1.0, 2.0, 3.0)]
    assert ends[0] == ends[1]
    assert ends[1][0] is not ends[2][0]
    assert ends[1][1] is not ends[2][1]
    for _ in range(2):
        trainer.close_route(second.route)
    assert trainer._senders == {}


def test_two_engines_keep_their_routes() -> None:
    trainer, one, other = Trainer(), Engine(), Engine()
    both = hosts(2)  # meeting points live as long as their hosts
    first, second = (host.route for host in both)
    for step, engine, route, others in (
        (1, one, first, []),
        (2, other, second, [first]),
        (3, one, first, [second]),
        (4, other, second, [first]),
    ):
        trainer.step = step
        sent, received = transfer(trainer, engine, route, *others)
        assert sent == received
    assert trainer._senders.keys() == {first, second}
    assert [len(engine.taken) for engine in (one, other)] == [2, 2]


def test_a_failure_drops_both_ends_and_another_route_works() -> None:
    trainer, engine = Trainer(), BrokenEngine()
    first, second = hosts(2)
    sent, received = transfer(trainer, engine, first.route)
    assert isinstance(sent, TransferError)
    assert isinstance(received, ValueError)
    assert trainer._senders == {}
    assert engine._receiver is None
    sent, received = transfer(trainer, whole := Engine(), second.route)
    assert sent == received
    assert whole.taken == [[("first", 0.0), ("second", 0.0)]]


def test_every_rank_gathers_to_the_end_though_the_engine_has_failed() -> None:
    def end(first: WeightRoute, second: WeightRoute) -> list[Any]:
        join_process_group(timeout_seconds=20)
        trainer = Trainer()
        trainer.step = 1
        if rank() == 1:
            return [trainer.send_weights(route) for route in (first, second)]
        broken, engine = BrokenEngine(), Engine()
        failed = transfer(trainer, broken, first)[0]
        digests = transfer(trainer, engine, second)
        assert digests[0] == digests[1]
        return [type(failed).__name__, trainer.num_gathered, *engine.taken]

    first, second = hosts(2)
    found = run_ranks(end, first.route, second.route, world_size=2, timeout_seconds=60)
    assert found == [["TransferError", 4, [("first", 2.0), ("second", 2.0)]], ["", ""]]


@pytest.mark.parametrize("end", [WeightSender, WeightReceiver])
def test_whoever_waits_for_the_other_end_is_told_when_the_host_gives_up(end: Any) -> None:
    (host,) = hosts(1)
    route = host.route
    timer = threading.Timer(0.3, host.close)
    timer.start()
    with pytest.raises(TransferError, match="broke off"):
        end(route)  # without the host's word it would wait until pytest ends it
    timer.join()
