"""What a data set costs to read and check; `python tests/benchmarks/rows.py [ROWS]`.

Short rows of parquet, a million by default, through `DataModule.of` without a tokenizer, each kind
in a process of its own: rows a CPU second, and the process's peak memory.
"""

import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from nemo_rl_core.data.module import DataModule


def write(path: Path, kind: str, num_rows: int) -> None:
    """Different rows of the columns of a kind."""
    numbers = range(num_rows)
    columns = {
        "prompt": [f"What is {n} + 1?" for n in numbers],
        "answer": [str(n) for n in numbers],
    }
    if kind == "text":
        columns = {"text": [f"The number {n} comes before another." for n in numbers]}
    pq.write_table(pa.table(columns), path)


def measure(path: Path) -> tuple[float, float]:
    """CPU seconds, and the peak in GiB."""
    started = time.process_time()
    DataModule.of(str(path))
    seconds = time.process_time() - started
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    table = Table("columns", "rows a CPU second", "peak GiB")
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("prompt, answer", "text"):
            file = Path(folder, f"{kind.replace(', ', '_')}.parquet")
            context = multiprocessing.get_context("spawn")
            writer = context.Process(target=write, args=(file, kind, count))
            writer.start()
            writer.join()
            with context.Pool(1) as pool:
                seconds, peak = pool.apply(measure, (file,))
            table.add_row(kind, f"{count / seconds:,.0f}", f"{peak:.2f}")
    Console().print(table)
