"""The entry point of `nemo-rl`, which passes the pipelines down to the commands of `tasks/cli`."""

from tasks.cli import command_group
from tasks.cli.pipelines import Pipelines

PIPELINES = Pipelines(
    {
        "convert": "convert_model",
        "evaluate": "evaluate_model",
        "post_train": "post_train",
        "regression": "check_regression",
        "sweep": "sweep",
    },
    package="workflows",
    cluster_check="workflows.cluster_check:check_cluster",
)

group = command_group(PIPELINES)


def main() -> None:
    """Runs `nemo-rl`."""
    group(prog_name="nemo-rl")
