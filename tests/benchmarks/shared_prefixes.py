"""Trains with and without shared prefixes on the same rows; CPU-seconds, in turns.

    .venv/bin/python tests/benchmarks/shared_prefixes.py

A Qwen2 of four layers and hidden size 128 (0.99 M weights) in float32, one thread, the backend in
this process; each row measures the logprobs of a batch and one GRPO optimizer step on it. Medians
of 15 pairs of turns, and of their ratios with the smallest and largest; two shared cores (AMD EPYC,
load 3), torch 2.13:

    prompts x completions, tokens   tokens laid out   logprobs, s       optimizer step, s
    32 x 16, 6 + 3 to 4             5120 to 1840      0.199 to 0.095    0.655 to 0.264
                                                      2.3 (1.7 to 3.4)  2.5 (1.8 to 3.2)
    2 x 8, 256 + 16 to 64           5104 to 1258      0.238 to 0.074    0.756 to 0.227
                                                      3.2 (2.6 to 4.1)  3.4 (2.9 to 4.1)
    8 x 2, 120 + 10 to 60           2800 to 1792      0.120 to 0.079    0.351 to 0.225
                                                      1.6 (1.3 to 1.9)  1.5 (1.4 to 1.9)
    16 x 16, 12 + 20 to 40          12124 to 10262    0.445 to 0.420    1.410 to 1.313
                                                      1.1 (1.0 to 1.2)  1.1 (1.0 to 1.2)
    4 x 8, 128 + 100 to 140         8406 to 7104      0.379 to 0.367    1.221 to 1.127
                                                      1.0 (0.9 to 1.3)  1.1 (0.9 to 1.2)
    4 x 8, 64 + 200 to 400          13254 to 13254    0.690 to 0.674    2.103 to 2.086
                                                      1.0 (0.9 to 1.1)  1.0 (0.9 to 1.2)
"""

import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import torch

from nemo_rl_core.algorithms.grpo.loss import GRPOLossFn
from nemo_rl_core.algorithms.grpo.loss_config import ClippedLoss
from nemo_rl_core.backends.training.base import TrainingSetup
from nemo_rl_core.backends.training.dtensor.backend import DTensorBackend
from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.config.optimizer import OptimizerConfig
from nemo_rl_core.config.training import DTensorTraining
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, collate

NUM_TURNS = 15
# Prompts, completions of each, tokens of a prompt, fewest and most tokens of a completion.
CASES = [
    (32, 16, 6, 3, 4),
    (2, 8, 256, 16, 64),
    (8, 2, 120, 10, 60),
    (16, 16, 12, 20, 40),
    (4, 8, 128, 100, 140),
    (4, 8, 64, 200, 400),
]


def make_batch(prompts: int, group: int, prompt: int, fewest: int, most: int) -> BatchedDataDict:
    def tokens(count: int) -> list[int]:
        return [random.randrange(3, 19) for _ in range(count)]

    sequences, masks = [], []
    for _ in range(prompts):
        start = tokens(prompt)
        for _ in range(group):
            completion = tokens(random.randint(fewest, most))
            sequences.append(start + completion)
            masks.append([False] * prompt + [True] * len(completion))
    batch = collate(sequences, masks)
    batch["advantages"] = torch.randn(len(sequences), 1) * batch["token_mask"]
    return batch


def backend(folder: Path, *, share: bool) -> DTensorBackend:
    made = DTensorBackend()
    made.setup(
        TrainingSetup(
            model_folder=folder,
            optimizer=OptimizerConfig(learning_rate=1e-4),
            max_tokens_per_microbatch=8192,
            training=DTensorTraining(share_prefixes=share),
        )
    )
    return made


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def num_tokens(made: DTensorBackend) -> int:
    (plan,) = made._microbatches._plans.values()
    return sum(len(part.rows) * part.row_length for part in plan)


def measure(folder: Path, case: tuple[int, int, int, int, int]) -> None:
    random.seed(0)
    torch.manual_seed(0)
    loss = GRPOLossFn(ClippedLoss(kl=None))
    backends = {share: backend(folder, share=share) for share in (True, False)}
    seconds: dict[tuple[str, bool], list[float]] = {}
    for turn in range(NUM_TURNS + 2):
        batch = make_batch(*case)
        for share in (True, False) if turn % 2 else (False, True):
            made = backends[share]
            batch["prev_logprobs"] = made.get_logprobs(batch)
            works = {
                "logprobs": partial(made.get_logprobs, batch),
                "step": partial(made.train_step, batch, loss),
            }
            for name, work in works.items():
                seconds.setdefault((name, share), []).append(cpu_seconds(work))
    figures = []
    for name in ("logprobs", "step"):
        shared, separate = (seconds[name, share][2:] for share in (True, False))
        ratios = [a / s for a, s in zip(separate, shared, strict=True)]
        figures.append(
            f"{statistics.median(separate):.3f} to {statistics.median(shared):.3f} s, "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    prompts, group, prompt, fewest, most = case
    tokens = f"{num_tokens(backends[False])} to {num_tokens(backends[True])}"
    row = f"{prompts} x {group}, {prompt} + {fewest} to {most}"
    click.echo(" | ".join([row, tokens, *figures]))


def main() -> None:
    torch.set_num_threads(1)
    shape = ModelFromConfig(
        hidden_size=128,
        intermediate_size=512,
        num_layers=4,
        num_heads=4,
        max_position_embeddings=1024,
    )
    with TemporaryDirectory() as work:
        folder = Path(work) / "model"
        materialize(shape, folder, seed=0)
        click.echo(f"load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
        for case in CASES:
            measure(folder, case)


if __name__ == "__main__":
    main()
