"""Which rows ask the same, for any number of rows: 8 bytes a row, and no text is mistaken.

Rows of equal 8-byte hashes are compared by 16-byte digests, which no two texts share by chance.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_rl_core.data.chunks import chunks_of
from nemo_rl_core.types import Row

if TYPE_CHECKING:
    import pyarrow as pa

KeysOf = Callable[[Any], "Sequence[str]"]
"""The text of each row of a chunk by which rows are compared."""

Hashes = "np.ndarray[Any, np.dtype[np.uint64]]"


def hashes_of(keys: "Sequence[str] | np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """A hash `[N]` uint64 of each text."""
    from pandas.util import hash_array

    values = keys if isinstance(keys, np.ndarray) else np.array([*keys, None], dtype=object)[:-1]
    if not len(values):
        return np.zeros(0, dtype=np.uint64)
    # A text that UTF-8 cannot write has no such hash; another check names its row.
    try:
        return np.asarray(hash_array(values, categorize=False))
    except UnicodeEncodeError:
        escaped = [str(value).encode("utf-8", "surrogatepass").hex() for value in values]
        return np.asarray(hash_array(np.array(escaped, dtype=object), categorize=False))


def hashes_of_rows(rows: Sequence[Row], keys_of: KeysOf) -> "np.ndarray[Any, Any]":
    """The hashes of all rows, gone through once."""
    found = [hashes_of(keys_of(chunk)) for chunk in chunks_of(rows)]
    return np.concatenate(found) if found else np.zeros(0, dtype=np.uint64)


def digest(text: str) -> bytes:
    """16 bytes that stand for a text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def first_rows(
    rows: Sequence[Row], keys_of: KeysOf, hashes: "np.ndarray[Any, Any]"
) -> "np.ndarray[Any, Any]":
    """For every row `[N]` int64 the number of the first row with the same text, often its own.

    Args:
        rows: Gone through again where hashes are equal.
        keys_of: The texts of a chunk.
        hashes: Of these texts, as `hashes_of_rows` returns them.
    """
    first = np.arange(len(hashes), dtype=np.int64)
    candidates = _shared(hashes)
    if candidates is None:
        return first
    seen: dict[bytes, int] = {}
    for start, chunk in _numbered(rows):
        chosen = np.flatnonzero(candidates[start : start + len(chunk)])
        if not len(chosen):
            continue
        keys = keys_of(chunk)
        for offset in chosen.tolist():
            number = start + offset
            first[number] = seen.setdefault(digest(str(keys[offset])), number)
    return first


def repeats(rows: Sequence[Row], keys_of: KeysOf) -> list[int]:
    """The numbers of the rows whose text an earlier row has."""
    hashes = hashes_of_rows(rows, keys_of)
    if _shared(hashes) is None:
        return []
    first = first_rows(rows, keys_of, hashes)
    found: list[int] = np.flatnonzero(first != np.arange(len(first))).tolist()
    return found


def _shared(hashes: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any] | None":
    """Whether each hash occurs more than once; None if none does."""
    ordered = np.sort(hashes)
    twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    return _among(hashes, twice) if len(twice) else None


def _among(hashes: "np.ndarray[Any, Any]", ordered: "np.ndarray[Any, Any]") -> Any:
    """Whether each hash is one of sorted ones."""
    if not len(ordered):
        return np.zeros(len(hashes), dtype=bool)
    places = np.searchsorted(ordered, hashes)
    return ordered[np.minimum(places, len(ordered) - 1)] == hashes


def rows_in(rows: Sequence[Row], others: Sequence[Row], keys_of: KeysOf) -> list[int]:
    """The numbers of the rows whose text is one of the others' too."""
    hashes, other_hashes = hashes_of_rows(rows, keys_of), hashes_of_rows(others, keys_of)
    candidates = _among(hashes, np.sort(other_hashes))
    if not candidates.any():
        return []
    wanted = _among(other_hashes, np.sort(hashes[candidates]))
    digests = {digest(key) for _, key in _keys_at(others, keys_of, wanted)}
    found = _keys_at(rows, keys_of, candidates)
    return [number for number, key in found if digest(key) in digests]


def _keys_at(
    rows: Sequence[Row], keys_of: KeysOf, chosen: "np.ndarray[Any, Any]"
) -> Iterator[tuple[int, str]]:
    for start, chunk in _numbered(rows):
        part = np.flatnonzero(chosen[start : start + len(chunk)])
        if len(part):
            keys = keys_of(chunk)
            for offset in part.tolist():
                yield start + offset, str(keys[offset])


def _numbered(rows: Sequence[Row]) -> "Iterator[tuple[int, list[Row] | pa.Table]]":
    start = 0
    for chunk in chunks_of(rows):
        yield start, chunk
        start += len(chunk)
