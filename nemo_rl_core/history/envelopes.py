"""Curves of metrics, thinned in SQL: the lowest and the highest value of each bucket of steps.

Complete buckets are read once, so that a refresh during a run reads only new steps. A bucket spans
a power of two steps, and two are merged into one as the curve grows.
"""

import math
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from nemo_rl_core.errors import DamagedRecordError
from nemo_rl_core.history.database import FILE

MAX_BUCKETS = 256
_KEPT_BUCKETS = 400_000
"""About 150 MB."""

_BUCKET = """
SELECT step, min(value), count(*), count(value), total(value) FROM metrics
  WHERE node = :node AND name = :name AND step >= :begin AND step < :end
UNION ALL
SELECT step, max(value), 0, 0, 0 FROM metrics
  WHERE node = :node AND name = :name AND step >= :begin AND step < :end
"""
"""With `min` or `max`, SQLite takes the step from the row of that value."""
_FIRST_MISSING = """
SELECT min(step) FROM metrics WHERE node = :node AND name = :name AND step >= :begin
  AND step < :end AND (value IS NULL OR abs(value) = 9e999)
"""
_FINITE = " AND abs(value) < 9e999"
_BUCKETS_OF_NODE = """
SELECT name, number, step, value, num_values, num_finite, total,
  (SELECT at.value FROM metrics AS at WHERE at.node = ? AND at.name = ? AND at.step = found.step)
  FROM (
    SELECT name, step / {width} AS number, step, {end}(value) AS value, count(*) AS num_values,
      count(value) AS num_finite, total(value) AS total
    FROM metrics WHERE node = ? AND name IN ({names}) GROUP BY name, number
  ) AS found
"""
_MOST_VALUES = 10_000
"""Number of values of an ended node whose curves are read in one query instead of one by one."""


class CurvePoint(NamedTuple):
    """A value of a metric, with the position on the axis: a step, seconds or tokens."""

    x: float
    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """Consecutive steps of a metric.

    Attributes:
        begin: The first step; the bucket may have fewer steps than its width.
        low: The lowest finite value, `high` the highest; NaN if there is none.
        num_missing: Number of values that are NaN or infinite, the first one at `first_missing`.
    """

    begin: int
    low: CurvePoint
    high: CurvePoint
    num_values: int
    num_missing: int
    total: float
    first_missing: CurvePoint | None = None

    @property
    def points(self) -> list[CurvePoint]:
        """The lowest and the highest value in order of steps; one point if they are the same."""
        if self.low.step == self.high.step:
            return [self.low]
        return sorted([self.low, self.high], key=lambda each: each.step)

    def moved(self, distance: float) -> "Bucket":
        """Returns the bucket elsewhere on the axis."""
        low, high = (each._replace(x=each.x + distance) for each in (self.low, self.high))
        missing = self.first_missing
        if missing is not None:
            missing = missing._replace(x=missing.x + distance)
        return replace(self, low=low, high=high, first_missing=missing)

    def joined(self, later: "Bucket") -> "Bucket":
        """Returns one bucket for two."""
        finite = [each for each in (self, later) if each.num_values > each.num_missing]
        lows, highs = [b.low for b in finite], [b.high for b in finite]
        return Bucket(
            self.begin,
            min(lows, key=lambda each: each.value, default=self.low),
            max(highs, key=lambda each: each.value, default=self.high),
            self.num_values + later.num_values,
            self.num_missing + later.num_missing,
            self.total + later.total,
            self.first_missing or later.first_missing,
        )


Envelope = list[Bucket]


@dataclass(frozen=True, slots=True)
class NodeVersion:
    """State of a node on which its curves depend, besides new steps.

    Attributes:
        measured: Id of the node that has the metrics: the maker of a cache hit.
        has_ended: Whether it has ended, so that no steps are added.
        state: Its state and attempts; steps may be logged again after a change.
        rewritten_after: Step after which a resumed attempt logs steps again; None if none does.
    """

    measured: int
    state: tuple[object, ...]
    rewritten_after: int | None
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class _Kept:
    version: NodeVersion
    width: int
    buckets: Envelope


class EnvelopeReader:
    """Reads envelopes and keeps complete buckets; the caller serializes calls."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str, str, int], _Kept] = {}  # the latest read is last
        self._num_kept = 0

    def read(
        self,
        database: sqlite3.Connection,
        node: int,
        names: Sequence[str],
        *,
        axis: str = "",
        between: tuple[int, int] | None = None,
        most: int = MAX_BUCKETS,
    ) -> dict[str, Envelope]:
        """Returns the buckets of each curve, without metrics that the node does not have.

        Args:
            axis: Metric with the position of each step; by default the step itself.
            between: First and last step, to read a part in more detail; this is not kept.
            most: Maximum number of buckets of a curve.
        """
        version = _version(database, node)
        envelopes: dict[str, Envelope] = {}
        unread = []
        for name in names:
            key = (node, name, axis, most)
            kept = self._kept.get(key)
            if between is None and version.has_ended and kept and kept.version == version:
                self._kept[key] = self._kept.pop(key)
                envelopes[name] = kept.buckets
            else:
                unread.append(name)
        short: dict[str, Envelope] = {}
        if between is None and version.has_ended and len(unread) > 1:
            short = _read_short(database, version.measured, unread, axis, most)
        for name in unread:
            key = (node, name, axis, most)
            if name in short:
                envelopes[name] = short[name]
                self._keep(key, _Kept(version, 1, short[name]))
            else:
                envelopes[name] = self._read(database, version, key, between)
        return {name: envelopes[name] for name in names if envelopes[name]}

    def _read(
        self,
        database: sqlite3.Connection,
        version: NodeVersion,
        key: tuple[int, str, str, int],
        between: tuple[int, int] | None,
    ) -> Envelope:
        _, name, axis, most = key
        ends = _ends(database, version.measured, name, between)
        if ends is None:
            return []
        first, last = ends
        width = _width(last - first + 1, most)
        if between is not None:
            return _read(database, version.measured, name, axis, range(first, last + 1, width))
        done = _done(self._kept.get(key), version, width)
        begin = _end(done[-1].begin, width) if done else first
        envelope = done + _read(
            database, version.measured, name, axis, range(begin, last + 1, width)
        )
        limit = last if version.rewritten_after is None else min(last, version.rewritten_after)
        complete = [
            each for each in envelope if version.has_ended or _end(each.begin, width) <= limit + 1
        ]
        self._keep(key, _Kept(version, width, complete))
        return envelope

    def _keep(self, key: tuple[int, str, str, int], kept: _Kept) -> None:
        """Keeps buckets, and drops those of curves that were not read for the longest time."""
        if former := self._kept.pop(key, None):
            self._num_kept -= len(former.buckets) + 1
        self._kept[key] = kept
        self._num_kept += len(kept.buckets) + 1
        while self._num_kept > _KEPT_BUCKETS:
            oldest = self._kept.pop(next(iter(self._kept)))
            self._num_kept -= len(oldest.buckets) + 1


def _done(kept: _Kept | None, version: NodeVersion, width: int) -> Envelope:
    """Returns the kept buckets that are complete, merged to a width."""
    if kept is None or kept.version != version or kept.width > width:
        return []
    buckets: Envelope = []
    for each in kept.buckets:
        if buckets and buckets[-1].begin // width == each.begin // width:
            buckets[-1] = buckets[-1].joined(each)
        else:
            buckets.append(each)
    # The last one is incomplete if its second half is not read yet.
    is_partial = buckets and _end(kept.buckets[-1].begin, kept.width) < _end(
        buckets[-1].begin, width
    )
    return buckets[:-1] if is_partial else buckets


def names_of(database: sqlite3.Connection, node: int) -> list[sqlite3.Row]:
    """Returns the names of a node's metrics; seeks in the key instead of reading each step."""
    return database.execute(
        "WITH RECURSIVE names(name) AS (SELECT min(name) FROM metrics WHERE node = :node "
        "UNION ALL SELECT (SELECT min(name) FROM metrics WHERE node = :node "
        "AND metrics.name > names.name) FROM names WHERE names.name IS NOT NULL) "
        "SELECT name FROM names WHERE name IS NOT NULL",
        {"node": node},
    ).fetchall()


def _width(num_steps: int, most: int) -> int:
    """Returns the smallest power of two that needs at most `most` buckets."""
    return 1 << max(0, math.ceil(math.log2(num_steps / (most - 1))))


def _version(database: sqlite3.Connection, node: int) -> NodeVersion:
    row = database.execute(
        "SELECT nodes.id, nodes.state, nodes.started_at, nodes.ended_at, number, resumed_from_step "
        "FROM nodes LEFT JOIN attempts ON node = nodes.id WHERE nodes.id = "
        "(SELECT coalesce(cached_from, id) FROM nodes WHERE id = ?) ORDER BY number DESC LIMIT 1",
        (node,),
    ).fetchone()
    if row is None:
        return NodeVersion(node, (), None)
    has_ended = row["ended_at"] is not None
    resumed = row["resumed_from_step"]
    if resumed is None and row["number"] not in (None, 1):
        resumed = -1  # this attempt began again from the first step
    if not isinstance(resumed, int | None):
        resumed = -1  # damaged: all steps are read again
    return NodeVersion(row["id"], tuple(row)[1:], None if has_ended else resumed, has_ended)


def _ends(
    database: sqlite3.Connection, node: int, name: str, between: tuple[int, int] | None
) -> tuple[int, int] | None:
    limits = "" if between is None else "AND step BETWEEN :low AND :high"
    low, high = between or (0, 0)
    ends = [
        database.execute(
            f"SELECT {end}(step) FROM metrics WHERE node = :node AND name = :name {limits}",
            {"node": node, "name": name, "low": low, "high": high},
        ).fetchone()[0]
        for end in ("min", "max")
    ]
    if ends[0] is None:
        return None
    if not all(isinstance(each, int) for each in ends):
        raise damaged_metric(name, ends)
    return int(ends[0]), int(ends[1])


def _end(step: int, width: int) -> int:
    """Returns the step after the bucket of a step; buckets begin at multiples of the width."""
    return step // width * width + width


def _read(database: sqlite3.Connection, node: int, name: str, axis: str, steps: range) -> Envelope:
    """Reads the buckets of steps, whose width is the range's step."""
    if steps.step == 1:
        return _read_single_steps(database, node, name, axis, steps)
    buckets: Envelope = []
    begin = steps.start
    while begin < steps.stop:
        end = _end(begin, steps.step)
        values = {"node": node, "name": name, "begin": begin, "end": end}
        low, high = database.execute(_BUCKET, values).fetchall()
        _check(name, low[1], high[1])
        if num_values := low[2]:
            if not math.isfinite(low[4]):
                finite = _BUCKET.replace("< :end", "< :end" + _FINITE)
                low, high = database.execute(finite, values).fetchall()
            lowest, highest = (
                _measured(database, node, axis, begin if row[0] is None else row[0], row[1])
                for row in (low, high)
            )
            num_missing, missing = num_values - low[3], None
            if num_missing:
                ((at,),) = database.execute(_FIRST_MISSING, values).fetchall()
                missing = _measured(database, node, axis, at, None)
            buckets.append(Bucket(begin, lowest, highest, num_values, num_missing, low[4], missing))
        begin = end
    return buckets


def _read_single_steps(
    database: sqlite3.Connection, node: int, name: str, axis: str, steps: range
) -> Envelope:
    rows = database.execute(
        "SELECT step, value FROM metrics WHERE node = ? AND name = ? AND step >= ? AND step < ?",
        (node, name, steps.start, steps.stop),
    ).fetchall()
    buckets: Envelope = []
    for step, value in rows:
        _check(name, value)
        each = _measured(database, node, axis, step, value)
        missing = each if math.isnan(each.value) else None
        total = 0.0 if missing else each.value
        buckets.append(Bucket(step, each, each, 1, int(missing is not None), total, missing))
    return buckets


def _read_short(
    database: sqlite3.Connection, node: int, names: Sequence[str], axis: str, most: int
) -> dict[str, Envelope]:
    """Reads the curves of a node with few values; leaves out those with missing values."""
    values = f"FROM metrics WHERE node = ? AND name IN ({', '.join('?' * len(names))})"
    few = f"SELECT count(*) FROM (SELECT 1 {values} LIMIT {_MOST_VALUES + 1})"
    if database.execute(few, (node, *names)).fetchone()[0] > _MOST_VALUES:
        return {}
    firsts: dict[str, int] = {}
    by_width: dict[int, list[str]] = {}
    ends = f"SELECT name, min(step), max(step) {values} GROUP BY name"
    for name, *steps in database.execute(ends, (node, *names)):
        if not all(isinstance(each, int) for each in steps):
            raise damaged_metric(name, steps)
        firsts[name] = steps[0]
        by_width.setdefault(_width(steps[1] - steps[0] + 1, most), []).append(name)
    envelopes: dict[str, Envelope] = {}
    missing = set()
    for width, alike in by_width.items():
        lows, highs = (
            database.execute(
                _BUCKETS_OF_NODE.format(width=width, end=end, names=", ".join("?" * len(alike))),
                (node, axis, node, *alike),
            ).fetchall()
            for end in ("min", "max")
        )
        for low, high in zip(lows, highs, strict=True):
            name, number, step, _, num_values, num_finite, total, _ = low
            _check(name, low[3], high[3])
            if num_finite < num_values or not math.isfinite(total) or not isinstance(step, int):
                missing.add(name)
                continue
            lowest, highest = (
                CurvePoint(
                    (at if isinstance(at, float) else math.nan) if axis else step, step, value
                )
                for _, _, step, value, _, _, _, at in (low, high)
            )
            begin = max(firsts[name], number * width)
            bucket = Bucket(begin, lowest, highest, num_values, 0, total)
            envelopes.setdefault(name, []).append(bucket)
    return {name: each for name, each in envelopes.items() if name not in missing}


def _measured(
    database: sqlite3.Connection, node: int, axis: str, step: int, value: float | None
) -> CurvePoint:
    is_finite = value is not None and math.isfinite(value)  # SQLite stores NaN as NULL
    position: float = step
    if axis:
        row = database.execute(
            "SELECT value FROM metrics WHERE node = ? AND name = ? AND step = ?", (node, axis, step)
        ).fetchone()
        position = float(row[0]) if row and isinstance(row[0], float) else math.nan
    return CurvePoint(position, step, value if value is not None and is_finite else math.nan)


def _check(name: str, *values: object) -> None:
    if not all(isinstance(each, float | int | None) for each in values):
        raise damaged_metric(name, values)


def damaged_metric(name: str, values: object) -> DamagedRecordError:
    """Returns the error for values of a metric that no run has written."""
    return DamagedRecordError(
        f"values of the metric {name[:120]!r} in the table metrics of {FILE} are damaged",
        expected="numbers",
        got=f"{values!r:.60}",
        fix=f"end all runs, then restore {FILE} from a backup, or move it away: the next run "
        "creates a new one, and no artifact is lost",
    )
