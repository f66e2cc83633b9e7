"""Checks for regressions of speed and memory: `check_speed.py`, from the root of the repository.

Figures of `make bench` that a short run can reproduce in one process without Ray, on one thread:
ratios of CPU-seconds of alternating work, wall-clock seconds of work that only waits, and bytes.
The bounds are generous; `make bench` prints the figures themselves.
"""

import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.algorithms.grpo.loss_config import ClippedLoss
from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.training import DTensorTraining, OptimizerConfig
from nemo_rl_core.distributed.batched_data_dict import collate
from tests.benchmarks import asynchronous_loop, controller
from tests.benchmarks.comparison import bare, machine_sides, rows_machine, rows_step
from tests.benchmarks.comparison.inputs import LEARNING_RATE, SUMS, model_folder

MIN_AGAINST_BARE = 0.75  # 0.9 to 1.0 on a quiet machine
MAX_LOGIT_TENSORS = 1 / 16  # as a share of full logits and their gradient; 1/25
MAX_GROWTH = 1.6  # of CPU time per token, from 65,536 to 262,144 tokens; 0.9
MAX_CONTROLLER_GROWTH = (
    1.5  # of its time per sequence, from 1,024 to 8,192 on as many times the ranks
)
MAX_CALLS_OF_A_RANK = 3.1  # per step: one of the engine, two of the rank, one of the records' task
MAX_MIB_OF_TOKENS = 8  # extra, for 8,192 sequences of up to 4,096 tokens than for as many of 1,536
MIN_AHEAD = 1.8  # of 2: the asynchronous loop where engine, rewards and trainer wait; 1.99
AHEAD_SECONDS, AHEAD_STEPS, AHEAD_ATTEMPTS = 0.5, 9, 3
ROUNDS, SMALLEST, LARGEST = 9, (256, 256), (1024, 256)
TOKENS = 2048


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Returns the result of the work, and the CPU-seconds that this process spent on it."""
    before = time.process_time()
    result = work()
    return result, time.process_time() - before


def against_bare(scratch: Path) -> float:
    """CPU time of the bare loop over that of the backend, on the same rows."""
    model, generator = model_folder(scratch, SUMS), random.Random(0)
    backend, trained = backend_of(model, share=True), bare.Trained(model)
    torch.set_num_threads(1)
    loss = GRPOLossFn(ClippedLoss(kl=None))
    rounds = []
    for _ in range(ROUNDS):
        batch = rows_step.grpo_batch(generator, 32, 16, 6, 3, 4)
        layout = bare.laid_out(batch, model, share=True)
        metrics, ours = timed(partial(backend.train_step, batch, loss))
        other, theirs = timed(partial(trained.step, layout))
        if not abs(metrics["loss"] - other) < 1e-4:
            sys.exit(f"the bare loop computes another loss: {other}, not {metrics['loss']}")
        rounds.append((theirs, ours))
    bare_loop, backends = zip(*rounds[1:], strict=True)
    return statistics.median(bare_loop) / statistics.median(backends)


def backend_of(model: Path, *, share: bool = False) -> DTensorBackend:
    """Makes a backend in this process."""
    backend = DTensorBackend()
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE)
    training = DTensorTraining(share_prefixes=share)
    backend.setup(TrainingSetup(model, optimizer, 8192, training=training))
    return backend


def memory_of_loss(scratch: Path) -> float:
    """Peak memory of a step over the bytes of full logits, their log-softmax and its gradient."""
    model = model_folder(scratch, rows_machine.WIDE, vocab_size=rows_machine.VOCAB_SIZE)
    backend = backend_of(model)
    torch.set_num_threads(2)
    drawn = torch.randint(3, 250, (TOKENS // 256, 256)).tolist()
    small, large = (
        collate([row[:length] for row in drawn], [[True] * length] * len(drawn))
        for length in (8, 256)
    )
    backend.train_step(small, NLLLoss())
    Path("/proc/self/clear_refs").write_text("5")
    before = machine_sides.peak_memory_gib()
    backend.train_step(large, NLLLoss())
    full = 3 * TOKENS * rows_machine.VOCAB_SIZE * 4 / 2**30
    return (machine_sides.peak_memory_gib() - before) / full


def growth(scratch: Path) -> float:
    """CPU time of the controller per token, of the largest steps over the smallest.

    Some processes are slower than others by half: the better of two counts.
    """
    largest, smallest = (
        min(rows_machine.controller_microseconds(scratch, size) for _ in range(2))
        for size in (LARGEST, SMALLEST)
    )
    return largest / smallest


def many_ranks(scratch: Path) -> tuple[float, float, float]:
    """Returns the controller's growth of time per sequence, MiB for more tokens, and calls."""
    few, many = (
        controller.steps(scratch, ranks, 16 * ranks, controller.SHORT) for ranks in (64, 512)
    )
    long = controller.steps(scratch, 512, 16 * 512, controller.LONGEST)
    each = [statistics.median(step.cpu_seconds for step in found) for found in (few, many)]
    most = [max(step.peak_gib for step in found) for found in (many, long)]
    return each[1] / (8 * each[0]), 1024 * (most[1] - most[0]), many[0].num_calls / 512


def ahead() -> float:
    """How many times as fast the asynchronous loop is as the synchronous one.

    A busy machine resumes waiting processes too late: the best of some attempts counts.
    """
    best = 0.0
    for _ in range(AHEAD_ATTEMPTS):
        by_turns, found = asynchronous_loop.compared(AHEAD_SECONDS, AHEAD_SECONDS / 2, AHEAD_STEPS)
        best = max(best, by_turns / found)
        if best >= MIN_AHEAD:
            break
    return best


def main() -> None:
    """Prints each figure; exits with 1 if one is out of its bound."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        growth_of_many, mib_of_tokens, num_calls = many_ranks(scratch)
        figures = {
            "optimizer step against the bare loop": (against_bare(scratch), MIN_AGAINST_BARE, True),
            "memory of the loss, of full logits": (
                memory_of_loss(scratch),
                MAX_LOGIT_TENSORS,
                False,
            ),
            "growth of the controller's time a token": (growth(scratch), MAX_GROWTH, False),
            "growth of its time a sequence over ranks": (
                growth_of_many,
                MAX_CONTROLLER_GROWTH,
                False,
            ),
            "MiB of the controller for more tokens": (mib_of_tokens, MAX_MIB_OF_TOKENS, False),
            "calls of a rank and its engine a step": (num_calls, MAX_CALLS_OF_A_RANK, False),
            "asynchronous loop against synchronous": (ahead(), MIN_AHEAD, True),
        }
    problems = []
    for name, (value, bound, is_least) in figures.items():
        word = "at least" if is_least else "at most"
        print(f"{name}: {value:.3f}, {word} {bound:.3f}")  # noqa: T201
        if value < bound if is_least else value > bound:
            problems.append(f"{name}: {value:.3f}, {word} {bound:.3f}")
    spent = resource.getrusage(resource.RUSAGE_SELF)
    print(f"{spent.ru_utime + spent.ru_stime:.0f} CPU-s")  # noqa: T201
    if problems:
        sys.exit("too slow or too large:\n  " + "\n  ".join(problems))


if __name__ == "__main__":
    main()
