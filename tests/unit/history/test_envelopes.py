"""Thinned curves against a loop over all values, also while they grow."""

import math
import random
from collections.abc import Iterator

import pytest

from nemo_rl_core.errors import DamagedRecordError
from nemo_rl_core.history import envelopes
from nemo_rl_core.history.database import open_for_writing
from nemo_rl_core.history.envelopes import MAX_BUCKETS, Envelope
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.records import LAST_STEP, NUM_TOKENS, RUN_SECONDS
from nemo_rl_core.history.writer import HistoryWriter, NodeEnd
from nemo_rl_core.store.store import Store
from nemo_rl_core.types import StepReport


@pytest.fixture
def running(store: Store, begin) -> Iterator[tuple[HistoryWriter, int, History]]:
    writer = begin("run")
    node = writer.begin_node("train", task="t.train", kind="task")
    with History(store) as history:
        yield writer, node, history
    writer.end("succeeded")


def log(writer: HistoryWriter, node: int, values: dict[int, float], name: str = "loss") -> None:
    """Writes many steps in one transaction."""
    with writer._database:
        writer._database.executemany(
            "INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)",
            [(node, step, name, value) for step, value in values.items()],
        )


def expected(values: dict[int, float], width: int) -> dict[int, tuple[float, float, int, int]]:
    """Lowest, highest, number of values and of missing ones by bucket, from every value."""
    buckets: dict[int, list[float]] = {}
    for step, value in values.items():
        buckets.setdefault(step // width, []).append(value)
    return {
        bucket: (
            min(filter(math.isfinite, each), default=math.nan),
            max(filter(math.isfinite, each), default=math.nan),
            len(each),
            sum(not math.isfinite(value) for value in each),
        )
        for bucket, each in buckets.items()
    }


def summary(envelope: Envelope, width: int) -> dict[int, tuple[float, float, int, int]]:
    return {
        b.begin // width: (b.low.value, b.high.value, b.num_values, b.num_missing) for b in envelope
    }


def test_a_growing_curve_has_the_extremes_of_every_bucket(running) -> None:
    """Each size is read after the smaller ones, so that buckets are kept, merged and extended."""
    writer, node, history = running
    draw = random.Random(0)
    values: dict[int, float] = {}
    width = 1
    for size in (1, 200, 255, 256, 300, 511, 700, 701, 1500, 3000):
        added = {step: draw.random() for step in range(len(values) + 1, size + 1)}
        added |= {step: math.inf for step in added if step % 97 == 0}
        added |= {step: math.nan for step in added if 640 <= step < 660}
        log(writer, node, added)
        values |= added
        while math.ceil(size / width) > MAX_BUCKETS - 1:
            width *= 2
        envelope = history.envelopes(node, ["loss"])["loss"]
        assert len(envelope) <= MAX_BUCKETS
        assert repr(summary(envelope, width)) == repr(expected(values, width))  # NaN equals NaN
        for bucket in envelope:
            missing = [
                s
                for s, v in values.items()
                if s // width == bucket.begin // width and not math.isfinite(v)
            ]
            first_missing = bucket.first_missing
            assert (first_missing and first_missing.step) == min(missing, default=None)
            for point in bucket.points:
                assert repr(values[point.step]) == repr(point.value) or math.isnan(point.value)
        total = sum(v for v in values.values() if math.isfinite(v))
        assert sum(b.total for b in envelope) == pytest.approx(total)


def test_a_part_is_read_in_more_detail(running) -> None:
    writer, node, history = running
    log(writer, node, {step: float(step) for step in range(10_000)})
    complete = history.envelopes(node, ["loss"])["loss"]
    part = history.envelopes(node, ["loss"], between=(5000, 5099))["loss"]
    assert complete[0].num_values == 64
    assert [bucket.low.value for bucket in part] == [float(step) for step in range(5000, 5100)]
    assert history.envelopes(node, ["loss"], between=(20_000, 30_000)) == {}


def test_steps_that_a_resumed_attempt_repeats_replace_the_former_ones(running) -> None:
    writer, node, history = running
    log(writer, node, dict.fromkeys(range(1, 1001), 1.0))
    before = history.envelopes(node, ["loss"])["loss"]
    assert {bucket.high.value for bucket in before} == {1.0}
    writer.resumed(node, 500)
    for begin in (501, 601):
        log(writer, node, dict.fromkeys(range(begin, begin + 100), 2.0))
        envelope = history.envelopes(node, ["loss"])["loss"]
        repeated = [bucket for bucket in envelope if bucket.high.value == 2.0]
        assert repeated[0].begin == 500
        assert repeated[-1].begin // 4 == (begin + 99) // 4


def test_an_attempt_that_begins_again_replaces_all_former_steps(running) -> None:
    """Its attempt has no step from which it resumed."""
    writer, node, history = running
    log(writer, node, dict.fromkeys(range(600), 0.0))
    history.envelopes(node, ["loss"])
    with writer._database as database:
        database.execute("UPDATE attempts SET state = 'failed', ended_at = 1.0")
        insert = (
            "INSERT INTO attempts (node, number, state, started_at) VALUES (?, 2, 'running', 2)"
        )
        database.execute(insert, (node,))
    for begin in (0, 100, 200):
        log(writer, node, dict.fromkeys(range(begin, begin + 100), 9.0))
        envelope = history.envelopes(node, ["loss"])["loss"]
        # 600 steps are 150 buckets of 4; 25 of them are new each time.
        assert [b.high.value for b in envelope] == [9.0] * (begin // 4 + 25) + [0.0] * (
            125 - begin // 4
        )


def test_a_number_of_buckets_is_kept_and_the_oldest_are_dropped(running, monkeypatch) -> None:
    """A curve of 8 steps is 8 buckets, or 2 of 4 steps if at most 3 are wanted."""
    writer, node, history = running
    for name in "abc":
        log(writer, node, {step: float(step) for step in range(8)}, name)
    writer.end_node(node, NodeEnd("succeeded"))
    few = history.envelopes(node, ["a"], most=3)["a"]
    assert [(b.begin, b.low.value, b.high.value) for b in few] == [(0, 0.0, 3.0), (4, 4.0, 7.0)]
    monkeypatch.setattr(envelopes, "_KEPT_BUCKETS", 20)  # each curve counts as one more
    queries: list[str] = []
    history._database.set_trace_callback(queries.append)

    def is_read(name: str) -> bool:
        queries.clear()
        envelope = history.envelopes(node, [name])[name]
        assert [b.low.value for b in envelope] == [float(step) for step in range(8)]
        return any("FROM metrics" in query for query in queries)

    assert [is_read(name) for name in "abaacabb"] == [1, 1, 0, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("axis", ["", "seconds"])
@pytest.mark.parametrize("num_steps", [1, 9, 300])
def test_curves_of_a_short_node_equal_those_read_one_by_one(
    running, store: Store, axis: str, num_steps: int
) -> None:
    writer, node, history = running
    draw, names = random.Random(num_steps), ["a", "b", "nan", "inf", "seconds"]
    for name in names:
        values = {step: round(draw.random(), 1) for step in range(5, 5 + num_steps)}
        odd = {"nan": {5 + num_steps // 2: math.nan}, "inf": {5: math.inf}}
        log(writer, node, values | odd[name] if name in odd else values, name)
    names.insert(0, "Sparse")  # sorts first, and has other steps
    log(writer, node, {4 + num_steps: 1.0}, "Sparse")
    writer.end_node(node, NodeEnd("succeeded"))
    together = history.envelopes(node, [*names, "unknown"], axis=axis, most=8)
    with History(store) as other:
        single = {n: other.envelopes(node, [n], axis=axis, most=8)[n] for n in names}
    assert repr(together) == repr(single)
    assert {"a", "b"} < envelopes._read_short(history._database, node, names, axis, 8).keys()


def test_a_step_has_its_time_and_its_tokens(running, store: Store) -> None:
    writer, node, history = running
    for step in (1, 2, 3):
        report = StepReport(
            "train", step, 10, {"global_step": 40.0 + step, "num_valid_tokens": 7.0}
        )
        assert writer.log_step(node, report) == 40 + step
    assert history.last_value(node, NUM_TOKENS) == (43, 21.0)
    assert history.last_value(node, LAST_STEP) == (43, 50.0)
    assert history.last_value(node, "none") is None
    assert 0 <= history.last_value(node, RUN_SECONDS)[1] < 60
    (curve,) = history.envelopes(node, ["global_step"], axis=NUM_TOKENS).values()
    assert [bucket.low.x for bucket in curve] == [7.0, 14.0, 21.0]


def test_a_damaged_value_is_refused(running, store: Store) -> None:
    writer, node, history = running
    with open_for_writing(store) as database:
        rows = [(node, step, "loss", "x") for step in range(1000)]
        database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", rows)
    with pytest.raises(DamagedRecordError, match="the metric 'loss'"):
        history.envelopes(node, ["loss"])
    writer.end_node(node, NodeEnd("succeeded"))
