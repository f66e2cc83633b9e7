"""`nemo-rl schedule`: recipes that start on a schedule on a Flyte cluster."""

import json
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
import rich_click

from tasks.cli.cluster_options import as_options, on_a_cluster
from tasks.cli.pipelines import complete_pipelines, current_pipelines
from tasks.cli.recipe.run import complete_settings

if TYPE_CHECKING:
    from tasks.cli.schedules.flyte_schedules import ScheduledRecipe, Schedules


class _AddUnlessNamed(rich_click.RichGroup):
    """Makes `schedule RECIPE CRON` an alias of `schedule add RECIPE CRON`."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the command of that name; any other word is the first argument of `add`."""
        return super().get_command(ctx, cmd_name) or self.commands["add"]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Keeps a recipe among the arguments."""
        if args[0] in self.commands:
            return super().resolve_command(ctx, args)
        return "add", self.commands["add"], args


@rich_click.group(
    "schedule", cls=_AddUnlessNamed, subcommand_metavar="RECIPE CRON [KEY=VALUE]... | COMMAND"
)
def schedule() -> None:
    """Run RECIPE on a cluster at the times of CRON, in UTC, one run at a time.

    RECIPE is a YAML file or the name of one of workflows/recipes; KEY=VALUE changes one setting.
    The workflow must have been registered (`make register`); the recipe is kept in a separate
    launch plan, which is inactive until --activate or `resume`.

        nemo-rl schedule mine.yaml "0 2 * * *" --flyte-config flyte.yaml --activate

    A run on unchanged rows, settings and source finds every stage in the cache and ends at once.

    `nemo-rl schedule add --help` lists these options and the others.
    """


@schedule.command("add")
@click.argument("recipe", shell_complete=complete_settings)
@click.argument("cron")
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_settings)
@click.option("--workflow", "pipeline", metavar="NAME", shell_complete=complete_pipelines,
              help="Pipeline of the recipe; by default the one in the name of the recipe or of its "
              "base recipe.")  # fmt: skip
@click.option("--name", help="Name of the schedule; by default that of the recipe.")
@click.option("--version", help="Version of the registered workflow; by default the latest.")
@click.option("--activate", is_flag=True, help="Start runs from now on.")
@click.option("--notify", metavar="ADDRESSES", envvar="NEMO_RL_NOTIFY",
              help="Mail addresses that Flyte notifies, separated by commas; by default those "
              "of NEMO_RL_NOTIFY.")  # fmt: skip
@click.option("--label", "labels", metavar="KEY=VALUE", multiple=True,
              help="Label of its runs and RayJobs, such as kueue.x-k8s.io/queue-name=training; "
              "may be repeated.")  # fmt: skip
@on_a_cluster
def add(
    recipe: str,
    cron: str,
    settings: tuple[str, ...],
    *,
    version: str | None,
    activate: bool,
    notify: str | None,
    **options: Any,
) -> None:
    """Register a schedule; the word `add` may be left out."""
    from tasks.flyte.schedules import labels_of, next_times

    # Validated before the imports of the workflow.
    times, labels = next_times(cron), labels_of(options.pop("labels"))
    from tasks.cli.schedules.flyte_schedules import planned_schedule

    planned = planned_schedule(
        recipe,
        settings,
        pipelines=current_pipelines(),
        cron=cron,
        pipeline=options.pop("pipeline"),
        name=options.pop("name"),
        notify=notify or "",
        labels=labels,
    )
    schedules = _schedules(options)
    registered = schedules.register(planned, version=version)
    if activate:
        registered = schedules.activate(registered)
    name, labels = registered.name, registered.labels
    click.echo(f"schedule: {name}, {registered.workflow} of version {registered.workflow_version}")
    click.echo("next:     " + ", ".join(f"{time:%Y-%m-%d %H:%M}" for time in times) + " UTC")
    if labels:
        click.echo("labels:   " + ", ".join(f"{key}={value}" for key, value in labels.items()))
    resume = shlex.join(["nemo-rl", "schedule", "resume", name, *as_options(**options)])
    click.echo("state:    active" if registered.active else f"state:    paused; to start: {resume}")


@schedule.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@on_a_cluster
def list_(*, as_json: bool, **cluster: Any) -> None:
    """List the schedules of a project and domain, those of launch_plans.py among them."""
    schedules = _schedules(cluster).schedules()
    if as_json:
        click.echo(json.dumps([asdict(each) for each in schedules]))
        return
    if not schedules:
        click.echo("no schedules")
    for each in schedules:
        click.echo(_row(each))


@schedule.command("pause")
@click.argument("name")
@on_a_cluster
def pause(name: str, **cluster: Any) -> None:
    """Stop starting runs of schedule NAME; a run that has started continues."""
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
    from tasks.cli.schedules.flyte_schedules import Schedules

    return Schedules.of(cluster["config"], project=cluster["project"], domain=cluster["domain"])


def _row(each: "ScheduledRecipe") -> str:
    from tasks.flyte.schedules import next_times

    if each.active:
        (time,) = next_times(each.cron, count=1)
        state = f"next {time:%Y-%m-%d %H:%M} UTC"
    else:
        state = "paused"
    labels = "".join(f"  {key}={value}" for key, value in each.labels.items())
    return f"{each.name:<28}{each.cron:<27}{each.workflow:<32}{state}{labels}"
