"""Cache of tokenized rows, made by several processes and memory-mapped.

The file name is a hash of the rows, the tokenizer, and the code and packages that tokenize, so
another training on the same rows reads the same file. It may be deleted at any time.
"""

import hashlib
import inspect
import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_core.data import (
    chat,
    control,
    control_tokens,
    json_values,
    loss_masks,
    renderer,
    tools,
    turns,
    unknown,
    written,
)
from nemo_rl_core.data.chat import tokenize_row
from nemo_rl_core.data.chunks import rows_of, write_arrow
from nemo_rl_core.data.loss_masks import SupervisedExample
from nemo_rl_core.data.tables import TableRows
from nemo_rl_core.data.tokenizer_process import TokenizerProcess
from nemo_rl_core.data.tools import ToolsByTask
from nemo_rl_core.errors import DataError
from nemo_rl_core.store.files import hash_file
from nemo_rl_core.store.store import Store
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

MIN_ROWS = 5_000
"""Minimum rows for the cache; fewer are tokenized in about two seconds."""

_ROWS_PER_PROCESS = 10_000
"""Minimum rows per process, which needs some seconds for imports."""

_BATCH_ROWS = 1_000
_CODE = (
    *(chat, control, control_tokens, json_values, loss_masks),
    *(renderer, tools, turns, unknown, written),
)
_OPTIONS = ("template_date", "clean_up_tokenization_spaces", "split_special_tokens")
_PACKAGES = ("transformers", "tokenizers", "jinja2")


def stored_tokens(file: Path, tokenizer: Any, num_rows: int, offered: ToolsByTask) -> TableRows:
    """Returns the tokens of every row of a file, tokenizing them if they are not in the cache."""
    path = Store.default().cache / "tokens" / f"{_key(file, tokenizer, offered)}.arrow"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            tokens = _tokenize_in_processes(file, tokenizer, num_rows, offered, Path(scratch))
            tokens.replace(path)
    return TableRows(_mapped(path))


def is_storable(tokenizer: Any, num_rows: int) -> bool:
    """Whether there are enough rows, and the tokenizer can be hashed, unlike one with code."""
    if isinstance(tokenizer, TokenizerProcess):
        return False
    return num_rows >= MIN_ROWS and bool(getattr(tokenizer, "is_fast", False))


def examples_of(row: Row) -> dict[str, SupervisedExample]:
    """Converts a stored row to the result of `tokenize_row`: an example by side.

    A preference pair has the sides `chosen` and `rejected`, any other row has one.
    """
    sides = [name.removesuffix("_token_ids") for name in row if name.endswith("_token_ids")]
    return {
        side: SupervisedExample(tuple(row[f"{side}_token_ids"]), tuple(row[f"{side}_loss_mask"]))
        for side in sides
    }


def _key(file: Path, tokenizer: Any, offered: ToolsByTask) -> str:
    parts = [
        hash_file(file),
        tokenizer.backend_tokenizer.to_str(),
        type(tokenizer).__name__,
        # Without the folder from which the tokenizer was loaded.
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
        *(repr(tokenizer.init_kwargs.get(name)) for name in _OPTIONS),
        str(tokenizer.chat_template),
        json.dumps(offered),  # a template may write parameters in their order
        *map(inspect.getsource, _CODE),
        *(version(package) for package in _PACKAGES),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _tokenize_in_processes(
    file: Path, tokenizer: Any, num_rows: int, offered: ToolsByTask, scratch: Path
) -> Path:
    num_cpus = len(os.sched_getaffinity(0))
    count = max(1, min(num_cpus, num_rows // _ROWS_PER_PROCESS))
    bounds = [num_rows * part // count for part in range(count + 1)]
    logger.info("tokenizing %d rows in %d processes", num_rows, count)
    jobs = []
    for part, (start, stop) in enumerate(pairwise(bounds)):
        job = scratch / f"{part:04d}.job"
        job.write_bytes(pickle.dumps((tokenizer, file, start, stop, offered)))
        jobs.append(job)
    if count == 1:
        _run(jobs[0])
    else:
        # `multiprocessing` would import the main script again, which may have no main guard.
        command = [sys.executable, "-m", "nemo_rl_core.data.tokenized"]
        processes = [subprocess.Popen([*command, str(job)]) for job in jobs]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"a process that tokenizes rows ended with code {max(codes)}")
    for job in jobs:
        if (failed := job.with_suffix(".error")).is_file():
            error: DataError = pickle.loads(failed.read_bytes())  # noqa: S301 (written above)
            raise error
    joined = scratch / "joined.arrow"
    write_arrow((_mapped(job.with_suffix(".arrow")) for job in jobs), joined)
    return joined


def _mapped(file: Path) -> "pa.Table":
    import pyarrow as pa

    return pa.ipc.open_file(pa.memory_map(str(file))).read_all()


def _run(job: Path) -> None:
    """Tokenizes the rows of a job and stores the tokens, or the error of a row."""
    arguments = pickle.loads(job.read_bytes())  # noqa: S301 (written above)
    try:
        write_arrow(_tokens(*arguments), job.with_suffix(".arrow"))
    except DataError as error:
        job.with_suffix(".error").write_bytes(pickle.dumps(error))


def _tokens(
    tokenizer: Any, file: Path, start: int, stop: int, offered: ToolsByTask
) -> "Iterator[pa.Table]":
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = 0
    with pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20) as rows:
        for batch in rows.iter_batches(_BATCH_ROWS):
            table = pa.Table.from_batches([batch])
            part = table.slice(max(start - first, 0), max(stop - max(first, start), 0))
            first += len(table)
            if len(part):
                yield _table_of([tokenize_row(tokenizer, row, offered) for row in rows_of(part)])
            if first >= stop:
                return


def _table_of(examples: Sequence[dict[str, SupervisedExample]]) -> "pa.Table":
    import pyarrow as pa

    columns = {}
    for side in examples[0]:
        ids = [list(example[side].token_ids) for example in examples]
        masks = [list(example[side].loss_mask) for example in examples]
        columns[f"{side}_token_ids"] = pa.array(ids, pa.list_(pa.int32()))
        columns[f"{side}_loss_mask"] = pa.array(masks, pa.list_(pa.bool_()))
    return pa.table(columns)


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
