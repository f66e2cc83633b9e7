"""Many rows as tokens: by several processes, once, and mapped from a file of the store's cache.

The file is named by the rows, the tokenizer, and the code and packages that make tokens, so another
training on the same rows reads it. It may be deleted at any time.
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

from nemo_rl_core.data import chat, control, turns
from nemo_rl_core.data.chat import tokenize_row
from nemo_rl_core.data.chunks import rows_of, write_arrow
from nemo_rl_core.data.loss_masks import SupervisedExample
from nemo_rl_core.data.tables import TableRows
from nemo_rl_core.errors import DataError
from nemo_rl_core.store.files import hash_file
from nemo_rl_core.store.store import Store
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

FEWEST_ROWS = 5_000
"""Fewer rows are tokenized here and now, in about two seconds."""

_ROWS_A_PROCESS = 10_000
"""A process takes some seconds to import what makes tokens."""

_ROWS_AT_ONCE = 1_000
_CODE = (chat, control, turns)
_OPTIONS = ("template_date", "clean_up_tokenization_spaces", "split_special_tokens")
_PACKAGES = ("transformers", "tokenizers", "jinja2")


def stored_tokens(file: Path, tokenizer: Any, num_rows: int) -> TableRows:
    """The tokens of every row of a file, made by several processes if no run has made them before.

    Args:
        file: The rows, as `loader.save_rows` writes them.
        tokenizer: A tokenizer of the `tokenizers` library.
        num_rows: Of the file.

    Returns:
        Rows for `examples_of`.

    Raises:
        DataError: When the turns of a row cannot be separated.
    """
    import pyarrow as pa

    path = Store.default().cache / "tokens" / f"{_key(file, tokenizer)}.arrow"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = _made_by_processes(file, tokenizer, num_rows, Path(scratch))
            made.replace(path)
    return TableRows(pa.ipc.open_file(pa.memory_map(str(path))).read_all())


def is_storable(tokenizer: Any, num_rows: int) -> bool:
    """Whether there are rows enough, and the tokenizer can be told from another."""
    return num_rows >= FEWEST_ROWS and bool(getattr(tokenizer, "is_fast", False))


def examples_of(row: Row) -> dict[str, SupervisedExample]:
    """What `tokenize_row` returns, of a stored row."""
    sides = [name.removesuffix("_token_ids") for name in row if name.endswith("_token_ids")]
    return {
        side: SupervisedExample(tuple(row[f"{side}_token_ids"]), tuple(row[f"{side}_loss_mask"]))
        for side in sides
    }


def _key(file: Path, tokenizer: Any) -> str:
    described = [
        hash_file(file),
        tokenizer.backend_tokenizer.to_str(),
        type(tokenizer).__name__,
        # Without the folder that it was loaded from.
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
        *(repr(tokenizer.init_kwargs.get(name)) for name in _OPTIONS),
        str(tokenizer.chat_template),
        *map(inspect.getsource, _CODE),
        *(version(package) for package in _PACKAGES),
    ]
    return hashlib.sha256("\0".join(described).encode()).hexdigest()[:32]


def _made_by_processes(file: Path, tokenizer: Any, num_rows: int, scratch: Path) -> Path:
    num_cpus = len(os.sched_getaffinity(0))
    count = max(1, min(num_cpus, num_rows // _ROWS_A_PROCESS))
    bounds = [num_rows * part // count for part in range(count + 1)]
    logger.info("tokenizing %d rows in %d processes", num_rows, count)
    jobs = []
    for part, (start, stop) in enumerate(pairwise(bounds)):
        job = scratch / f"{part:04d}.job"
        job.write_bytes(pickle.dumps((tokenizer, file, start, stop)))
        jobs.append(job)
    if count == 1:
        _run(jobs[0])
    else:
        # `multiprocessing` would import the user's script again, which may have no main guard.
        command = [sys.executable, "-m", "nemo_rl_core.data.tokenized"]
        processes = [subprocess.Popen([*command, str(job)]) for job in jobs]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"a process that tokenizes rows ended with code {max(codes)}")
    for job in jobs:
        if (failed := job.with_suffix(".error")).is_file():
            error: DataError = pickle.loads(failed.read_bytes())  # noqa: S301 (written above)
            raise error
    whole = scratch / "whole.arrow"
    write_arrow(_joined([job.with_suffix(".arrow") for job in jobs]), whole)
    return whole


def _joined(files: Sequence[Path]) -> "Iterator[pa.Table]":
    import pyarrow as pa

    for file in files:
        yield pa.ipc.open_file(pa.memory_map(str(file))).read_all()


def _run(job: Path) -> None:
    """Tokenizes the rows of a job; an error of theirs is stored in place of tokens."""
    tokenizer, file, start, stop = pickle.loads(job.read_bytes())  # noqa: S301 (written above)
    try:
        write_arrow(_tokens(tokenizer, file, start, stop), job.with_suffix(".arrow"))
    except DataError as error:
        job.with_suffix(".error").write_bytes(pickle.dumps(error))


def _tokens(tokenizer: Any, file: Path, start: int, stop: int) -> "Iterator[pa.Table]":
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = 0
    with pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20) as rows:
        for batch in rows.iter_batches(_ROWS_AT_ONCE):
            table = pa.Table.from_batches([batch])
            wanted = table.slice(max(start - first, 0), max(stop - max(first, start), 0))
            first += len(table)
            if len(wanted):
                yield _table_of([tokenize_row(tokenizer, row) for row in rows_of(wanted)])
            if first >= stop:
                return


def _table_of(found: Sequence[dict[str, SupervisedExample]]) -> "pa.Table":
    import pyarrow as pa

    columns = {}
    for side in found[0]:
        ids = [list(each[side].token_ids) for each in found]
        masks = [list(each[side].loss_mask) for each in found]
        columns[f"{side}_token_ids"] = pa.array(ids, pa.list_(pa.int32()))
        columns[f"{side}_loss_mask"] = pa.array(masks, pa.list_(pa.bool_()))
    return pa.table(columns)


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
