"""Examples of launch plans that start on a schedule, or that a service starts by name.

`deployment/register.sh` registers them; none is active before `--activate` names it.
`nemo-rl schedule` registers a launch plan for your recipe. Flyte sends mail to the addresses
that were in `NEMO_RL_NOTIFY` when a plan was registered.
"""

import os

from flytekit import LaunchPlan
from flytekit.models.core.execution import WorkflowExecutionPhase as Phase

from nemo_rl_core.telemetry.notices import mail_addresses
from tasks.flyte.schedules import BAD_ENDS, described, mail, on_schedule
from workflows.collect_garbage import collect_garbage
from workflows.convert import DEFAULT as CONVERT
from workflows.convert import convert_model
from workflows.evaluate import DEFAULT as EVALUATE
from workflows.evaluate import evaluate_model
from workflows.grpo import DEFAULT as GRPO
from workflows.grpo import grpo
from workflows.regression import DEFAULT as REGRESSION
from workflows.regression import check_regression

_TO = mail_addresses(os.environ)

nightly_grpo = LaunchPlan.create(
    "nightly_grpo",
    grpo,
    default_inputs={"config": GRPO},
    **on_schedule("0 2 * * *", _TO, Phase.SUCCEEDED, *BAD_ENDS),
    **described("nightly", "The recipe that it is launched with, every night at 02:00"),
)

weekly_evaluation = LaunchPlan.create(
    "weekly_evaluation",
    evaluate_model,
    default_inputs={"config": EVALUATE},
    **on_schedule("0 6 * * 1", _TO, *BAD_ENDS),
    **described("evaluation", "The metrics of a model, every Monday at 06:00"),
)

weekly_regression_check = LaunchPlan.create(
    "weekly_regression_check",
    check_regression,
    default_inputs={"config": REGRESSION},
    **on_schedule("0 8 * * 1", _TO, *BAD_ENDS),
    **described("regression", "Fails where a model is worse than before"),
)

convert_on_demand = LaunchPlan.create(
    "convert_on_demand",
    convert_model,
    default_inputs={"config": CONVERT},
    notifications=mail(_TO, *BAD_ENDS),
    max_parallelism=8,
    **described("conversion", "A transformers model as a Megatron checkpoint, with proof"),
)

nightly_collection = LaunchPlan.create(
    "nightly_collection",
    collect_garbage,
    default_inputs={"keep_days": 7.0},
    **on_schedule("0 4 * * *", _TO, *BAD_ENDS),
    **described("collection", "Frees the volume of what no stage will use again"),
)
