"""`nemo-rl cluster-check`: check that a Flyte cluster has what the stages need."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import click
import rich_click

from nemo_rl_core.config.cluster import ClusterConfig
from nemo_rl_core.config.mistakes import describe
from nemo_rl_core.maintenance.doctor.check import Result
from tasks.cli.cluster_options import on_a_cluster
from tasks.cli.machine.check_table import end_checks, show_check
from tasks.cli.pipelines import current_pipelines
from tasks.cli.recipe.run import complete_settings


@rich_click.command("cluster-check")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_settings)
@on_a_cluster
@click.option("--timeout", "timeout_seconds", type=click.FloatRange(min=1), default=1800.0,
              show_default=True, help="Seconds for all checks together.")  # fmt: skip
@click.option("--volume-wait", "wait_seconds", type=click.FloatRange(min=1), default=300.0,
              show_default=True,
              help="Seconds for the two pods of the volume to see each other.")  # fmt: skip
@click.option("--autoscaled", is_flag=True,
              help="Machines are added when pods wait: a lack of large enough machines is only a "
              "warning.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def cluster_check(
    *,
    settings: tuple[str, ...],
    config: Path | None,
    project: str,
    domain: str,
    timeout_seconds: float,
    wait_seconds: float,
    autoscaled: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Check a Flyte cluster before the first run, in the images and pods of the stages.

    Registers a workflow of small checks with the code of this checkout, launches it, and prints a
    line when a check has ended: plain pods, the bucket, the volume from two pods, machines large
    enough for each kind of pod, a RayJob with one training step, GPUs, and notices, which are
    really sent. All checks run, even if others fail. Ctrl-C or the timeout ends the rest and
    prints their last state.

    KEY=VALUE sets a key of a recipe's section `cluster`, for the RayJobs; by default they have no
    GPU:

        nemo-rl cluster-check --flyte-config flyte.yaml shape=node_8gpu accelerator=nvidia-h100

    The exit code is 1 if a check fails, which means that stages cannot run there.
    """
    from pydantic import ValidationError

    from tasks.cli.machine.flyte_cluster_check import CheckRun
    from tasks.cli.recipe.run_settings import changes_of

    changes = changes_of(settings)
    try:
        cluster = ClusterConfig.model_validate(changes)
    except ValidationError as error:
        raise describe(error, changes) from error
    run = CheckRun.start(
        config,
        current_pipelines().cluster_check(),
        project=project,
        domain=domain,
        cluster=cluster,
        wait_seconds=wait_seconds,
        autoscaled=autoscaled,
    )
    if not as_json:
        click.echo(f"execution {run.name} in {project}/{domain} of {run.endpoint}\n")
    lines = []
    with _noted_interrupt() as interrupted:
        for line in run.lines(timeout_seconds=timeout_seconds, interrupted=interrupted):
            lines.append(line)
            if not as_json:
                show_check(line.name, Result(line.state, line.found, line.fix))
    end_checks([line.model_dump() for line in lines], as_json=as_json, execution=run.name)


@contextmanager
def _noted_interrupt() -> Iterator[Event]:
    interrupted = Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
