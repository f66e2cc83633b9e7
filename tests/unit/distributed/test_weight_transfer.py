"""Transfers of weights between real processes are exact or raise an error, but never hang."""

import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed import TCPStore
from torch.multiprocessing import reductions
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import rank
from nemo_rl_core.distributed.weight_sync import transport as transport_module
from nemo_rl_core.distributed.weight_sync.link import Endpoint, make_buckets
from nemo_rl_core.distributed.weight_sync.routes import (
    Location,
    TransportName,
    choose_transport,
    current_location,
)
from nemo_rl_core.distributed.weight_sync.transport import SENDER, CudaIpcTransport, LinkSpec
from nemo_rl_core.errors import ConsistencyError, ResourceError, WorkerError
from tests.simulated_gpus import simulate_transports

TRANSPORTS = [
    "shared_memory",
    "gloo",
    pytest.param(
        "cuda_ipc",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
    pytest.param(
        "nccl",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA devices"),
        ],
    ),
]
Named = list[tuple[str, torch.Tensor]]


def make_weights(seed: int = 0) -> Named:
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(11, 5, generator=generator)
    return [
        ("embed_tokens", embedding),
        ("odd", torch.randn(3, 1, 7, generator=generator)),
        ("half", torch.randn(13, 3, generator=generator).bfloat16()),
        ("empty", torch.empty(0, 4)),
        ("scalar", torch.tensor(float("nan"))),
        ("flags", torch.tensor([True, False, True])),
        ("transposed", torch.arange(6, dtype=torch.int16).view(2, 3).T),
        ("large", torch.randn(40, 5, generator=generator)),
        ("lm_head", embedding),  # tied
        ("parameter", torch.nn.Parameter(torch.ones(2))),
        ("a name that is longer than one message holds " * 300, torch.ones(1)),
    ]


def bits(named_tensors: Iterator[tuple[str, torch.Tensor]] | Named) -> list[tuple[Any, ...]]:
    """Returns values that are equal only if names, types, shapes and all bytes are."""
    return [
        (name, str(t.dtype), tuple(t.shape), bytes(t.detach().cpu().flatten().view(torch.uint8)))
        if t.numel()
        else (name, str(t.dtype), tuple(t.shape))
        for name, t in ((n, t.contiguous()) for n, t in named_tensors)
    ]


@pytest.fixture
def new_link() -> Iterator[Callable[..., LinkSpec]]:
    """Creates links with a rendezvous that lasts as long as the test."""
    stores = []

    def open_one(
        transport: TransportName, *, num_receivers: int = 1, timeout_seconds: float = 60
    ) -> LinkSpec:
        stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        return LinkSpec(
            "127.0.0.1", stores[-1].port, num_receivers, transport, timeout_seconds, "secret"
        )

    yield open_one
    stores.clear()


def test_the_handle_of_a_gpu_tensor_is_sent_as_plain_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Uses the arguments that torch creates on a GPU; none is unpickled."""
    names = [*inspect.signature(reductions.rebuild_cuda_tensor).parameters]
    counter = (b"/torch_1_2", 3, b"event", True)
    where = (1, b"\x00handle\xff", 64, 512)
    shape = (torch.Tensor, torch.Size([16]), (1,), 8)
    types = (torch.storage.TypedStorage, torch.uint8)
    sent = dict(zip(names, (*shape, *types, *where, False, *counter), strict=True))
    rebuilt: dict[str, Any] = {}
    rebuild = reductions.rebuild_cuda_tensor
    values = tuple(sent.values())
    monkeypatch.setattr(reductions, "reduce_tensor", lambda payload: (rebuild, values))
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", lambda **given: rebuilt.update(given))
    simulate_transports(monkeypatch)
    sender, receiver = (object.__new__(CudaIpcTransport) for _ in range(2))
    sender._device, receiver._device = torch.device("cuda", 1), torch.device("cuda", 0)
    receiver._mapped(json.loads(json.dumps(sender.reference(torch.zeros(16)))))
    # Each process may number the GPUs differently; JSON turns tuples into lists.
    assert rebuilt == {**sent, "storage_device": 0, "tensor_size": [16], "tensor_stride": [1]}


def outcome(function: Callable[[], Any]) -> str:
    """Returns the name of the error that it raises."""
    try:
        function()
    except (ConsistencyError, WorkerError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("bucket_bytes", [64, 10**6])
def test_all_kinds_of_tensors_arrive_at_two_receivers(
    transport: TransportName, bucket_bytes: int, new_link: Callable[..., LinkSpec]
) -> None:
    def end(link: LinkSpec) -> list[Any]:
        seen: list[Any] = []
        if rank() == 0:
            sender = Endpoint(link, SENDER, bucket_bytes=bucket_bytes)
            return [sender.send(make_weights(seed)) for seed in (0, 1)]
        receiver = Endpoint(link, rank())
        digests = [receiver.receive(lambda tensors: seen.append(bits(tensors))) for _ in range(2)]
        return [*digests, *seen]

    link = new_link(transport, num_receivers=2)
    sent, *received = run_ranks(end, link, world_size=3)
    assert sent[0] != sent[1]
    for digests_and_weights in received:
        # The second transfer reuses the memory of the first.
        assert digests_and_weights == [*sent, bits(make_weights(0)), bits(make_weights(1))]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_empty_tensors_arrive_too(
    transport: TransportName, new_link: Callable[..., LinkSpec]
) -> None:
    nothing: list[Named] = [[], [("empty", torch.empty(3, 0))], []]

    def end(link: LinkSpec) -> list[Any]:
        if rank() == 0:
            sender = Endpoint(link, SENDER)
            return [sender.send(weights) for weights in nothing]
        receiver, seen = Endpoint(link, 1), []  # type: Endpoint, list[Any]
        for _ in nothing:
            receiver.receive(lambda tensors: seen.append(bits(tensors)))
        return seen

    link = new_link(transport)
    assert run_ranks(end, link, world_size=2)[1] == [bits(weights) for weights in nothing]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_tensors_stay_valid_until_all_are_loaded(
    transport: TransportName, new_link: Callable[..., LinkSpec]
) -> None:
    def end(link: LinkSpec) -> list[Any]:
        transfers = [make_weights(seed) * (seed + 1) for seed in range(3)]
        if rank() == 0:
            # Ever fewer and larger buckets: segments and blocks of the last transfer do not fit.
            sender = Endpoint(link, SENDER)
            for seed, weights in enumerate(transfers):
                sender._bucket_bytes = 100 * 4**seed
                sender.send(weights)
            return [bits(weights) for weights in transfers]
        receiver, seen = Endpoint(link, 1), []  # type: Endpoint, list[Any]
        for _ in transfers:
            receiver.receive(lambda tensors: seen.append(bits(list(tensors))))
        return seen

    link = new_link(transport)
    sent, received = run_ranks(end, link, world_size=2)
    assert received == sent


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl", "gloo"])
def test_sender_keeps_two_buckets_for_any_number_and_size(
    transport: TransportName, new_link: Callable[..., LinkSpec]
) -> None:
    weights = [(f"{index}", torch.full((100,), float(index))) for index in range(50)]
    weights.insert(20, ("large", torch.arange(1000.0)))  # two full pieces and a part of one
    weights.insert(30, ("none", torch.empty(0)))
    weights.insert(31, ("two pieces", torch.arange(800.0).view(2, 400).T))
    weights.append(("last", torch.arange(3201, dtype=torch.int8)))  # its last piece is a byte

    def end(link: LinkSpec) -> tuple[list[Any], int]:
        with pytest.MonkeyPatch.context() as patch:
            simulate_transports(patch)
            if rank() == 0:
                sender = Endpoint(link, SENDER, bucket_bytes=1600)
                for _ in range(2):
                    sender.send(weights)
                transport: Any = sender._transport
                return bits(weights), getattr(transport, "most_bytes", 0) or sum(
                    buffer.nbytes for buffer in transport._buffers
                )
            receiver, seen = Endpoint(link, rank()), []  # type: Endpoint, list[Any]
            for _ in range(2):
                # All at once: none is in memory that the sender writes to again.
                receiver.receive(lambda tensors: seen.extend(list(tensors)))
            return bits(seen), 0

    link = new_link(transport, num_receivers=2)
    (sent, most_bytes), *received = run_ranks(end, link, world_size=3)
    assert [found for found, _ in received] == [sent * 2] * 2
    assert most_bytes == 2 * 1600  # all weights are 31 kB


class _AllocatorSettings(TorchDispatchMode):
    """Records the allocator's settings under which memory is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if func is torch.ops.aten.empty.memory_format:
            self.seen.append(torch._C._accelerator_getAllocatorSettings())
        made: torch.Tensor = func(*args, **(kwargs or {}))
        return made


@pytest.mark.slow
@pytest.mark.parametrize("growing", [True, False])
def test_cuda_ipc_buffers_are_in_shareable_memory(growing: bool) -> None:
    settings = f"max_split_size_mb:64,expandable_segments:{growing}"

    def allocated() -> tuple[list[str], str]:
        torch._C._accelerator_setAllocatorSettings(settings)
        with pytest.MonkeyPatch.context() as patch, _AllocatorSettings() as allocator:
            patch.setattr(transport_module, "_need_gpu", lambda name: None)
            transport = CudaIpcTransport(None)
            for num_bytes in (100, 100, 200):
                transport.allocate(num_bytes)
        return allocator.seen, torch._C._accelerator_getAllocatorSettings()

    ((seen, after),) = run_ranks(allocated, world_size=1)
    assert len(seen) >= 5
    assert set(seen) == {"max_split_size_mb:64,expandable_segments:False"}
    assert after == settings


def test_a_transfer_has_the_digest_of_the_same_weights_as_buckets(
    new_link: Callable[..., LinkSpec],
) -> None:
    def end(link: LinkSpec) -> str:
        if rank() == 0:
            return Endpoint(link, SENDER, bucket_bytes=64).send(make_weights())
        return Endpoint(link, 1).receive(lambda tensors: bits(tensors) and None)

    link = new_link("shared_memory")
    allocate = partial(torch.empty, dtype=torch.uint8)
    buckets = make_buckets(make_weights(), bucket_bytes=64, allocate=allocate)
    digests = "".join(bucket.digest for bucket in buckets)
    expected = xxhash.xxh3_128(digests.encode()).hexdigest()
    assert run_ranks(end, link, world_size=2) == [expected, expected]


class _Damaging:
    """A transport that flips one bit after the checksum was taken."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, frame: dict[str, Any], payload: torch.Tensor | None = None) -> None:
        if payload is not None:
            payload[17] ^= 4
        self._transport.send(frame, payload)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_one_changed_bit_is_refused_at_both_ends(
    transport: TransportName, new_link: Callable[..., LinkSpec]
) -> None:
    def end(link: LinkSpec) -> tuple[str, list[Any]]:
        loaded: list[Any] = []
        if rank() == 0:
            sender = Endpoint(link, SENDER)
            sender._transport = _Damaging(sender._transport)
            return outcome(lambda: sender.send(make_weights())), loaded
        receiver = Endpoint(link, 1)
        return outcome(lambda: receiver.receive(loaded.extend)), loaded

    link = new_link(transport)
    (sent, _), (received, loaded) = run_ranks(end, link, world_size=2)
    assert received.startswith("ConsistencyError: the weights received")
    assert loaded == []
    assert sent.startswith("TransferError: a weight transfer was interrupted")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_a_receiver_that_dies_is_an_error(
    transport: TransportName, new_link: Callable[..., LinkSpec]
) -> None:
    def end(link: LinkSpec) -> str:
        if os.fork() == 0:
            # With the first bucket in its hands.
            Endpoint(link, 1).receive(lambda tensors: os._exit(int(next(tensors)[0] == "")))
        sender = Endpoint(link, SENDER, bucket_bytes=64)
        return outcome(lambda: [sender.send(make_weights()) for _ in range(3)])

    link = new_link(transport)
    (error,) = run_ranks(end, link, world_size=1, timeout_seconds=30)
    assert error.startswith("TransferError: a weight transfer was interrupted")


def test_failed_transfer_aborts_nccl(
    new_link: Callable[..., LinkSpec],
) -> None:
    def end(link: LinkSpec) -> tuple[str, bool]:
        with pytest.MonkeyPatch.context() as patch:
            simulate_transports(patch)
            endpoint = Endpoint(link, rank(), bucket_bytes=64)
            if rank() == SENDER:
                error = outcome(lambda: endpoint.send(make_weights()))
            else:
                error = outcome(lambda: endpoint.receive(lambda tensors: next(tensors) and None))
            group: Any = endpoint._transport
            return error, group._group.is_aborted

    (sent, is_ended), (received, has_ended) = run_ranks(end, new_link("nccl"), world_size=2)
    assert "was interrupted" in sent
    assert "only a part of the new weights" in received
    assert is_ended
    assert has_ended


@pytest.mark.thorough
def test_a_receiver_that_cannot_load_closes_its_end(
    new_link: Callable[..., LinkSpec], tmp_path: Path
) -> None:
    def fail(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        raise ValueError(f"no room for {next(tensors)[0]}")

    def leave_some(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        next(tensors)

    def end(link: LinkSpec, load: Callable[..., None], done: Path) -> str:
        if rank() == 0:
            sender = Endpoint(link, SENDER)
            outcome_text = outcome(lambda: sender.send(make_weights()))
            done.touch()
            return outcome_text
        receiver = Endpoint(link, 1)
        outcome_text = outcome(lambda: receiver.receive(load))
        while not done.exists():  # its process lives on
            time.sleep(0.01)
        return f"{outcome_text}; {outcome(lambda: receiver.receive(load))}"

    for load, error in (
        (fail, "ValueError: no room for embed_tokens"),
        (leave_some, "only a part of"),
    ):
        link = new_link("shared_memory")
        done = tmp_path / load.__name__
        sent, received = run_ranks(end, link, load, done, world_size=2)
        assert sent.startswith("TransferError: a weight transfer was interrupted")
        assert error in received
        assert "the link was closed" in received


@pytest.mark.thorough
def test_missing_or_stuck_endpoint_is_an_error(
    new_link: Callable[..., LinkSpec],
) -> None:
    def lonely(link: LinkSpec) -> str:
        return outcome(lambda: Endpoint(link, SENDER))

    def stuck(link: LinkSpec) -> str:
        if rank() == 1:
            receiver = Endpoint(link, 1)
            return outcome(lambda: receiver.receive(lambda tensors: time.sleep(2)))
        sender = Endpoint(link, SENDER)
        return outcome(lambda: sender.send(make_weights()))

    unused = new_link("gloo", timeout_seconds=1)
    assert "was interrupted" in run_ranks(lonely, unused, world_size=1)[0]
    slow = new_link("gloo", timeout_seconds=1)
    assert "was interrupted" in run_ranks(stuck, slow, world_size=2)[0]


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")
@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_transports_of_gpus_are_refused_without_one(
    transport: TransportName, new_link: Callable[..., LinkSpec]
) -> None:
    def end(link: LinkSpec) -> str:
        if rank() == 1:
            return outcome_of_missing_gpu(lambda: Endpoint(link, 1))
        return outcome_of_missing_gpu(lambda: Endpoint(link, SENDER))

    link = new_link(transport)
    for message in run_ranks(end, link, world_size=2):
        assert f"cannot be sent by '{transport}'" in message


def outcome_of_missing_gpu(function: Callable[[], Any]) -> str:
    with pytest.raises(ResourceError) as caught:
        function()
    return str(caught.value)


@pytest.mark.parametrize(
    ("sender", "receivers", "expected"),
    [
        (("a", None), [("a", None)], "shared_memory"),
        (("a", None), [("b", None)], "gloo"),
        (("a", None), [("a", None), ("b", None)], "gloo"),
        (("a", "0"), [("a", "0")], "cuda_ipc"),
        (("a", "0"), [("a", "1")], "nccl"),
        (("a", "0"), [("a", "1"), ("b", "2")], "nccl"),
        (("a", "0"), [("a", "0"), ("a", "1")], "shared_memory"),
        (("a", "0"), [("a", "0"), ("b", "1")], "gloo"),
        (("a", "0"), [("a", None)], "shared_memory"),
        (("a", "0"), [("b", None)], "gloo"),
    ],
)
def test_transport_follows_from_the_locations(
    sender: tuple[str, str | None], receivers: list[tuple[str, str | None]], expected: str
) -> None:
    assert (
        choose_transport(Location(*sender), [Location(*receiver) for receiver in receivers])
        == expected
    )


def test_two_processes_of_this_machine_have_one_location() -> None:
    assert run_ranks(current_location, world_size=1) == [current_location()]
