"""The controller of a link: several senders, its comparisons, and its cleanup.

Its two groups are plain objects whose methods run in threads; `tests/ray/` has real workers.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from nemo_rl_core.distributed.weight_sync import link
from nemo_rl_core.distributed.weight_sync.link import ReceivesWeights, SendsWeights, WeightLink
from nemo_rl_core.distributed.weight_sync.routes import Location
from nemo_rl_core.errors import ConsistencyError
from tests.simulated_gpus import SimulatedIpc, SimulatedNccl, simulate_transports

BUCKET_BYTES = 4096


class Trainer(SendsWeights):
    step = 1

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "embedding", torch.arange(5000.0) * self.step
        for number in range(8):
            yield f"layer {number}", torch.full((300,), float(number + self.step))


class Engine(ReceivesWeights):
    def take_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.taken = dict(named_tensors)


class Call:
    """A method that runs in a thread."""

    def __init__(self, method: Callable[..., Any], args: Any) -> None:
        self.value: Any = None
        self.thread = threading.Thread(target=self._run, args=(method, args))
        self.thread.start()

    def _run(self, method: Callable[..., Any], args: Any) -> None:
        try:
            self.value = method(*args)
        except Exception as error:  # noqa: BLE001 (raised by who waits for it)
            self.value = error


class Group:
    """A worker group with the methods that a link calls."""

    def __init__(self, kind: type, locations: Sequence[Location]) -> None:
        self.locations, self.workers = locations, [kind() for _ in locations]
        self.world_size = len(locations)

    def run_all_workers_single_data(self, method: str, *_: Any) -> list[Location]:
        assert method == "__ray_call__"  # asks for its machine
        return list(self.locations)

    def start_single_worker(self, method: str, *args: Any, rank: int) -> Call:
        return Call(getattr(self.workers[rank], method), args)

    def run_single_worker(self, method: str, *args: Any, rank: int = 0) -> Any:
        return getattr(self.workers[rank], method)(*args)


def finish_together(pending: Any, timeout_seconds: float | None) -> list[list[Any]]:
    results = []
    for _, calls in pending:
        for call in calls:
            call.thread.join(timeout=60)
        results.append([call.value for call in calls])
    errors = [value for values in results for value in values if isinstance(value, Exception)]
    if errors:
        raise errors[0]
    return results


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_transports(monkeypatch)
    for transport in (SimulatedIpc, SimulatedNccl):
        monkeypatch.setattr(transport, "bucket_bytes", BUCKET_BYTES)
    monkeypatch.setattr(link, "finish_together", finish_together)
    monkeypatch.setattr(link, "_own_address", lambda: "127.0.0.1")


def on_gpus(*names: str) -> list[Location]:
    """Returns locations on machines that the first letter names."""
    return [Location(name[0], name) for name in names]


def opened(trainer: Group, engine: Group) -> WeightLink:
    groups: Any = (trainer, engine)
    return WeightLink.between(*groups, timeout_seconds=60)


def has_taken(engine: Group, step: int) -> list[bool]:
    sent = torch.arange(5000.0) * step
    return [torch.equal(each.taken["embedding"], sent) for each in engine.workers]


def test_every_rank_sends_to_the_engine_on_its_gpu() -> None:
    trainer = Group(Trainer, on_gpus("a0", "a1", "b0", "b1"))
    engine = Group(Engine, on_gpus("b1", "a0", "a1", "b0"))
    for step in (1, 2):
        for worker in trainer.workers:
            worker.step = step
        way = opened(trainer, engine)
        way.transfer()
        assert has_taken(engine, step) == [True] * 4
    result = [(spec.sender, spec.transport, spec.num_receivers) for spec in way.specs.values()]
    assert result == [(rank, "cuda_ipc", 1) for rank in range(4)]
    for worker in trainer.workers:
        ((_, endpoint),) = worker._endpoints.items()
        assert endpoint._transport.most_bytes == 2 * BUCKET_BYTES
    way.close()
    assert [worker._endpoints for worker in trainer.workers] == [{}] * 4


def test_one_rank_sends_to_dedicated_engines_and_the_others_gather() -> None:
    trainer = Group(Trainer, on_gpus("a0", "a1"))
    engine = Group(Engine, on_gpus("b0", "b1", "c0"))
    way = opened(trainer, engine)
    way.transfer()
    assert has_taken(engine, 1) == [True] * 3
    assert [len(worker._endpoints) for worker in trainer.workers] == [1, 0]


def test_rank_that_sent_other_weights_is_named_and_the_link_dropped() -> None:
    trainer = Group(Trainer, on_gpus("a0", "a1", "a2"))
    engine = Group(Engine, on_gpus("a0", "a1", "a2"))
    trainer.workers[2].step = 7
    way = opened(trainer, engine)
    with pytest.raises(ConsistencyError, match="rank 2 of the trainer sent weights that differ"):
        way.transfer()
    assert engine not in WeightLink.by_engine
    trainer.workers[2].step = 1
    assert opened(trainer, engine) is not way
    opened(trainer, engine).transfer()
    assert has_taken(engine, 1) == [True] * 3


def test_an_engine_that_received_other_weights_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, engine = Group(Trainer, on_gpus("a0", "a1")), Group(Engine, on_gpus("a0", "a1"))
    received = engine.workers[1].receive_weights
    engine.workers[1].receive_weights = lambda *args: received(*args)[::-1]
    with pytest.raises(ConsistencyError, match="received by the rollout engine are not"):
        opened(trainer, engine).transfer()


def test_the_link_to_one_engine_stays_while_another_takes_weights() -> None:
    trainer = Group(Trainer, on_gpus("a0", "a1"))
    engines = [Group(Engine, on_gpus("a0", "a1")), Group(Engine, on_gpus("b0"))]
    for _ in range(2):
        for engine in engines:
            opened(trainer, engine).transfer()
    assert [len(worker._endpoints) for worker in trainer.workers] == [2, 1]
