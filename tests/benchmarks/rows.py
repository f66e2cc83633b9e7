"""Measures reading and checking a data set; `python tests/benchmarks/rows.py [ROWS ...]`.

Short rows of parquet and of jsonl, a million by default, through `DataModule.of` without a
tokenizer, each kind and size in a separate process: rows per CPU second, seconds, and the process's
peak memory.
"""

import json
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from nemo_rl_core.data.module import DataModule

_ROWS_AT_ONCE = 100_000
KINDS = [
    ("prompt, answer", "parquet"),
    ("text", "parquet"),
    ("messages", "parquet"),
    ("prompt, answer", "jsonl"),
    ("messages", "jsonl"),
]


def columns_of(kind: str, numbers: range) -> dict[str, list[Any]]:
    """Returns distinct rows in the columns of a kind."""
    if kind == "messages":
        return {
            "messages": [
                [
                    {"role": "user", "content": f"What is {n} + 1?"},
                    {"role": "assistant", "content": str(n + 1)},
                ]
                for n in numbers
            ]
        }
    if kind == "text":
        return {"text": [f"The number {n} comes before another." for n in numbers]}
    return {
        "prompt": [f"What is {n} + 1?" for n in numbers],
        "answer": [str(n) for n in numbers],
    }


def write(path: Path, kind: str, num_rows: int) -> None:
    """Writes a file of that many rows in chunks."""
    if path.suffix == ".jsonl":
        with path.open("w") as lines:
            for start in range(0, num_rows, _ROWS_AT_ONCE):
                numbers = range(start, min(start + _ROWS_AT_ONCE, num_rows))
                rows = pa.table(columns_of(kind, numbers)).to_pylist()
                lines.writelines(f"{json.dumps(row)}\n" for row in rows)
        return
    schema = pa.table(columns_of(kind, range(1))).schema
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, _ROWS_AT_ONCE):
            numbers = range(start, min(start + _ROWS_AT_ONCE, num_rows))
            writer.write_table(pa.table(columns_of(kind, numbers)))


def measure(path: Path) -> tuple[float, float, float]:
    """Returns CPU seconds, seconds and the peak in GiB."""
    cpu, clock = time.process_time(), time.monotonic()
    DataModule.of(str(path))
    seconds = time.monotonic() - clock
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return time.process_time() - cpu, seconds, peak


if __name__ == "__main__":
    counts = [int(each) for each in sys.argv[1:]] or [1_000_000]
    table = Table("columns", "rows", "rows a CPU second", "seconds", "peak GiB")
    with tempfile.TemporaryDirectory() as folder:
        for kind, form in KINDS:
            for count in counts:
                file = Path(folder, f"rows.{form}")
                context = multiprocessing.get_context("spawn")
                writer = context.Process(target=write, args=(file, kind, count))
                writer.start()
                writer.join()
                with context.Pool(1) as pool:
                    cpu_seconds, seconds, peak = pool.apply(measure, (file,))
                speed = f"{count / cpu_seconds:,.0f}"
                table.add_row(
                    f"{kind}: {form}", f"{count:,}", speed, f"{seconds:.0f}", f"{peak:.2f}"
                )
    Console().print(table)
