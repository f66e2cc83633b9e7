"""The entry point of `nemo-rl`, which passes the pipelines down to the commands of `tasks/cli`."""

from tasks.cli import command_group
from tasks.cli.pipelines import Pipelines

PIPELINES = Pipelines(
    {
        "convert": "convert_model",
        "distill": "distill",
        "dpo": "dpo",
        "evaluate": "evaluate_model",
        "grpo": "grpo",
        "post_train": "post_train",
        "ppo": "ppo",
        "regression": "check_regression",
        "reward_model": "reward_model",
        "sft": "sft",
        "sweep": "sweep",
    },
    package="workflows",
    cluster_check="workflows.cluster_check:check_cluster",
)

group = command_group(PIPELINES)


def main() -> None:
    """Runs `nemo-rl`."""
    group(prog_name="nemo-rl")
