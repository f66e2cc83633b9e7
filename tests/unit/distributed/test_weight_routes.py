"""Routes of weights for 1, 8 and 16 GPUs, which never pass through another rank's memory."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import join_process_group, rank_environment
from nemo_rl_core.distributed.virtual_cluster import free_address
from nemo_rl_core.distributed.weight_sync.link import ReceivesWeights, SendsWeights
from nemo_rl_core.distributed.weight_sync.routes import (
    Location,
    Route,
    choose_routes,
    current_location,
)
from nemo_rl_core.distributed.weight_sync.transport import LinkSpec
from tests.simulated_cuda import SimulatedTensor, simulated_cuda
from tests.simulated_gpus import SimulatedIpc, SimulatedNccl, simulate_transports

BUCKET_BYTES = 4096


def gpus(num_machines: int, *, first: int = 0, each: int = 8) -> list[Location]:
    machines = range(first, first + num_machines)
    return [Location(f"machine {m}", f"GPU {m}.{gpu}") for m in machines for gpu in range(each)]


def cores(*machines: str) -> list[Location]:
    return [Location(machine, None) for machine in machines]


def on_same_gpu(count: int) -> list[Route]:
    return [Route(rank, (rank,), "cuda_ipc") for rank in range(count)]


@pytest.mark.parametrize(
    ("trainer", "engine", "expected"),
    [
        pytest.param(gpus(1, each=1), gpus(1, each=1), on_same_gpu(1), id="1"),
        pytest.param(gpus(1), gpus(1), on_same_gpu(8), id="1x8"),
        pytest.param(gpus(2), gpus(2), on_same_gpu(16), id="2x8"),
        pytest.param(gpus(2), gpus(1), on_same_gpu(8), id="engines on the first of 2x8"),
        pytest.param(
            gpus(1), gpus(1, first=1), [Route(0, tuple(range(8)), "nccl")], id="1x8 dedicated"
        ),
        pytest.param(
            gpus(1),
            gpus(2, first=1),
            [Route(0, tuple(range(16)), "nccl")],
            id="2x8 dedicated",
        ),
        pytest.param(
            gpus(1, each=6),
            gpus(1)[6:],
            [Route(0, (0, 1), "nccl")],
            id="own GPUs of the trainer's machine",
        ),
        pytest.param(
            gpus(1, each=2),
            [*gpus(1, each=1), *gpus(1, first=1, each=2)],
            [Route(0, (0,), "cuda_ipc"), Route(1, (1, 2), "nccl")],
            id="one of the trainer's and two dedicated",
        ),
        # Every rank sends already, and NCCL refuses two ranks on one GPU.
        pytest.param(
            gpus(1, each=1),
            gpus(1, each=2),
            [Route(0, (0, 1), "shared_memory")],
            id="more engines than ranks",
        ),
        pytest.param(
            cores("a", "a"), cores("a", "a"), [Route(0, (0, 1), "shared_memory")], id="cpu"
        ),
        pytest.param(
            cores("a", "a", "b", "b"),
            cores("a", "b", "a", "b"),
            [Route(0, (0, 2), "shared_memory"), Route(2, (1, 3), "shared_memory")],
            id="cpu on two machines",
        ),
        pytest.param(
            cores("a", "a"),
            cores("a", "b"),
            [Route(0, (0,), "shared_memory"), Route(1, (1,), "gloo")],
            id="cpu, an engine elsewhere",
        ),
        pytest.param(cores("a"), cores("a", "b"), [Route(0, (0, 1), "gloo")], id="one cpu rank"),
        pytest.param(
            gpus(1, each=2), cores("machine 0"), [Route(0, (0,), "shared_memory")], id="no gpu"
        ),
    ],
)
def test_each_engine_rank_has_the_nearest_sender(
    trainer: list[Location], engine: list[Location], expected: list[Route]
) -> None:
    assert choose_routes(trainer, engine) == expected


class Trainer(SendsWeights):
    """A rank that holds a shard of every weight, and gathers them on its GPU as NCCL would."""

    sent_dtype = torch.bfloat16

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._shards = {
            name: SimulatedTensor(full.chunk(num_ranks)[rank].clone())
            for name, full in full_weights(num_ranks).items()
        }

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shard in self._shards.items():
            parts = [torch.empty_like(shard.values) for _ in range(self._num_ranks)]
            dist.all_gather(parts, shard.values)
            yield name, SimulatedTensor(torch.cat(parts))


class Engine(ReceivesWeights):
    """Records the tensors that it receives."""

    def take_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.taken = dict(named_tensors)


def full_weights(num_ranks: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"embedding": (128, 80), "norm": (num_ranks,)}
    shapes |= {f"layer {index}": (num_ranks, 30) for index in range(6)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def send(rank: int, locations: dict[str, list[Location]], link: LinkSpec | None) -> dict[str, Any]:
    """Sends weights from a trainer rank; returns the digest and the waits of the host."""
    join_process_group(timeout_seconds=100)
    gpu = locations["trainer"][rank].gpu
    assert gpu is not None
    with simulated_cuda(gpu) as transfers, pytest.MonkeyPatch.context() as patch:
        simulate_transports(patch)
        assert current_location().gpu == gpu
        trainer = Trainer(rank, len(locations["trainer"]))
        transfers.clear()
        digests = [trainer.send_weights(link, [link] if link else []) for _ in range(2)]
        waits = {(each.kind, each.operator, each.location) for each in transfers}
        opened = trainer._endpoints or {}
        most_bytes = [each._transport.most_bytes for each in opened.values()]  # type: ignore[attr-defined]
    return {"digests": digests, "waits": waits, "most_bytes": most_bytes, "pid": os.getpid()}


def receive(
    rank: int, locations: dict[str, list[Location]], link: LinkSpec, index: int
) -> dict[str, Any]:
    gpu = locations["engine"][rank].gpu
    assert gpu is not None
    with simulated_cuda(gpu) as transfers, pytest.MonkeyPatch.context() as patch:
        simulate_transports(patch)
        engine = Engine()
        digests = [engine.receive_weights(link, index) for _ in range(2)]
        waits = {(each.kind, each.operator, each.location) for each in transfers}
        expected = full_weights(len(locations["trainer"]))
        is_equal = engine.taken.keys() == expected.keys() and all(
            torch.equal(engine.taken[name].values, full.bfloat16())
            for name, full in expected.items()
        )
    return {
        "digests": digests,
        "waits": waits,
        "is_equal": is_equal,
        "mapped_from": SimulatedIpc.mapped_from,
    }


def transfer(locations: dict[str, list[Location]]) -> dict[str, list[dict[str, Any]]]:
    """Runs two transfers between forked processes, one per rank; called in a separate process."""
    routes = choose_routes(locations["trainer"], locations["engine"])
    SimulatedIpc.bucket_bytes = SimulatedNccl.bucket_bytes = BUCKET_BYTES
    with simulated_cuda():
        pass  # imports what each process needs
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    links = {
        route.sender: LinkSpec(
            "127.0.0.1",
            store.port,
            len(route.receivers),
            route.transport,
            100.0,
            "secret",
            route.sender,
        )
        for route in routes
    }
    address, port = free_address()
    calls: list[tuple[str, dict[str, str], Callable[..., Any], tuple[Any, ...]]] = []
    for rank in range(len(locations["trainer"])):
        environment = rank_environment(
            rank, len(locations["trainer"]), address=address, port=port, local_rank=0
        )
        calls.append(("trainer", environment, send, (rank, locations, links.get(rank))))
    for route in routes:
        for index, receiver in enumerate(route.receivers):
            calls.append(("engine", {}, receive, (receiver, locations, links[route.sender], index)))
    fork = multiprocessing.get_context("fork")
    results: Any = fork.Queue()

    def run(number: int, environment: dict[str, str], call: Callable[..., Any], args: Any) -> None:
        os.environ.update(environment)
        try:
            results.put((number, call(*args)))
        except BaseException:  # noqa: BLE001 (raised by who waits for it)
            results.put((number, traceback.format_exc()))

    processes = [
        fork.Process(target=run, args=(number, *rest)) for number, (_, *rest) in enumerate(calls)
    ]
    for process in processes:
        process.start()
    by_rank = dict(results.get(timeout=200) for _ in processes)
    for process in processes:
        process.join()
    failed = [each for each in by_rank.values() if isinstance(each, str)]
    assert not failed, failed[0]
    by_group: dict[str, list[dict[str, Any]]] = {"trainer": [], "engine": []}
    for number, (group, *_) in enumerate(calls):
        by_group[group].append(by_rank[number])
    return by_group


@pytest.mark.parametrize(
    ("trainer", "engine"),
    [
        pytest.param(gpus(1), gpus(1), id="1x8"),
        pytest.param(gpus(2), gpus(2), id="2x8", marks=pytest.mark.thorough),
        pytest.param(gpus(1, each=2), gpus(1, first=1, each=4), id="four dedicated"),
    ],
)
def test_no_tensor_passes_through_the_host_or_another_rank(
    trainer: list[Location], engine: list[Location]
) -> None:
    locations = {"trainer": trainer, "engine": engine}
    results = run_ranks(transfer, locations, world_size=1, timeout_seconds=300)[0]
    routes = choose_routes(trainer, engine)
    senders = [results["trainer"][route.sender] for route in routes]
    digests = {tuple(each["digests"]) for each in (*senders, *results["engine"])}
    assert len(digests) == 1
    assert all(each["is_equal"] for each in results["engine"])
    # Only the sums of rows and columns of a bucket reach the host.
    (waits,) = {frozenset(each["waits"]) for each in (*senders, *results["engine"])}
    assert waits == {("sync", "to", "link.py:word_sums")}
    assert all(each["most_bytes"] == [2 * BUCKET_BYTES] for each in senders)
    idle = [each for each in results["trainer"] if each not in senders]
    assert all(each["digests"] == ["", ""] and not each["waits"] for each in idle)
    received = iter(results["engine"])
    for route in routes:
        for _ in route.receivers:
            mapped = (
                {results["trainer"][route.sender]["pid"]} if route.transport != "nccl" else set()
            )
            assert next(received)["mapped_from"] == mapped
