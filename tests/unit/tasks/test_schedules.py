"""Cron expressions that Flyte's scheduler accepts, and the start times of runs."""

from datetime import UTC, datetime

import pytest

from nemo_rl_core.errors import ConfigError
from tasks.flyte.schedules import BAD_ENDS, described, labels_of, next_times, on_schedule

SUNDAY = datetime(2026, 11, 22, 23, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("cron", "times"),
    [
        ("0 2 * * *", ["11-23 02:00", "11-24 02:00", "11-25 02:00"]),
        ("*/20 * * * *", ["11-22 23:40", "11-23 00:00", "11-23 00:20"]),
        ("0 6 * * 1", ["11-23 06:00", "11-30 06:00", "12-07 06:00"]),
        ("30 4 1,15 * *", ["12-01 04:30", "12-15 04:30", "01-01 04:30"]),
        ("0 0 * * MON-FRI", ["11-23 00:00", "11-24 00:00", "11-25 00:00"]),
        ("@weekly", ["11-29 00:00", "12-06 00:00", "12-13 00:00"]),
    ],
)
def test_the_next_times(cron: str, times: list[str]) -> None:
    assert [f"{time:%m-%d %H:%M}" for time in next_times(cron, now=SUNDAY)] == times


@pytest.mark.parametrize(
    ("cron", "got"),
    [
        ("0 2 * *", "4 fields"),
        ("0 0 2 * * *", "6 fields"),
        ("", "0 fields"),
        ("61 2 * * *", "61"),
        ("0 2 30 2 *", "a day that never comes"),
        ("0 2 * * 7", "Sunday is 0"),
        ("0 2 * * 1-7", "Sunday is 0"),
        ("0 2 L * *", "'L'"),
        ("0 2 * * 5L", "'5L'"),
        ("0 2 * * 1#2", "'1#2'"),
        ("0 2 ? * 1", "'?'"),
        ("@fortnightly", "1 fields"),
    ],
)
def test_an_invalid_schedule_is_refused(cron: str, got: str) -> None:
    with pytest.raises(ConfigError, match="is not a schedule") as refused:
        next_times(cron)
    assert got in str(refused.value.got)


def test_one_run_at_a_time() -> None:
    options = on_schedule("0 2 * * *", ["a@example.com"], *BAD_ENDS)
    assert (options["concurrency"].max_concurrency, options["max_parallelism"]) == (1, 4)
    assert on_schedule("0 2 * * *", [], *BAD_ENDS)["notifications"] == []


LABELS = [
    "a.b-c.io/Queue_1.x=v1.2_3-z",
    "short=x",
    "empty=",
    f"{'p.' * 126}x/{'n' * 63}={'v' * 63}",
]


def test_labels_are_kept_unchanged() -> None:
    labels = labels_of(LABELS)
    assert [f"{key}={value}" for key, value in labels.items()] == LABELS
    assert described("schedule", "text", labels)["labels"].values == {
        "app.kubernetes.io/part-of": "nemo-rl-flow",
        "purpose": "schedule",
        **labels,
    }


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (["queue"], "no `=`"),
        (["=training"], "the name ''"),
        (["queue-=training"], "the name 'queue-'"),
        (["que ue=training"], "the name 'que ue'"),
        ([f"{'n' * 64}=x"], "the name 'nnn"),
        (["x-k8s.io/=x"], "the name ''"),
        (["/queue=x"], "the prefix ''"),
        (["Kueue.io/queue=x"], "the prefix 'Kueue.io'"),
        (["a/b/c=x"], "the prefix 'a/b'"),
        (["a..b/c=x"], "the prefix 'a..b'"),
        ([f"{'p' * 64}.io/c=x"], "the prefix 'ppp"),
        ([f"{'p.' * 127}x/c=x"], "the prefix 'p.p"),
        (["queue=a queue"], "the value 'a queue'"),
        (["queue=a=b"], "the value 'a=b'"),
        (["queue=.x"], "the value '.x'"),
        ([f"queue={'v' * 64}"], "the value 'vvv"),
        (["a=b", "a=c"], "a twice"),
        (["purpose=other"], "which each schedule has already"),
        ([f"a{number}=b" for number in range(15)], "15 labels, where Flyte takes 14"),
    ],
)
def test_an_invalid_label_is_refused(given: list[str], got: str) -> None:
    with pytest.raises(ConfigError, match="is not a label") as refused:
        labels_of(given)
    assert got in str(refused.value.got)
