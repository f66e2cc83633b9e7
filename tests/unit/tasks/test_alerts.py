"""The alerts of `deployment/production/monitoring.yaml`, by Prometheus' own evaluation.

`promtool` is a part of Debian's package `prometheus`; without it only the names of metrics are
checked.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl_core.rollouts.batch import reward_metrics
from nemo_rl_core.telemetry.trackers import metric_name

MONITORING = Path(__file__).resolve().parents[3] / "deployment/production/monitoring.yaml"
PROMTOOL = shutil.which("promtool")
RUN = 'run="r1", recipe="mine"'

needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus"
)


def groups() -> list[dict[str, Any]]:
    (rule,) = [each for each in yaml.safe_load_all(MONITORING.read_text())
               if each["kind"] == "PrometheusRule"]  # fmt: skip
    groups_of_rules: list[dict[str, Any]] = rule["spec"]["groups"]
    return groups_of_rules


def rules() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in groups() for rule in group["rules"]}


def test_alerts_read_metrics_that_a_run_sends() -> None:
    import torch

    ends = {"stage_end_time_seconds", "run_end_time_seconds"}
    sent_names = {"step", "last_step_time_seconds", *ends, *reward_metrics(torch.ones(2))}
    sent = {metric_name(name) for name in sent_names}
    read = {name for rule in rules().values() for name in re.findall(r"nemo_rl_\w+", rule["expr"])}
    assert read == {metric_name(name) for name in sent_names - {"reward_std"}}
    assert read <= sent


def fires(tmp_path: Path, alert: str, series: dict[str, str], minutes: int) -> bool:
    """Whether an alert fires after that many minutes of series with one value per minute."""
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups()}))
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": values} for name, values in series.items()
                ],
                "alert_rule_test": [
                    {"eval_time": f"{minutes}m", "alertname": alert, "exp_alerts": []}
                ],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    assert PROMTOOL is not None
    ran = subprocess.run(
        [PROMTOOL, "test", "rules", "test.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0 or f"alertname: {alert}" in ran.stdout + ran.stderr, ran.stderr
    return ran.returncode != 0


@needs_promtool
def test_prometheus_accepts_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups()}))
    assert PROMTOOL is not None
    subprocess.run([PROMTOOL, "check", "rules", tmp_path / "rules.yaml"], check=True)


STEPS = f'nemo_rl_step{{{RUN}, stage="grpo_iteration"}}'
LAST = f'nemo_rl_last_step_time_seconds{{{RUN}, stage="grpo_iteration"}}'
MACHINE = f'nemo_rl_last_step_time_seconds{{{RUN}, stage="machine"}}'
REWARD = f'nemo_rl_reward{{{RUN}, stage="grpo_iteration"}}'
PENDING = 'kube_pod_status_phase{namespace="nemo-rl-production", pod="p", phase="Pending"}'
GPUS = 'ray_node_gpus_utilization{namespace="n", ray_io_cluster="c", GpuIndex="0"}'


EARLIER = f'nemo_rl_step{{{RUN}, stage="train_sft"}}'
EARLIER_LAST = f'nemo_rl_last_step_time_seconds{{{RUN}, stage="train_sft"}}'


def ended(outcome: str) -> str:
    return f'nemo_rl_run_end_time_seconds{{{RUN}, outcome="{outcome}"}}'


def stage_ended(outcome: str, stage: str = "grpo_iteration") -> str:
    return f'nemo_rl_stage_end_time_seconds{{{RUN}, stage="{stage}", outcome="{outcome}"}}'


def nightly(outcome: str, recipe: str = "nightly_grpo") -> str:
    return f'nemo_rl_run_end_time_seconds{{run="r1", recipe="{recipe}", outcome="{outcome}"}}'


DAYS = 24 * 60


@needs_promtool
@pytest.mark.parametrize(
    ("alert", "series", "minutes", "expected"),
    [
        ("NemoRLRunFailed", {ended("failed"): "_x5 300"}, 9, True),
        ("NemoRLRunFailed", {ended("succeeded"): "_x5 300"}, 9, False),
        # An attempt, which Flyte tries again.
        ("NemoRLRunFailed", {stage_ended("failed"): "_x5 300"}, 9, False),
        ("NemoRLNoStep", {LAST: "0x100", MACHINE: "0+60x100"}, 70, True),
        ("NemoRLNoStep", {LAST: "0+60x100", MACHINE: "0+60x100"}, 70, False),
        ("NemoRLNoStep", {LAST: "0x100"}, 50, False),
        # The process is gone and sends nothing more: that is another alert.
        ("NemoRLNoStep", {LAST: "0x10"}, 90, False),
        ("NemoRLRunVanished", {STEPS: "1+1x20", LAST: "0+60x20"}, 45, True),
        (
            "NemoRLRunVanished",
            {STEPS: "1+1x20", LAST: "0+60x20", stage_ended("failed"): "_x20 1210"},
            45,
            False,
        ),
        ("NemoRLRunVanished", {STEPS: "1+1x60", LAST: "0+60x60"}, 45, False),
        (  # After an earlier stage, which has ended as it should.
            "NemoRLRunVanished",
            {
                **{EARLIER: "1+1x10", EARLIER_LAST: "0+60x10"},
                stage_ended("succeeded", "train_sft"): "_x10 610",
                **{STEPS: "_x12 1+1x10", LAST: "_x12 720+60x10"},
            },
            47,
            True,
        ),
        (  # After an earlier attempt at the stage, which has failed.
            "NemoRLRunVanished",
            {
                STEPS: "1+1x10 _x5 5+1x10",
                LAST: "0+60x10 _x5 960+60x10",
                stage_ended("failed"): "_x10 610",
            },
            51,
            True,
        ),
        ("NemoRLNoGoodRun", {nightly("succeeded"): "_x60 3600"}, 26 * 60 + 50, False),
        ("NemoRLNoGoodRun", {nightly("succeeded"): "_x60 3600"}, 27 * 60 + 10, True),
        ("NemoRLNoGoodRun", {nightly("succeeded"): "_x60 3600"}, 7 * DAYS, True),
        (
            "NemoRLNoGoodRun",
            {nightly("succeeded"): f"_x60 3600 _x{DAYS} 90060"},
            27 * 60 + 10,
            False,
        ),
        (
            "NemoRLNoGoodRun",
            {nightly("succeeded"): "_x60 3600", nightly("failed"): f"_x{DAYS + 60} 90000"},
            27 * 60 + 10,
            True,
        ),
        ("NemoRLNoGoodRun", {nightly("succeeded", "by_hand"): "_x60 3600"}, 30 * 60, False),
        ("NemoRLRewardFalls", {REWARD: "0.8x150 0.5x90"}, 230, True),
        ("NemoRLRewardFalls", {REWARD: "0.8x150 0.75x90"}, 230, False),
        ("NemoRLRewardFalls", {REWARD: "0.1+0.002x240"}, 230, False),
        ("NemoRLPodPending", {PENDING: "1x20"}, 18, True),
        ("NemoRLPodPending", {PENDING: "1x10 0x20"}, 18, False),
        ("NemoRLPodPending", {PENDING.replace("nemo-rl-", "kube-"): "1x20"}, 18, False),
        ("NemoRLGPUsIdle", {GPUS: "0x60"}, 40, True),
        ("NemoRLGPUsIdle", {GPUS: "60x60"}, 40, False),
    ],
)
def test_an_alert_fires_when_it_should(
    tmp_path: Path, alert: str, series: dict[str, str], minutes: int, *, expected: bool
) -> None:
    assert fires(tmp_path, alert, series, minutes) is expected
