"""What runs by itself on a cluster, and what a person or a service starts by name.

`deployment/register.sh` registers them; none is active before it is activated (`--activate`).
Mail goes to the addresses in `NEMO_RL_NOTIFY` (separated by commas) at the time of registration.
"""

import os
from typing import Any

from flytekit import CronSchedule, Email, LaunchPlan
from flytekit.models.common import Annotations, Labels, Notification
from flytekit.models.concurrency import ConcurrencyLimitBehavior, ConcurrencyPolicy
from flytekit.models.core.execution import WorkflowExecutionPhase as Phase

from workflows.convert import DEFAULT as CONVERT
from workflows.convert import convert_model
from workflows.evaluate import DEFAULT as EVALUATE
from workflows.evaluate import evaluate_model
from workflows.grpo import DEFAULT as GRPO
from workflows.grpo import grpo
from workflows.regression import DEFAULT as REGRESSION
from workflows.regression import check_regression

NOTIFY = "NEMO_RL_NOTIFY"
"""The variable with the addresses for mail on how scheduled runs end."""

_BAD_ENDS = [Phase.FAILED, Phase.TIMED_OUT, Phase.ABORTED]


def _mail(*phases: int) -> list[Notification]:
    to = [address.strip() for address in os.environ.get(NOTIFY, "").split(",") if address.strip()]
    return [Email(phases=list(phases), recipients_email=to)] if to else []


def _described(purpose: str, text: str) -> dict[str, Any]:
    return {
        "labels": Labels({"app.kubernetes.io/part-of": "nemo-rl-flow", "purpose": purpose}),
        "annotations": Annotations({"nemo-rl-flow/about": text}),
    }


def _on_schedule(cron: str, *told: int) -> dict[str, Any]:
    """By itself, with mail of those ends; passed over where the last run has not ended yet."""
    one_at_a_time = ConcurrencyPolicy(max_concurrency=1, behavior=ConcurrencyLimitBehavior.SKIP)
    return {
        "schedule": CronSchedule(schedule=cron),
        "notifications": _mail(*told),
        "max_parallelism": 4,
        "concurrency": one_at_a_time,
    }


nightly_grpo = LaunchPlan.create(
    "nightly_grpo",
    grpo,
    fixed_inputs={"config": GRPO},
    **_on_schedule("0 2 * * *", Phase.SUCCEEDED, *_BAD_ENDS),
    **_described("nightly", "The main job from nothing to a promoted model, every night at 02:00"),
)

weekly_evaluation = LaunchPlan.create(
    "weekly_evaluation",
    evaluate_model,
    default_inputs={"config": EVALUATE},
    **_on_schedule("0 6 * * 1", *_BAD_ENDS),
    **_described("evaluation", "The figures of a model, every Monday at 06:00"),
)

weekly_regression_check = LaunchPlan.create(
    "weekly_regression_check",
    check_regression,
    default_inputs={"config": REGRESSION},
    **_on_schedule("0 8 * * 1", *_BAD_ENDS),
    **_described("regression", "Fails, and says so by mail, where a model is worse than before"),
)

convert_on_demand = LaunchPlan.create(
    "convert_on_demand",
    convert_model,
    default_inputs={"config": CONVERT},
    notifications=_mail(*_BAD_ENDS),
    max_parallelism=8,
    **_described("conversion", "A transformers model as a Megatron checkpoint, with proof"),
)
