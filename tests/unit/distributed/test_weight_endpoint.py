"""Endpoints in workers: kept from transfer to transfer, and dropped after a failure."""

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import join_process_group, rank
from nemo_rl_core.distributed.weight_sync.link import Endpoint, ReceivesWeights, SendsWeights
from nemo_rl_core.distributed.weight_sync.transport import SENDER, LinkSpec
from nemo_rl_core.errors import TransferError

Named = list[tuple[str, float]]


class Trainer(SendsWeights):
    """Two numbers per step, gathered over all ranks."""

    step = 0
    num_gathered = 0

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
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


@pytest.fixture
def new_link(meeting_points: list[TCPStore]) -> Callable[[], LinkSpec]:
    def open_one() -> LinkSpec:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting_points.append(store)
        return LinkSpec(
            "127.0.0.1", store.port, 1, "shared_memory", timeout_seconds=600.0, token="secret"
        )

    return open_one


@pytest.fixture
def meeting_points() -> list[TCPStore]:
    """Rendezvous of endpoints that lasts as long as the test."""
    return []


def side_by_side(*ends: Callable[[], Any]) -> list[Any]:
    """Runs each function in a separate thread; returns results and errors."""
    result: list[Any] = [None] * len(ends)

    def run(index: int) -> None:
        try:
            result[index] = ends[index]()
        except Exception as error:  # noqa: BLE001 (compared by the test)
            result[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=500)
    return result


def transfer(trainer: Trainer, engine: Engine, link: LinkSpec, *others: LinkSpec) -> list[Any]:
    return side_by_side(
        lambda: trainer.send_weights(link, others), lambda: engine.receive_weights(link, 0)
    )


def test_link_is_reused_until_another_replaces_it(
    new_link: Callable[[], LinkSpec],
) -> None:
    trainer, engine = Trainer(), Engine()
    first, second = new_link(), new_link()
    ends = []
    for trainer.step, link in enumerate([first, first, second], start=1):
        sent, received = transfer(trainer, engine, link)
        assert sent == received
        assert trainer._endpoints.keys() == {link}
        ends.append((trainer._endpoints[link], engine._endpoint))
    assert engine.taken == [[("first", step), ("second", step)] for step in (1.0, 2.0, 3.0)]
    assert ends[0] == ends[1]
    assert ends[1][0] is not ends[2][0]
    assert ends[1][1] is not ends[2][1]
    for _ in range(2):
        trainer.close_link(second)
    assert trainer._endpoints == {}


def test_endpoint_without_the_token_cannot_send_or_receive(
    new_link: Callable[[], LinkSpec],
) -> None:
    trainer, engine, link = Trainer(), Engine(), new_link()
    assert "secret" not in repr(link)
    sent, received = side_by_side(
        lambda: trainer.send_weights(replace(link, token="another")),
        lambda: engine.receive_weights(link, 0),
    )
    assert isinstance(sent, TransferError)
    assert isinstance(received, TransferError)
    assert received.problem == "a message of a weight transfer is not from this run"
    assert engine.taken == []
    link = new_link()
    sent, received = side_by_side(
        lambda: trainer.send_weights(link),
        lambda: engine.receive_weights(replace(link, token="another"), 0),
    )
    assert isinstance(sent, TransferError)
    assert isinstance(received, TransferError)


def test_two_engines_keep_their_links(new_link: Callable[[], LinkSpec]) -> None:
    trainer, one, other = Trainer(), Engine(), Engine()
    first, second = new_link(), new_link()
    for step, engine, link, others in (
        (1, one, first, []),
        (2, other, second, [first]),
        (3, one, first, [second]),
        (4, other, second, [first]),
    ):
        trainer.step = step
        sent, received = transfer(trainer, engine, link, *others)
        assert sent == received
    assert trainer._endpoints.keys() == {first, second}
    assert [len(engine.taken) for engine in (one, other)] == [2, 2]


def test_a_failure_drops_both_endpoints_and_another_link_works(
    new_link: Callable[[], LinkSpec],
) -> None:
    trainer, engine = Trainer(), BrokenEngine()
    first, second = new_link(), new_link()
    sent, received = transfer(trainer, engine, first)
    assert isinstance(sent, TransferError)
    assert isinstance(received, ValueError)
    assert trainer._endpoints == {}
    assert engine._endpoint is None
    sent, received = transfer(trainer, complete := Engine(), second)
    assert sent == received
    assert complete.taken == [[("first", 0.0), ("second", 0.0)]]


def test_every_rank_gathers_to_the_end_though_the_engine_has_failed(
    new_link: Callable[[], LinkSpec],
) -> None:
    def end(first: LinkSpec, second: LinkSpec) -> list[Any]:
        join_process_group(timeout_seconds=20)
        trainer = Trainer()
        trainer.step = 1
        if rank() == 1:
            return [trainer.send_weights(None) for _ in (first, second)]
        broken, engine = BrokenEngine(), Engine()
        failed = transfer(trainer, broken, first)[0]
        digests = transfer(trainer, engine, second)
        assert digests[0] == digests[1]
        return [type(failed).__name__, trainer.num_gathered, *engine.taken]

    results = run_ranks(end, new_link(), new_link(), world_size=2, timeout_seconds=60)
    assert results == [["TransferError", 4, [("first", 2.0), ("second", 2.0)]], ["", ""]]


@pytest.mark.slow
@pytest.mark.parametrize("group_rank", [SENDER, SENDER + 1])
def test_an_endpoint_that_waits_fails_when_the_controller_closes_the_link(
    group_rank: int, new_link: Callable[[], LinkSpec]
) -> None:
    context = multiprocessing.get_context("forkserver")
    port, controller_end = context.Pipe()
    controller = context.Process(target=_keep_link_open, args=(controller_end,))
    controller.start()
    link = replace(new_link(), port=port.recv())
    timer = threading.Timer(0.3, controller.kill)
    timer.start()
    with pytest.raises(TransferError, match="was interrupted"):
        Endpoint(link, group_rank)  # with the link open it would wait until pytest ends it
    timer.join()
    controller.join()


def _keep_link_open(end: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    end.send(store.port)
    end.recv()
