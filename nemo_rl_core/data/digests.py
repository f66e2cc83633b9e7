"""Exact detection of rows with equal texts, with 8 bytes of memory per row.

Rows with equal 8-byte hashes are compared by 16-byte digests, which do not collide by chance.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nemo_rl_core.data.chunks import chunks_of
from nemo_rl_core.types import Row

KeysOf = Callable[[Any], "Sequence[str]"]
"""Returns the text of each row of a chunk by which rows are compared."""

Array = np.ndarray[Any, Any]


def _hashes_of(keys: Sequence[str] | Array) -> Array:
    from pandas.util import hash_array

    values = keys if isinstance(keys, np.ndarray) else np.array([*keys, None], dtype=object)[:-1]
    if not len(values):
        return np.zeros(0, dtype=np.uint64)
    # A text that UTF-8 cannot encode has no such hash; another check reports its row.
    try:
        return np.asarray(hash_array(values, categorize=False))
    except UnicodeEncodeError:
        escaped = [str(value).encode("utf-8", "surrogatepass").hex() for value in values]
        return np.asarray(hash_array(np.array(escaped, dtype=object), categorize=False))


def _hashes_of_rows(rows: Sequence[Row], keys_of: KeysOf) -> Array:
    hashes = [_hashes_of(keys_of(chunk)) for chunk in chunks_of(rows)]
    return np.concatenate(hashes) if hashes else np.zeros(0, dtype=np.uint64)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def first_rows(rows: Sequence[Row], keys_of: KeysOf) -> Array:
    """Returns for every row the index of the first row with the same text, `[N]` int64."""
    candidates = _is_shared(_hashes_of_rows(rows, keys_of))
    first = np.arange(len(candidates), dtype=np.int64)
    seen: dict[bytes, int] = {}
    for number, key in _keys_at(rows, keys_of, candidates):
        first[number] = seen.setdefault(_digest(key), number)
    return first


def repeats(rows: Sequence[Row], keys_of: KeysOf) -> list[int]:
    """Returns the indices of the rows with the text of an earlier row."""
    first = first_rows(rows, keys_of)
    indices: list[int] = np.flatnonzero(first != np.arange(len(first))).tolist()
    return indices


def _is_shared(hashes: Array) -> Array:
    ordered = np.sort(hashes)
    return _among(hashes, np.unique(ordered[1:][ordered[1:] == ordered[:-1]]))


def _among(hashes: Array, ordered: Array) -> Array:
    if not len(ordered):
        return np.zeros(len(hashes), dtype=bool)
    positions = np.searchsorted(ordered, hashes)
    return np.asarray(ordered[np.minimum(positions, len(ordered) - 1)] == hashes)


def rows_in(rows: Sequence[Row], others: Sequence[Row], keys_of: KeysOf) -> list[int]:
    """Returns the indices of the rows with a text that other rows also have."""
    hashes, other_hashes = _hashes_of_rows(rows, keys_of), _hashes_of_rows(others, keys_of)
    candidates = _among(hashes, np.sort(other_hashes))
    if not candidates.any():
        return []
    other_candidates = _among(other_hashes, np.sort(hashes[candidates]))
    digests = {_digest(key) for _, key in _keys_at(others, keys_of, other_candidates)}
    keys = _keys_at(rows, keys_of, candidates)
    return [number for number, key in keys if _digest(key) in digests]


def _keys_at(rows: Sequence[Row], keys_of: KeysOf, chosen: Array) -> Iterator[tuple[int, str]]:
    if not chosen.any():  # the rows need not be read again
        return
    start = 0
    for chunk in chunks_of(rows):
        part = np.flatnonzero(chosen[start : start + len(chunk)])
        if len(part):
            keys = keys_of(chunk)
            for offset in part.tolist():
                yield start + offset, str(keys[offset])
        start += len(chunk)
