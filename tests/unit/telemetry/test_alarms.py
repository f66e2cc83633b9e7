"""Alarms on curves, with the steps computed by hand."""

import math
import re
import time
from pathlib import Path

import pytest

from nemo_rl_core.telemetry.alarms import (
    NO_STEP,
    NO_STEP_SECONDS,
    RULES,
    AlarmWatch,
    alarms,
    no_step,
)
from tests.notice_servers import hook

NAN = math.nan


def steps(*values: float) -> list[tuple[int, float]]:
    return [*enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        ("loss", (1.0, NAN, 1.0), [("Not a number", 2, 2, True)]),
        ("grad_norm", (1.0, math.inf), [("Not a number", 2, 2, False)]),
        ("zero_variance_fraction", (1.0,) * 4, []),
        ("zero_variance_fraction", (0.9,) * 9, []),
        ("zero_variance_fraction", (0.5, *(0.95,) * 5), [("Equal groups", 2, 6, False)]),
        ("approx_entropy", (NAN, 2.0, *(0.19,) * 5), [("Entropy collapse", 3, 7, False)]),
        ("approx_entropy", (2.0, *(0.21,) * 5), []),
        ("kl", (0.6, 0.7, 0.8, 0.1, 0.6), [("KL to the reference", 1, 3, True)]),
        ("kl_generation_trainer", (0.06,) * 3, [("Engine against trainer", 1, 3, False)]),
        ("num_inconsistent_sequences", (1.0, 0.0, 1.0, 0.0, 1.0), []),
        ("num_inconsistent_sequences", (1.0, 2.0, 1.0), [("Gate", 1, 3, False)]),
        ("truncated_fraction", (0.51,) * 5, [("Truncation", 1, 5, False)]),
        ("failed_fraction", (0.03,) * 3, [("Failed rollouts", 1, 3, False)]),
        ("something", (NAN,) * 9, []),
    ],
)
def test_a_rule_holds_for_steps_in_a_row(metric, values, expected) -> None:
    broken = alarms({metric: steps(*values)})
    assert [(a.rule.name, a.since, a.until, a.is_over) for a in broken] == expected


def test_a_running_stage_warns_of_an_alarm_once_and_sends_a_notice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with hook() as (address, posted):
        monkeypatch.setenv("NEMO_RL_NOTIFY", address)
        watch = AlarmWatch("grpo_iteration 1")
        kl = [0.6, 0.7, 0.1, 0.6, 0.7, 0.8, 0.9, 0.1, 0.9, 0.9, 0.9]
        raised = [
            (step, alarm.rule.name, alarm.since, alarm.until)
            for step, value in enumerate(kl, start=1)
            for alarm in watch.step(step, {"kl": value, "reward": 0.5})
        ]
        end = time.monotonic() + 10
        while not posted and time.monotonic() < end:
            time.sleep(0.01)
    assert raised == [(6, "KL to the reference", 4, 6)]
    (line,) = caplog.messages
    assert line.startswith("alarm: KL to the reference: kl is 0.8, above 0.5 per token for 3 steps")
    (notice,) = posted
    assert notice["text"].startswith(
        "nemo-rl: KL to the reference at step 6 of grpo_iteration 1\nkl is 0.8"
    )


def test_the_last_of_two_streaks_is_reported() -> None:
    (alarm,) = alarms({"kl": steps(1, 1, 1, 0, 2, 2, 2, 2)})
    assert (alarm.since, alarm.until, alarm.value, alarm.is_over) == (5, 8, 2, False)


def test_a_stage_without_steps_alarms_after_the_time_of_the_prometheus_rule() -> None:
    assert no_step(NO_STEP_SECONDS) is None
    assert no_step(NO_STEP_SECONDS + 1).value == NO_STEP_SECONDS + 1
    rules = Path(__file__).parents[3] / "deployment" / "production" / "monitoring.yaml"
    assert f'stage!="machine"}}) > {NO_STEP_SECONDS:.0f}\n' in rules.read_text()


def test_every_rule_says_what_it_means_and_what_to_do() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.condition and rule.meaning and rule.remedy for rule in RULES)


def test_every_rule_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "daily.md").read_text()
    for rule in (*RULES, NO_STEP):
        (row,) = re.findall(rf"^\| {rule.name} \| (.*) \|$", page, flags=re.MULTILINE)
        assert row.endswith(rule.condition)
        assert re.findall(r"`(\w+)`", row) == [*rule.metrics]
