"""Measures how long a save blocks training: as a complete model, and as shards.

    .venv/bin/python -m tests.benchmarks.saves_of_ranks [RANKS] [MILLIONS] [TURNS]

FSDP2 over gloo. `whole` is `start_checkpoint`: weights are gathered, and rank 0 writes them before
training continues. `shards` is `start_sharded_checkpoint`: every rank copies its shards and writes
the copy in the background. Both take turns on the same weights; a step runs in between while the
files are written. The slowest rank of each turn counts. Seconds of the training thread exclude
waiting for other ranks, the disk and other processes.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.distributed.batched_data_dict import collate
from nemo_rl_core.distributed.local_ranks import run_ranks
from nemo_rl_core.distributed.process_group import rank

Turn = dict[str, tuple[float, float, float]]
"""By side: blocked seconds of the clock and of the training thread, and until all is written."""
_WIDTH, _MLP = 768, 2048
_LAYER = 4 * _WIDTH**2 + 3 * _WIDTH * _MLP


def _spent(what: Callable[[], object]) -> tuple[float, float]:
    clock, thread = time.monotonic(), time.thread_time()
    what()
    return time.monotonic() - clock, time.thread_time() - thread


def _turns(folder: Path, saves: Path, num_turns: int) -> list[Turn]:
    backend = DTensorBackend()
    backend.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=OptimizerConfig(learning_rate=1e-5),
            max_tokens_per_microbatch=64,
            training=DTensorTraining(),
        )
    )
    batch = collate([[3, 4, 5, 6, 7, 8]] * 4, [[True] * 6] * 4)
    backend.train_step(batch, NLLLoss())
    turns = []
    for number in range(num_turns + 1):
        turn: Turn = {}
        for side in ("whole", "shards"):
            path = saves / f"{number}-{side}"
            path.mkdir(exist_ok=True)
            start = (
                backend.start_checkpoint if side == "whole" else backend.start_sharded_checkpoint
            )
            if dist.is_initialized():
                dist.barrier()
            begun = time.monotonic()
            blocked = _spent(lambda start=start, path=path: start(path))
            backend.train_step(batch, NLLLoss())
            backend.finish_checkpoint()
            turn[side] = (*blocked, time.monotonic() - begun)
            if dist.is_initialized():
                dist.barrier()
            if rank() == 0:
                for file in sorted(path.rglob("*"), reverse=True):
                    file.unlink() if file.is_file() else file.rmdir()
        turns.append(turn)
    backend.shutdown()
    return turns[1:]  # the first creates groups and threads


def main() -> None:
    """Prints one line per side."""
    num_ranks, millions, num_turns = (
        int(argument) for argument in (*sys.argv[1:], *("2", "85", "5")[len(sys.argv) - 1 :])
    )
    with tempfile.TemporaryDirectory() as root:
        folder, saves = Path(root) / "model", Path(root) / "saves"
        saves.mkdir()
        config = ModelFromConfig(
            hidden_size=_WIDTH,
            intermediate_size=_MLP,
            num_layers=max(1, round(millions * 1e6 / _LAYER)),
            num_heads=12,
        )
        materialize(config, folder, seed=0)
        by_rank = run_ranks(_turns, folder, saves, num_turns, world_size=num_ranks)
    for side in ("whole", "shards"):
        slowest = [
            torch.tensor([turns[number][side] for turns in by_rank]).amax(0).tolist()
            for number in range(num_turns)
        ]
        texts = [
            f"{statistics.median(column):6.2f} ({min(column):.2f} to {max(column):.2f})"
            for column in zip(*slowest, strict=True)
        ]
        names = ("blocked, s", "of the thread", "written after")
        line = ", ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))
        sys.stdout.write(f"{num_ranks} ranks, {millions} M, {side:<6} {line}\n")


if __name__ == "__main__":
    main()
