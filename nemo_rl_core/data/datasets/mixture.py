"""Rows of several sources, drawn by weight."""

import logging
import random
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from nemo_rl_core.config.data import DataConfig, MixtureData
from nemo_rl_core.data.chunks import RowWriter, chunks_of, taken
from nemo_rl_core.data.datasets.parts import Parts
from nemo_rl_core.data.frames import row_kind
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

logger = logging.getLogger(__name__)


class LoadParts(Protocol):
    """Reads the rows of one source."""

    def __call__(self, config: DataConfig, *, seed: int) -> Parts:
        """Returns its rows, which depend on the arguments alone."""
        ...


def load(config: MixtureData, load_source: LoadParts, *, seed: int) -> Parts:
    """The rows of all sources, in the order of the sources; ids begin with a source's number.

    Args:
        config: The sources with their weights.
        load_source: Reads one source.
        seed: For the rows that are drawn.

    Raises:
        DataError: If a source cannot be read, if the kinds of rows differ, or if rows would repeat
            without `duplicates: keep`.
    """
    parts = [load_source(each.data, seed=seed) for each in config.sources]
    _refuse_mixed(parts)
    counts = _counts(config, [len(each.train) for each in parts])
    train, validation = RowWriter(), RowWriter()
    for number, (part, count) in enumerate(zip(parts, counts, strict=True)):
        size = len(part.train)
        logger.warning("the mixture: %d of %d rows of source %d", count, size, number)
        if count > size and config.duplicates != "keep":
            raise DataError(
                f"source {number} of the mixture has too few rows for its weight",
                expected=f"{count} rows for num_train {config.num_train}",
                got=f"{size} rows",
                fix="lower num_train or the source's weight, or say duplicates: keep to repeat "
                "its rows",
            )
        draw = random.Random(f"{seed}/mixture/{number}")
        for rows, again in _drawn(part.train, count, draw):
            _add(train, rows, number, again)
        _add(validation, part.validation or [], number, "")
    read_as = "; ".join(f"{n}: {p.read_as}" for n, p in enumerate(parts) if p.read_as)
    return Parts(train.close(), validation.close(), read_as)


def _counts(config: MixtureData, sizes: Sequence[int]) -> list[int]:
    """Rows of each source; with `num_train` they add up to it."""
    weights = [each.weight for each in config.sources if each.weight is not None]
    if not weights:
        return list(sizes)
    shares = [weight / sum(weights) for weight in weights]
    total = config.num_train
    if total is None:
        most = min(size / share for size, share in zip(sizes, shares, strict=True))
        # A share times a quotient by it may fall just below the whole number.
        return [int(most * share + 1e-9) for share in shares]
    exact = [total * share for share in shares]
    counts = [int(each) for each in exact]
    by_rest = sorted(range(len(exact)), key=lambda n: counts[n] - exact[n])
    for number in by_rest[: total - sum(counts)]:
        counts[number] += 1
    return counts


def _drawn(
    rows: Sequence[Row], count: int, draw: random.Random
) -> Iterator[tuple[Sequence[Row], str]]:
    """Whole passes over the rows and a draw of the rest, each row at its place of the source.

    Yields:
        The rows of a pass, and what their ids end with.
    """
    for repeat in range(-(-count // len(rows)) if len(rows) else 0):
        left = min(count - repeat * len(rows), len(rows))
        is_drawn = np.zeros(len(rows), dtype=bool)
        is_drawn[np.array(draw.sample(range(len(rows)), left), dtype=np.int64)] = True
        yield taken(rows, is_drawn), f"#{repeat + 1}" if repeat else ""


def _add(writer: RowWriter, rows: Sequence[Row], number: int, again: str) -> None:
    """Adds rows, whose ids begin with the number of their source."""
    for chunk in chunks_of(rows):
        if isinstance(chunk, list):
            writer.add([{**row, "id": f"{number}/{row['id']}{again}"} for row in chunk])
            continue
        import pyarrow as pa
        import pyarrow.compute as pc

        before, after, between = (
            pa.scalar(text, pa.large_string()) for text in (f"{number}/", again, "")
        )
        ids = pc.binary_join_element_wise(before, chunk.column("id"), after, between)
        writer.add(chunk.set_column(chunk.column_names.index("id"), "id", ids))


def _refuse_mixed(parts: Sequence[Parts]) -> None:
    kinds = {n: row_kind(list(part.train[0])) for n, part in enumerate(parts) if len(part.train)}
    if len(set(kinds.values())) > 1:
        raise DataError(
            "the sources of the mixture hold rows of different kinds",
            expected="one kind in all sources",
            got=", ".join(f"source {number}: {kind}" for number, kind in kinds.items()),
            fix="map the columns of each source (columns) to the same ones",
        )
