"""Rows of several sources, drawn by weight."""

import logging
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from nemo_rl_core.config.data import MixtureData
from nemo_rl_core.data.chunks import RowWriter, chunks_of, select_rows
from nemo_rl_core.data.datasets.parts import Parts
from nemo_rl_core.data.frames import row_kind
from nemo_rl_core.errors import DataError
from nemo_rl_core.types import Row

logger = logging.getLogger(__name__)


def load(config: MixtureData, load_source: Callable[..., Parts], *, seed: int) -> Parts:
    """Loads the rows of all sources in their order; ids start with the number of the source."""
    update = {"invalid": config.invalid}
    sources = (source.data.model_copy(update=update) for source in config.sources)
    parts = [load_source(source, seed=seed) for source in sources]
    _refuse_mixed(parts)
    counts = _counts(config, [len(part.train) for part in parts])
    train, validation = RowWriter(), RowWriter()
    for number, (part, count) in enumerate(zip(parts, counts, strict=True)):
        size = len(part.train)
        logger.warning("the mixture: %d of %d rows of source %d", count, size, number)
        if count > size and config.duplicates != "keep":
            raise DataError(
                f"source {number} of the mixture has too few rows for its weight",
                expected=f"{count} rows for num_train {config.num_train}",
                got=f"{size} rows",
                fix="lower num_train or the source's weight, or set duplicates: keep to repeat "
                "its rows",
            )
        generator = random.Random(f"{seed}/mixture/{number}")
        for rows, suffix in _drawn(part.train, count, generator):
            _add(train, rows, number, suffix)
        _add(validation, part.validation or [], number, "")
    read_as = "; ".join(f"{n}: {p.read_as}" for n, p in enumerate(parts) if p.read_as)
    return Parts(train.close(), validation.close(), read_as)


def _counts(config: MixtureData, sizes: Sequence[int]) -> list[int]:
    weights = [source.weight for source in config.sources if source.weight is not None]
    if not weights:
        return list(sizes)
    shares = [weight / sum(weights) for weight in weights]
    total = config.num_train
    if total is None:
        max_total = min(size / share for size, share in zip(sizes, shares, strict=True))
        # Rounding may put the product just below the integer.
        return [int(max_total * share + 1e-9) for share in shares]
    exact = [total * share for share in shares]
    counts = [int(count) for count in exact]
    by_remainder = sorted(range(len(exact)), key=lambda n: counts[n] - exact[n])
    for number in by_remainder[: total - sum(counts)]:
        counts[number] += 1
    return counts


def _drawn(
    rows: Sequence[Row], count: int, generator: random.Random
) -> Iterator[tuple[Sequence[Row], str]]:
    """Yields full passes over the rows and a sample for the remainder, in the source's order."""
    for repeat in range(-(-count // len(rows)) if len(rows) else 0):
        num_drawn = min(count - repeat * len(rows), len(rows))
        is_drawn = np.zeros(len(rows), dtype=bool)
        is_drawn[np.array(generator.sample(range(len(rows)), num_drawn), dtype=np.int64)] = True
        yield select_rows(rows, is_drawn), f"#{repeat + 1}" if repeat else ""


def _add(writer: RowWriter, rows: Sequence[Row], number: int, suffix: str) -> None:
    for chunk in chunks_of(rows):
        if isinstance(chunk, list):
            writer.add([{**row, "id": f"{number}/{row['id']}{suffix}"} for row in chunk])
            continue
        import pyarrow as pa
        import pyarrow.compute as pc

        before, after, separator = (
            pa.scalar(text, pa.large_string()) for text in (f"{number}/", suffix, "")
        )
        ids = pc.binary_join_element_wise(before, chunk.column("id"), after, separator)
        writer.add(chunk.set_column(chunk.column_names.index("id"), "id", ids))


def _refuse_mixed(parts: Sequence[Parts]) -> None:
    kinds = {n: row_kind(list(part.train[0])) for n, part in enumerate(parts) if len(part.train)}
    if len(set(kinds.values())) > 1:
        raise DataError(
            "the sources of the mixture have rows of different kinds",
            expected="one kind in all sources",
            got=", ".join(f"source {number}: {kind}" for number, kind in kinds.items()),
            fix="map the columns of each source (columns) to the same ones",
        )
