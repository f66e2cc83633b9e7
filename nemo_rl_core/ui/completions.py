"""Reads, filters and groups completions: rows of an artifact's rollouts or of an evaluation.

A filter reads only the columns it needs; texts are read for the rows of one page. A search over
many files stops after `SCAN_SECONDS`; the page has links that continue it, one of them for longer.
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nemo_rl_core.data.json_values import parsed

if TYPE_CHECKING:
    import pyarrow as pa

SCAN_SECONDS, LONG_SCAN_SECONDS = 0.15, 5.0
_ROWS_FOR_THREADS = 50_000
"""For smaller files threads cost more than they save."""
_ROLLOUTS = "rollouts"
_TEXTS = ("prompt", "completion")
_FILTERED = ("prompt_id", "group", "mode", "reward", "correct", "truncated", "error")
_TURNS = ("turn_rewards", "components", "messages")
_TOKENS = ("completion_ids", "logprobs", "trainer_logprobs", "generated", "weight_versions")
_OTHERS = ("sample", "part", "category", "answer", "extracted", "advantage")
_SHOWN = (*_FILTERED, *_TEXTS, *_TURNS, *_OTHERS)
_NUMBERS = ("reward", "advantage")

ONLY = ("correct", "wrong", "truncated", "error")
CHANGES = ("gained", "lost")


@dataclass(frozen=True)
class Source:
    """A file with completions; `step` is None for an evaluation."""

    artifact: str
    path: Path
    step: int | None = None


@dataclass(frozen=True)
class Filter:
    """A filter of completions.

    Attributes:
        only: "" for all, else one of `ONLY`.
        order: "" as in the file, else `best` or `worst` reward first.
        prompt: Id of a prompt; "" for all.
        prompts: Ids of prompts; None for all.
        group: Number of a group; None for all.
        row: Index of a single row in its file; None for all.
        mode: `greedy` or `sampled` of an evaluation; "" for both.
    """

    low: float | None = None
    high: float | None = None
    text: str = ""
    only: str = ""
    order: str = ""
    prompt: str = ""
    prompts: frozenset[str] | None = None
    group: int | None = None
    row: int | None = None
    mode: str = ""


class Card(NamedTuple):
    """The completions of one prompt in one file.

    Attributes:
        rows: Rows that pass the filter.
        rewards: Rewards of all episodes of the prompt, in the order of the file.
    """

    source: Source
    rows: list[dict[str, Any]]
    rewards: list[float | None]


@dataclass(frozen=True)
class Selection:
    """The rows of a file that pass a filter, by prompt.

    Attributes:
        rewards: Reward of each row of the file; NaN without one.
        codes: Number of the prompt of each row of the file, by first appearance.
        firsts: Whether each row of the file is the only or the first part of its episode.
        passing: Indices of the rows that pass, prompt by prompt.
        starts: Position in `passing` of the first row of each prompt, in order of display.
        ends: Position after the last row of each prompt.
    """

    source: Source
    rewards: "np.ndarray[Any, Any]"
    codes: "np.ndarray[Any, Any]"
    firsts: "np.ndarray[Any, Any]"
    passing: "np.ndarray[Any, Any]"
    starts: "np.ndarray[Any, Any]"
    ends: "np.ndarray[Any, Any]"

    @property
    def num_prompts(self) -> int:
        """Number of prompts with a row that passes."""
        return len(self.starts)

    def cards(self, begin: int, end: int, *, tokens: bool = False) -> list[Card]:
        """Reads the texts of some prompts, with the token columns on request."""
        parts = [
            self.passing[first:last]
            for first, last in zip(self.starts[begin:end], self.ends[begin:end], strict=True)
        ]
        indices = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        rows = iter(_load(self.source.path, indices, (*_SHOWN, *(_TOKENS if tokens else ()))))
        cards = []
        for part in parts:
            group = self.firsts & (self.codes == self.codes[part[0]])
            rewards = self.rewards[group].tolist()
            finite = [None if math.isnan(reward) else reward for reward in rewards]
            cards.append(Card(self.source, [next(rows) for _ in part], finite))
        return cards


class Scan(NamedTuple):
    """Cards of several files, and how far the search has come.

    Attributes:
        num_searched: Number of files whose cards are all in `cards` or were skipped.
        num_rows: Number of rows in all of these files.
        num_passing: Number of those that pass the filter.
        num_damaged: Number of files that cannot be read.
        num_shown: Number of cards of the next file in `cards` or skipped, if it has more.
    """

    cards: list[Card]
    num_searched: int
    num_rows: int
    num_passing: int
    num_damaged: int
    num_shown: int = 0


def steps(folder: Path) -> list[int]:
    """Returns the steps with rollouts in an artifact, in order."""
    return sorted(_files(folder))


def file_of(folder: Path, step: int | None) -> Path | None:
    """Returns the file with the rows of a step, or of an evaluation; None if missing."""
    path = (
        folder / "rows.parquet" if step is None else folder / _ROLLOUTS / f"step_{step:06d}.parquet"
    )
    return path if path.is_file() else None


def sources(artifact: str, folder: Path) -> list[Source]:
    """Returns the files with completions of an artifact, the latest step first."""
    files = sorted(_files(folder).items(), reverse=True)
    if not files and (path := file_of(folder, None)) is not None:
        return [Source(artifact, path)]
    return [Source(artifact, path, step) for step, path in files]


def _files(folder: Path) -> dict[int, Path]:
    files = (folder / _ROLLOUTS).glob("step_*.parquet")
    steps_of_files = ((path.stem.removeprefix("step_"), path) for path in files)
    return {int(step): path for step, path in steps_of_files if step.isdecimal()}


def has_completions(folder: Path) -> bool:
    """Returns whether an artifact has completions to show."""
    if steps(folder):
        return True
    path = file_of(folder, None)
    try:
        return path is not None and "completion" in _names(path)
    except OSError:
        return True  # the page of the completions shows the error


def select(source: Source, row_filter: Filter) -> Selection:
    """Selects the rows of a file that pass a filter."""
    import pyarrow.parquet as pq

    with _arrow_errors_as_os_errors(), pq.ParquetFile(source.path) as file:
        num_rows, names = file.metadata.num_rows, file.schema_arrow.names
        threads = num_rows > _ROWS_FOR_THREADS
        needed = [name for name in _needed(row_filter) if name in names]
        table = file.read(needed, use_threads=threads)
        passing = np.flatnonzero(_mask(table, row_filter, num_rows))
        if not len(passing):
            unread = (np.full(num_rows, np.nan), np.arange(num_rows), np.ones(num_rows, bool))
            return Selection(source, *unread, *[passing] * 3)
        keys = [name for name in ("group", "prompt_id") if name in names]
        table = file.read([*keys[:1], *({"reward", "part"} & {*names})], use_threads=threads)
        codes, rewards = _codes(table, num_rows), _numbers(table, "reward", num_rows)
        firsts = ~(_numbers(table, "part", num_rows) > 0)
    passing = passing[np.argsort(codes[passing], kind="stable")]
    groups = codes[passing]
    if row_filter.order in ("best", "worst"):
        sign = -1.0 if row_filter.order == "best" else 1.0
        ranks = np.where(np.isnan(rewards), np.inf, sign * rewards)
        passing = passing[np.lexsort((ranks[passing], groups))]
    starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
    ends = np.r_[starts[1:], len(passing)]
    if row_filter.order in ("best", "worst"):
        order = np.argsort(ranks[passing[starts]], kind="stable")
        starts, ends = starts[order], ends[order]
    return Selection(source, rewards, codes, firsts, passing, starts, ends)


def scan(
    files: Sequence[Source],
    row_filter: Filter,
    *,
    limit: int,
    skip: int = 0,
    seconds: float = SCAN_SECONDS,
) -> Scan:
    """Searches files in their order until there are `limit` cards or the time is over.

    Args:
        skip: Number of cards of the first file to leave out.
    """
    end = time.monotonic() + seconds
    cards: list[Card] = []
    num_searched = num_rows = num_passing = num_damaged = 0
    for source in files:
        try:
            selected = select(source, row_filter)
            end_shown = skip + limit - len(cards)
            cards += selected.cards(skip, end_shown)
            num_rows += len(selected.codes)
            num_passing += len(selected.passing)
            if selected.num_prompts > end_shown:
                return Scan(cards, num_searched, num_rows, num_passing, num_damaged, end_shown)
        except OSError:
            num_damaged += 1
        num_searched, skip = num_searched + 1, 0
        if len(cards) >= limit or time.monotonic() > end:
            break
    return Scan(cards, num_searched, num_rows, num_passing, num_damaged)


def changes(before: Path, after: Path) -> dict[str, frozenset[str]]:
    """Returns the prompts that only the later (gained) or the earlier (lost) evaluation solved."""
    old, new = _correct(before), _correct(after)
    both = [prompt for prompt in old if prompt in new and None not in (old[prompt], new[prompt])]
    return {
        "gained": frozenset(prompt for prompt in both if new[prompt] and not old[prompt]),
        "lost": frozenset(prompt for prompt in both if old[prompt] and not new[prompt]),
    }


def _correct(path: Path) -> dict[str, bool | None]:
    import pyarrow.parquet as pq

    with _arrow_errors_as_os_errors():
        rows = pq.read_table(path, columns=["prompt_id", "mode", "correct"])
        rows = rows.filter(_compute().equal(rows["mode"], "greedy"))
        pairs = zip(rows["prompt_id"].to_pylist(), rows["correct"].to_pylist(), strict=True)
        return dict(pairs)


def _load(
    path: Path, indices: "np.ndarray[Any, Any]", columns: Sequence[str]
) -> list[dict[str, Any]]:
    """Reads some rows in the order of `indices`, from the row groups that have them."""
    import pyarrow.parquet as pq

    if not len(indices):
        return []
    with _arrow_errors_as_os_errors(), pq.ParquetFile(path) as file:
        names = [name for name in columns if name in file.schema_arrow.names]
        sizes = [file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)]
        begins = np.cumsum([0, *sizes])
        chosen = np.unique(np.searchsorted(begins, indices, side="right") - 1)
        table = file.read_row_groups(chosen.tolist(), columns=names)
        kept = np.concatenate([np.arange(begins[k], begins[k + 1]) for k in chosen])
        taken = table.take(np.searchsorted(kept, indices))
        # Arrow forgets the number of rows of a table without columns.
        values_of_rows: list[dict[str, Any]] = taken.to_pylist() or [{} for _ in indices]
    return [
        _row(index, values) for index, values in zip(indices.tolist(), values_of_rows, strict=True)
    ]


def _row(index: int, values: dict[str, Any]) -> dict[str, Any]:
    """Fills missing columns with None and replaces values that are not numbers by None."""
    row = {**dict.fromkeys((*_SHOWN, *_TOKENS)), **values, "index": index}
    row["messages"] = parsed(row["messages"], list)
    for name in ("sample", "part"):
        row[name] = row[name] if isinstance(row[name], int) else None
    for name in _NUMBERS:
        value = row[name]
        if not isinstance(value, (int, float)) or math.isnan(value):
            row[name] = None
    return row


def _needed(row_filter: Filter) -> list[str]:
    """Returns the columns that a filter reads."""
    has_outcome = row_filter.only in ("correct", "wrong")
    needed = {
        "prompt_id": bool(row_filter.prompt) or row_filter.prompts is not None,
        "group": row_filter.group is not None,
        "mode": bool(row_filter.mode),
        "reward": has_outcome or row_filter.low is not None or row_filter.high is not None,
        "correct": has_outcome,
        "truncated": row_filter.only == "truncated",
        "error": row_filter.only == "error",
        **dict.fromkeys(_TEXTS, bool(row_filter.text)),
    }
    return [name for name, is_needed in needed.items() if is_needed]


def _mask(table: "pa.Table", row_filter: Filter, num_rows: int) -> "np.ndarray[Any, Any]":
    """Returns which rows pass."""
    pc = _compute()
    masks = [np.ones(num_rows, bool)]
    rewards = _numbers(table, "reward", num_rows)
    if row_filter.low is not None:
        masks.append(rewards >= row_filter.low)
    if row_filter.high is not None:
        masks.append(rewards <= row_filter.high)
    if row_filter.text:
        matches = [
            _is_true(
                pc.match_substring(_texts(table, name, num_rows), row_filter.text, ignore_case=True)
            )
            for name in _TEXTS
        ]
        masks.append(matches[0] | matches[1])
    if row_filter.prompt or row_filter.prompts is not None:
        import pyarrow as pa

        ids = {row_filter.prompt} if row_filter.prompt else row_filter.prompts
        value_set = pa.array(sorted(ids or ()), pa.string())
        masks.append(_is_true(pc.is_in(_texts(table, "prompt_id", num_rows), value_set=value_set)))
    if row_filter.group is not None:
        masks.append(_numbers(table, "group", num_rows) == row_filter.group)
    if row_filter.mode:
        masks.append(_is_true(pc.equal(_texts(table, "mode", num_rows), row_filter.mode)))
    if row_filter.row is not None:
        masks.append(np.arange(num_rows) == row_filter.row)
    if row_filter.only in ONLY:
        masks.append(_only(table, row_filter.only, rewards))
    return np.asarray(reduce(np.logical_and, masks))


def _only(table: "pa.Table", only: str, rewards: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    num_rows = len(rewards)
    if only == "error":
        return _is_true(_compute().not_equal(_texts(table, "error", num_rows), ""))
    if only == "truncated":
        return np.asarray(_numbers(table, "truncated", num_rows) == 1)
    recorded = _numbers(table, "correct", num_rows)
    # The rollouts of a training have no column `correct`.
    is_correct = np.where(np.isnan(recorded), rewards > 0, recorded == 1)
    is_wrong = ~is_correct & ~np.isnan(rewards)
    return np.asarray(is_correct if only == "correct" else is_wrong)


def _codes(table: "pa.Table", num_rows: int) -> "np.ndarray[Any, Any]":
    """Numbers the prompts by first appearance; rows without a prompt are separate."""
    for name in ("group", "prompt_id"):
        if name in table.column_names and not table[name].null_count and num_rows:
            column = table[name].combine_chunks()
            try:
                codes = column.dictionary_encode().indices
            except NotImplementedError:  # a column of lists
                continue
            return np.asarray(codes.to_numpy(zero_copy_only=False))
    return np.arange(num_rows)


def _numbers(table: "pa.Table", name: str, num_rows: int) -> "np.ndarray[Any, Any]":
    """Returns a column as float64; NaN for null and where it is not numeric."""
    import pyarrow as pa

    if name not in table.column_names:
        return np.full(num_rows, np.nan)
    column = table[name]
    try:
        if pa.types.is_boolean(column.type):
            column = column.cast(pa.int8())
        values = column.cast(pa.float64()).to_numpy()
    except pa.ArrowException:
        return np.full(num_rows, np.nan)
    return np.asarray(values, np.float64)


def _texts(table: "pa.Table", name: str, num_rows: int) -> "pa.ChunkedArray":
    """Returns a column as text, null where it is missing."""
    import pyarrow as pa

    if name not in table.column_names:
        return pa.chunked_array([pa.nulls(num_rows, pa.string())])
    column = table[name]
    try:
        return column.cast(pa.string())
    except pa.ArrowException:
        texts = [None if one is None else json.dumps(one) for one in column.to_pylist()]
        return pa.chunked_array([pa.array(texts, pa.string())])


def _is_true(mask: "pa.ChunkedArray") -> "np.ndarray[Any, Any]":
    return np.asarray(mask.fill_null(False).to_numpy(), bool)


def _names(path: Path) -> list[str]:
    import pyarrow.parquet as pq

    with _arrow_errors_as_os_errors():
        names: list[str] = pq.read_schema(path).names
    return names


def _compute() -> Any:
    import pyarrow.compute as pc

    return pc


@contextmanager
def _arrow_errors_as_os_errors() -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise OSError(str(error)) from error
