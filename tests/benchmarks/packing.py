"""How tightly, how evenly and how fast sequences are packed; `python tests/benchmarks/packing.py`.

Measured on one thread of an AMD EPYC, with numpy 2, as CPU time, for others were at work on it; on
an idle core that is the time one waits.

| 100,000 lengths | capacity | mean | first fit | modified | bins (fewest possible) | fill |
|---|---|---|---|---|---|---|
| exp(N(6, 1)) | 8,192 | 660 | 0.1 to 0.2 s | 0.1 to 0.2 s | 8,056 (8,055) | 99.98 % |
| exp(N(8, 0.8)) | 8,192 | 3,628 | 0.3 to 0.4 s | 0.3 to 0.4 s | 44,344 (44,293) | 99.88 % |
| exp(N(7, 1.2)) | 32,768 | 2,209 | 0.2 to 0.3 s | 0.2 to 0.3 s | 6,744 (6,743) | 99.98 % |

Steps of 4,096 sequences of exp(N(6, 1)) tokens in micro-batches of 16,384, against work divided
evenly without any filler: with shared rows, 2 ranks take 1.6 % longer, 8 ranks 2.9 %, and 64 ranks,
which have three micro-batches each, 12.5 %; in bins 0.2 %, 1.6 % and 20.7 %. A plan takes 0.1 s.
"""

import time

import numpy as np
from rich.console import Console
from rich.table import Table

from nemo_rl_core.distributed.packing.bins import Algorithm, pack_into_bins
from nemo_rl_core.distributed.packing.flops import sequence_flops
from nemo_rl_core.distributed.packing.microbatches import Microbatch
from nemo_rl_core.distributed.packing.ranks import pack_for_ranks, plan_for_ranks

ALGORITHMS: tuple[Algorithm, ...] = ("first_fit_decreasing", "modified_first_fit_decreasing")
# Mean and deviation of the log length, and the capacity that lengths are cut at: a long tail, a
# shorter one with many sequences over half a bin, and a tail that runs far past the mean.
DISTRIBUTIONS = [(6.0, 1.0, 8_192), (8.0, 0.8, 8_192), (7.0, 1.2, 32_768)]


def lengths_of(num_sequences: int, mean: float, deviation: float, capacity: int) -> list[int]:
    """Log-normal lengths from 1 to `capacity`, with a fixed seed."""
    drawn = np.random.default_rng(0).lognormal(mean, deviation, num_sequences)
    lengths: list[int] = np.clip(drawn.astype(np.int64), 1, capacity).tolist()
    return lengths


def bins_table(num_sequences: int = 100_000) -> Table:
    """Time and fill of both packers, with bins in multiples of 8."""
    table = Table(
        "lengths", "capacity", "algorithm", "CPU seconds", "bins", "fewest possible", "fill"
    )
    for mean, deviation, capacity in DISTRIBUTIONS:
        lengths = lengths_of(num_sequences, mean, deviation, capacity)
        for algorithm in ALGORITHMS:
            start = time.process_time()
            bins = pack_into_bins(lengths, capacity, algorithm, min_bins_multiple=8)
            seconds = time.process_time() - start
            table.add_row(
                f"exp(N({mean}, {deviation}))",
                str(capacity),
                algorithm,
                f"{seconds:.2f}",
                str(len(bins)),
                str(-(-sum(lengths) // capacity)),
                f"{sum(lengths) / len(bins) / capacity:.2%}",
            )
    return table


def ranks_table(num_sequences: int = 4_096, capacity: int = 16_384) -> Table:
    """How much longer a step takes than with all work divided evenly, and the tokens' fill.

    Ranks wait for each other in every micro-batch: the step takes the sum, over micro-batches, of
    the costliest one, all rows counted as full. Even is the cost of the sequences alone, divided by
    the ranks. Fill is tokens over rows times row length, empty micro-batches left out.
    """
    table = Table("ranks", "plan", "CPU seconds", "micro-batches each", "over even", "fill")
    lengths = lengths_of(num_sequences, 6.0, 1.0, 8_192)
    for num_ranks in (1, 2, 8, 64):
        for name in ("shared rows", "rows of their own", "bins"):
            start = time.process_time()
            if name == "bins":
                plans = pack_for_ranks(lengths, num_ranks=num_ranks, capacity=capacity)
            else:
                shared = name == "shared rows"
                plans = plan_for_ranks(
                    lengths, num_ranks=num_ranks, max_tokens=capacity, share_rows=shared
                )
            seconds = time.process_time() - start
            table.add_row(
                str(num_ranks),
                name,
                f"{seconds:.2f}",
                str(len(plans[0])),
                f"{_over_even(plans, lengths):.1%}",
                f"{_fill(plans, lengths):.2%}",
            )
    return table


def _over_even(plans: list[list[Microbatch]], lengths: list[int]) -> float:
    costs = [[_cost(part, lengths) for part in plan] for plan in plans]
    even = sum(map(sequence_flops, lengths)) / len(plans)
    return sum(max(parts) for parts in zip(*costs, strict=True)) / even - 1


def _cost(part: Microbatch, lengths: list[int]) -> int:
    if len(part.rows) == 1:  # one row alone has no filler beside its sequences
        return sum(sequence_flops(lengths[index]) for index in part.indices)
    return len(part.rows) * sequence_flops(part.row_length)


def _fill(plans: list[list[Microbatch]], lengths: list[int]) -> float:
    rows = sum(len(part.rows) * part.row_length for plan in plans for part in plan if part.indices)
    return sum(lengths) / rows


if __name__ == "__main__":
    console = Console(width=120)
    console.print(bins_table(), ranks_table())
