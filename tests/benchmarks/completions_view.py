"""Times views of a million rollouts: `python tests/benchmarks/completions_view.py FOLDER`.

An empty FOLDER is filled with 1,000 steps of 1,000 rollouts, 48 tokens each, 0.8 GB. A view answers
within 300 ms: a search stops after `SCAN_SECONDS`, and its page continues it.

EPYC, two cores with a load of 12 to 19 by other programs, medians of 5: 6 ms (a step, best first)
to 17 ms (a text in a step); searches through all steps end with their time.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nemo_rl_core.ui.completions import Filter, Source, scan, select, sources

STEPS, ROLLOUTS, GROUP, TOKENS = 1000, 1000, 8, 48
PROMPTS = 5000
WORDS = np.array(["the", "sum", "is", "plus", "because", "we", "get", "12", "carry", "one", "add"])


def fill(folder: Path, *, num_steps: int = STEPS) -> None:
    """Writes the columns of rollouts, with random texts and rewards."""
    rng = np.random.default_rng(0)
    (folder / "rollouts").mkdir(parents=True)
    offsets = pa.array(np.arange(0, ROLLOUTS * TOKENS + 1, TOKENS, dtype=np.int32))
    for step in range(1, num_steps + 1):
        groups = np.arange(ROLLOUTS) // GROUP
        prompts = ((step - 1) * (ROLLOUTS // GROUP) + groups) % PROMPTS
        texts = WORDS[rng.integers(0, len(WORDS), (ROLLOUTS, TOKENS))]
        rewards = rng.integers(0, 2, ROLLOUTS).astype(float)
        ids = pa.array(rng.integers(0, 50_000, ROLLOUTS * TOKENS))
        logprobs = pa.array(-rng.random(ROLLOUTS * TOKENS))
        columns = {
            "prompt_id": [f"prompt-{number}" for number in prompts],
            "group": groups,
            "sample": np.arange(ROLLOUTS) % GROUP,
            "prompt": [f"What is {number} plus 7? Show the work." for number in prompts],
            "completion": [" ".join(words) for words in texts],
            "answer": [str(number + 7) for number in prompts],
            "reward": rewards,
            "advantage": rewards - 0.5,
            "truncated": np.zeros(ROLLOUTS, bool),
            "error": pa.nulls(ROLLOUTS, pa.string()),
            "completion_ids": pa.ListArray.from_arrays(offsets, ids),
            "logprobs": pa.ListArray.from_arrays(offsets, logprobs),
        }
        pq.write_table(pa.table(columns), folder / "rollouts" / f"step_{step:06d}.parquet")


def views(folder: Path) -> dict[str, Callable[[], object]]:
    """Returns every kind of view by name."""
    files = sources("run", folder)

    def step(source: Source, wanted: Filter) -> object:
        return select(source, wanted).cards(0, 10)

    return {
        "the files of all steps": lambda: sources("run", folder),
        "a step": lambda: step(files[0], Filter()),
        "a step, best first": lambda: step(files[0], Filter(order="best")),
        "a step, a text": lambda: step(files[0], Filter(text="because we get 12")),
        "a row with its tokens": lambda: select(files[0], Filter(row=7)).cards(0, 1, tokens=True),
        "all steps, a text": lambda: scan(files, Filter(text="because we get 12"), limit=10),
        "all steps, no match": lambda: scan(files, Filter(text="nowhere"), limit=10),
        "all steps, a prompt": lambda: scan(files, Filter(prompt="prompt-7"), limit=10),
        "all steps, a reward": lambda: scan(files, Filter(low=2.0), limit=10),
    }


def milliseconds(folder: Path, repeats: int) -> dict[str, float]:
    """Returns the median time of each view."""
    medians = {}
    for name, view in views(folder).items():
        view()
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            view()
            times.append(1000 * (time.perf_counter() - began))
        medians[name] = statistics.median(times)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if not (arguments.folder / "rollouts").exists():
        fill(arguments.folder)
    for name, median in milliseconds(arguments.folder, arguments.repeats).items():
        click.echo(f"{median:6.1f} ms  {name}")
    searched = scan(sources("run", arguments.folder), Filter(text="nowhere"), limit=10)
    click.echo(f"one search without a match read {searched.num_rows:,} rollouts")


if __name__ == "__main__":
    main()
