"""`nemo-rl schedule`: recipes that start by themselves on a Flyte cluster."""

import json
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from tasks.cli.cluster_options import as_options, on_a_cluster

if TYPE_CHECKING:
    from tasks.cli.flyte_schedules import ScheduledRecipe, Schedules


class _AddUnlessNamed(click.Group):
    """`schedule RECIPE CRON` is `schedule add RECIPE CRON`."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name; what names none begins the arguments of `add`."""
        return super().get_command(ctx, cmd_name) or self.commands["add"]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Leaves a recipe among the arguments."""
        if args[0] in self.commands:
            return super().resolve_command(ctx, args)
        return "add", self.commands["add"], args


@click.group("schedule", cls=_AddUnlessNamed, subcommand_metavar="RECIPE CRON [KEY=VALUE]... | "
             "COMMAND")  # fmt: skip
def schedule() -> None:
    """Run RECIPE on a cluster whenever CRON says, in UTC, one run at a time.

    RECIPE is a YAML file or the name of one of workflows/recipes; KEY=VALUE changes one setting.
    The workflow must have been registered (`make register`); the recipe is kept in a launch plan of
    its own, which is inactive until --activate or `resume`.

        nemo-rl schedule mine.yaml "0 2 * * *" --config flyte.yaml --activate
    """


@schedule.command("add")
@click.argument("recipe")
@click.argument("cron")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--workflow", "pipeline", metavar="NAME",
              help="The pipeline that the recipe is for; by default the one that it or the recipe "
              "that it begins with is called after.")  # fmt: skip
@click.option("--name", help="Of the schedule; by default that of the recipe.")
@click.option("--version", help="Of the registered workflow; by default the latest.")
@click.option("--activate", is_flag=True, help="Start runs from now on.")
@click.option("--notify", metavar="ADDRESSES", envvar="NEMO_RL_NOTIFY",
              help="Mail addresses, with commas, that Flyte tells how a run ends; by default those "
              "of NEMO_RL_NOTIFY.")  # fmt: skip
@click.option("--label", "labels", metavar="KEY=VALUE", multiple=True,
              help="Of its runs and their RayJobs, such as kueue.x-k8s.io/queue-name=training; may "
              "be repeated.")  # fmt: skip
@on_a_cluster
def add(
    recipe: str,
    cron: str,
    settings: tuple[str, ...],
    *,
    pipeline: str | None,
    name: str | None,
    version: str | None,
    activate: bool,
    notify: str | None,
    **cluster: Any,
) -> None:
    """Register a schedule; the word `add` may be left out."""
    from tasks.platform.schedules import labels_of, next_times

    times, labels = (
        next_times(cron),
        labels_of(cluster.pop("labels")),
    )  # before a workflow's imports
    from tasks.cli.flyte_schedules import planned_schedule

    planned = planned_schedule(
        recipe,
        settings,
        cron=cron,
        pipeline=pipeline,
        name=name,
        notify=notify or "",
        labels=labels,
    )
    schedules = _schedules(cluster)
    found = schedules.register(planned, version=version)
    if activate:
        found = schedules.activate(found)
    click.echo(f"schedule: {found.name}, {found.workflow} of version {found.workflow_version}")
    click.echo("next:     " + ", ".join(f"{time:%Y-%m-%d %H:%M}" for time in times) + " UTC")
    if found.labels:
        click.echo("labels:   " + ", ".join(f"{key}={val}" for key, val in found.labels.items()))
    resume = shlex.join(["nemo-rl", "schedule", "resume", found.name, *as_options(**cluster)])
    click.echo("state:    active" if found.active else f"state:    paused; to start: {resume}")


@schedule.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@on_a_cluster
def list_(*, as_json: bool, **cluster: Any) -> None:
    """List the schedules of a project and domain, those of launch_plans.py among them."""
    found = _schedules(cluster).found()
    if as_json:
        click.echo(json.dumps([asdict(each) for each in found]))
        return
    if not found:
        click.echo("no schedules")
    for each in found:
        click.echo(_row(each))


@schedule.command("pause")
@click.argument("name")
@on_a_cluster
def pause(name: str, **cluster: Any) -> None:
    """Start no more runs of schedule NAME; one that runs goes on."""
    paused = _schedules(cluster).pause(name)
    click.echo(f"{paused.name} is paused")


@schedule.command("resume")
@click.argument("name")
@on_a_cluster
def resume(name: str, **cluster: Any) -> None:
    """Start runs of the latest version of schedule NAME."""
    schedules = _schedules(cluster)
    click.echo(_row(schedules.activate(schedules.latest(name))))


def _schedules(cluster: dict[str, Any]) -> "Schedules":
    from tasks.cli.flyte_schedules import Schedules

    return Schedules.of(cluster["config"], project=cluster["project"], domain=cluster["domain"])


def _row(each: "ScheduledRecipe") -> str:
    from tasks.platform.schedules import next_times

    if each.active:
        (time,) = next_times(each.cron, count=1)
        state = f"next {time:%Y-%m-%d %H:%M} UTC"
    else:
        state = "paused"
    labels = "".join(f"  {key}={value}" for key, value in each.labels.items())
    return f"{each.name:<28}{each.cron:<16}{each.workflow:<32}{state}{labels}"
