"""Times a transfer of weights between processes; `python tests/benchmarks/weight_sync.py`.

The weights of SmolLM2-135M in float32, with its shapes and random values. A full sync packs
buckets, computes their checksums, sends them, verifies the received bytes and copies them into the
receiver's tensors. A plain copy moves the same bytes as one block: one process copies them into
shared memory, the other out of it into its memory, all of it touched before.

On two quiet cores, 9 repetitions, medians and spread: a plain copy takes 0.063 s (0.058 to 0.069)
through shared memory and 0.127 s (0.107 to 0.150) through gloo, a full sync 0.106 s (0.092 to
0.124; 1.7 times as long) and 0.248 s (0.218 to 0.270; 2.0 times). With a dozen other programs on
the same cores it was 1.4 and 2.0 times.

The second table is of `Generation.update_weights`, from a policy to an engine over transformers:
0.112 s (0.099 to 0.127), and 1.37 s for the first, for which the system allocates its memory.
"""

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.generation import HuggingFaceGenerationConfig
from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import join_process_group, rank
from nemo_rl_core.distributed.session import connect, shutdown
from nemo_rl_core.distributed.weight_sync.link import Endpoint
from nemo_rl_core.distributed.weight_sync.routes import TransportName
from nemo_rl_core.distributed.weight_sync.transport import SENDER, LinkSpec
from nemo_rl_core.models.generation.engine import Generation
from nemo_rl_core.models.policy import Policy

NUM_REPETITIONS = 9
TRANSPORTS: tuple[TransportName, ...] = ("shared_memory", "gloo")
PLAIN = "plain copy through shared memory"
PLAIN_NETWORK = "plain copy through gloo"


def model() -> LlamaForCausalLM:
    """Returns a model of SmolLM2-135M's shape on torch's default device, with a tied head."""
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def shapes() -> dict[str, torch.Size]:
    """Returns the shapes of the weights by name."""
    with torch.device("meta"):
        return {name: p.shape for name, p in model().named_parameters()}


def measure(links: dict[str, LinkSpec], sizes: dict[str, torch.Size]) -> dict[str, list[float]]:
    """Returns seconds of every repetition by way; the ways take turns."""
    join_process_group()
    flat = torch.ones(sum(size.numel() for size in sizes.values()))
    if rank() == 0:
        flat.normal_()
    parts = flat.split([size.numel() for size in sizes.values()])
    tensors = {n: p.view(s) for (n, s), p in zip(sizes.items(), parts, strict=True)}
    ways: dict[str, Callable[[], None]] = {
        PLAIN: _plain_copy(flat),
        PLAIN_NETWORK: lambda: dist.broadcast(flat, 0),
    }
    for name, link in links.items():
        ways[f"sync by {name}"] = _sync(link, tensors)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(NUM_REPETITIONS + 1):
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    # The first one touches memory, so that it is warm for later ones.
    return {name: values[1:] for name, values in seconds.items()}


def _plain_copy(flat: torch.Tensor) -> Callable[[], None]:
    where: list[tuple[int, int]] = [(0, 0)]
    if rank() == 0:
        descriptor = os.memfd_create("plain")
        os.ftruncate(descriptor, flat.nbytes)
        where = [(os.getpid(), descriptor)]
    dist.broadcast_object_list(where, 0)
    pid, descriptor = where[0]
    with Path(f"/proc/{pid}/fd/{descriptor}").open("r+b") as file:
        shared = torch.frombuffer(mmap.mmap(file.fileno(), flat.nbytes), dtype=torch.float32)

    def copy() -> None:
        if rank() == 0:
            shared.copy_(flat)
        dist.barrier()
        if rank() == 1:
            flat.copy_(shared)

    return copy


def _sync(link: LinkSpec, tensors: dict[str, torch.Tensor]) -> Callable[[], None]:
    if rank() == 0:
        sender = Endpoint(link, SENDER)
        return lambda: sender.send(tensors.items()) and None
    receiver = Endpoint(link, SENDER + 1)

    def load(arrived: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in arrived:
            tensors[name].copy_(tensor)

    return lambda: receiver.receive(load) and None


def transfer_seconds() -> dict[str, list[float]]:
    """Returns seconds of every repetition by way."""
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in TRANSPORTS]
    links = {
        name: LinkSpec("127.0.0.1", store.port, 1, name, timeout_seconds=600.0, token="secret")
        for name, store in zip(TRANSPORTS, stores, strict=True)
    }
    seconds: dict[str, list[float]] = run_ranks(measure, links, shapes(), world_size=2)[0]
    return seconds


def table() -> Table:
    """Returns median and spread of each way, and its ratio to the plain copy."""
    sizes, seconds = shapes(), transfer_seconds()
    num_bytes = 4 * sum(size.numel() for size in sizes.values())
    columns = ("way", "median", "least", "most", "GiB/s", "over the plain copy")
    rows = Table(*columns, title=f"{num_bytes / 2**20:.0f} MiB, {NUM_REPETITIONS} repetitions")
    plain = statistics.median(seconds[PLAIN])
    for name, values in seconds.items():
        median = statistics.median(values)
        rows.add_row(
            name,
            f"{median:.3f} s",
            f"{min(values):.3f} s",
            f"{max(values):.3f} s",
            f"{num_bytes / 2**30 / median:.2f}",
            f"{median / plain:.2f}",
        )
    return rows


def update_seconds() -> list[float]:
    """Times `Generation.update_weights` from a real policy to a real engine, in two Ray workers."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        materialize(ModelFromConfig(), path, seed=0)  # for its tokenizer
        model().save_pretrained(path)
        session = connect(ClusterConfig(num_threads=1))
        policy = Policy(session, TrainingSetup(path, OptimizerConfig(), 512))
        config = HuggingFaceGenerationConfig()
        engine = Generation(session, GenerationSetup(path, config, 32, stop_token_ids=(1,)))
        seconds = []
        for _ in range(NUM_REPETITIONS + 1):
            start = time.perf_counter()
            engine.update_weights(policy)
            seconds.append(time.perf_counter() - start)
        shutdown()
    return seconds


def update_table() -> Table:
    """Tabulates the first update, which opens the link and touches the memory, and later ones."""
    first, *later = update_seconds()
    columns = ("update", "median", "least", "most")
    title = f"policy to engine, {NUM_REPETITIONS} repetitions, load {os.getloadavg()[0]:.1f}"
    rows = Table(*columns, title=title)
    for name, values in (("first", [first]), ("later", later)):
        figures = statistics.median(values), min(values), max(values)
        rows.add_row(name, *[f"{each:.3f} s" for each in figures])
    return rows


if __name__ == "__main__":
    Console(width=120).print(table())
    Console(width=120).print(update_table())
