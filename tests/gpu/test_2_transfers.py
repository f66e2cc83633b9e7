"""Weight transfers between two processes on one GPU."""

import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import multiprocessing
from torch.distributed import TCPStore

from nemo_rl_core.distributed.weight_sync.link import Endpoint
from nemo_rl_core.distributed.weight_sync.routes import TransportName
from nemo_rl_core.distributed.weight_sync.transport import SENDER, LinkSpec

NUM_TRANSFERS = 5
NUM_TENSORS = 20
TENSOR_SIZE = 64 * 1024**2  # in bfloat16: 128 MiB
NUM_PARTS = {3: 5}  # in units of that size; the largest tensor is sent in pieces, by CUDA IPC


def weights(transfer: int) -> Iterator[tuple[str, torch.Tensor]]:
    for number in range(NUM_TENSORS):
        value = float(transfer * NUM_TENSORS + number)
        yield (
            f"weight {number}",
            torch.full(
                (TENSOR_SIZE * NUM_PARTS.get(number, 1),),
                value,
                dtype=torch.bfloat16,
                device="cuda",
            ),
        )


def exchange(group_rank: int, port: int, transport: TransportName, results: Any) -> None:
    """Runs one end; puts seconds, digest, free memory, and whether each weight is right."""
    endpoint = Endpoint(LinkSpec("127.0.0.1", port, 1, transport, 60.0, "secret"), group_rank)
    for transfer in range(NUM_TRANSFERS):
        started = time.perf_counter()
        right: list[bool] = []
        if group_rank == SENDER:
            digest = endpoint.send(weights(transfer))
        else:
            digest = endpoint.receive(partial(compare, transfer, right))
        seconds = time.perf_counter() - started
        torch.cuda.empty_cache()
        results.put((group_rank, transfer, digest, seconds, torch.cuda.mem_get_info()[0], right))


def compare(transfer: int, right: list[bool], named: Iterator[tuple[str, torch.Tensor]]) -> None:
    arrived = list(named)  # all at once, like an engine
    for (name, tensor), (expected_name, expected) in zip(arrived, weights(transfer), strict=True):
        right.append(name == expected_name and torch.equal(tensor.cuda(), expected))


@pytest.mark.parametrize("transport", ["cuda_ipc", "shared_memory"])
def test_received_weights_equal_the_sent_ones_and_memory_stays_free(
    transport: TransportName,
) -> None:
    spawn = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = spawn.Queue()
    ends = [
        spawn.Process(target=exchange, args=(rank, store.port, transport, results))
        for rank in (SENDER, 1)
    ]
    for end in ends:
        end.start()
    actual = [results.get(timeout=300) for _ in range(2 * NUM_TRANSFERS)]
    for end in ends:
        end.join()
    assert [end.exitcode for end in ends] == [0, 0]
    sent = {transfer: rest for rank, transfer, *rest in actual if rank == SENDER}
    got = {transfer: rest for rank, transfer, *rest in actual if rank != SENDER}
    sys.stderr.write(f"\n{transport}, seconds: {[rest[1] for rest in sent.values()]}\n")
    for transfer in range(NUM_TRANSFERS):
        assert sent[transfer][0] == got[transfer][0]
        assert got[transfer][3] == [True] * NUM_TENSORS
    # After the first transfer, since a process keeps some of what it allocates.
    free = [rest[2] for transfer, rest in sorted(sent.items()) if transfer]
    assert max(free) - min(free) < TENSOR_SIZE
