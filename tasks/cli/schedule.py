"""`nemo-rl schedule`: recipes that start by themselves on a Flyte cluster."""

import json
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from nemo_rl_core.errors import ConfigError
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

    With --on-arrival CRON says when it looks for rows, and only rows that no run has begun with
    start one.

        nemo-rl schedule mine.yaml "*/10 * * * *" --on-arrival --config flyte.yaml --activate

    `nemo-rl schedule add --help` lists these options and the others.
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
@click.option(
    "--on-arrival",
    is_flag=True,
    help="Look for rows at these times, and run the recipe on those that are new.",
)
@click.option(
    "--settled",
    "settled_minutes",
    metavar="MINUTES",
    default=10.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="With --on-arrival: start nothing while an object of the rows is younger than this.",
)
@click.option("--tries", "num_tries", metavar="NUMBER", default=1, show_default=True,
              type=click.IntRange(min=1), help="With --on-arrival: how many runs may fail on the "
              "same rows before only others start one.")  # fmt: skip
@on_a_cluster
def add(
    recipe: str,
    cron: str,
    settings: tuple[str, ...],
    *,
    on_arrival: bool,
    version: str | None,
    activate: bool,
    notify: str | None,
    **options: Any,
) -> None:
    """Register a schedule; the word `add` may be left out."""
    from tasks.platform.schedules import labels_of, next_times

    # Before a workflow's imports.
    times, labels = next_times(cron), labels_of(options.pop("labels"))
    looks = {key: options.pop(key) for key in ("settled_minutes", "num_tries")}
    _refuse_without_arrival(on_arrival=on_arrival)
    from tasks.cli.planned_schedules import Looks, planned_schedule, rows_of

    planned = planned_schedule(
        recipe,
        settings,
        cron=None if on_arrival else cron,
        pipeline=options.pop("pipeline"),
        name=options.pop("name"),
        notify=notify or "",
        labels=labels,
    )
    rows = rows_of(planned) if on_arrival else None
    schedules = _schedules(options)
    if rows is None:
        found = schedules.register(planned, version=version)
    else:
        looked = Looks(cron, rows, notify=notify or "", version=version, **looks)
        found = schedules.register_looks(planned, looked)
    if activate:
        found = schedules.activate(found)
    click.echo(f"schedule: {found.name}, {found.workflow} of version {found.workflow_version}")
    click.echo(
        ("looks:    " if on_arrival else "next:     ")
        + ", ".join(f"{time:%Y-%m-%d %H:%M}" for time in times)
        + " UTC"
    )
    if found.labels:
        click.echo("labels:   " + ", ".join(f"{key}={val}" for key, val in found.labels.items()))
    resume = shlex.join(["nemo-rl", "schedule", "resume", found.name, *as_options(**options)])
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


def _refuse_without_arrival(*, on_arrival: bool) -> None:
    """Raises for options that only a schedule with --on-arrival has.

    Raises:
        ConfigError: For one that was given without it.
    """
    context = click.get_current_context()
    for name, option in (("settled_minutes", "--settled"), ("num_tries", "--tries")):
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if given and not on_arrival:
            raise ConfigError(
                f"{option} is only for a schedule that looks for rows",
                expected=f"--on-arrival beside {option}",
                got=f"{option} alone",
                fix=f"add --on-arrival, or leave out {option}",
            )


def _schedules(cluster: dict[str, Any]) -> "Schedules":
    from tasks.cli.flyte_schedules import Schedules

    return Schedules.of(cluster["config"], project=cluster["project"], domain=cluster["domain"])


def _row(each: "ScheduledRecipe") -> str:
    from tasks.platform.schedules import next_times

    if each.active:
        (time,) = next_times(each.cron, count=1)
        state = f"{'looks' if each.on_arrival else 'next'} {time:%Y-%m-%d %H:%M} UTC"
    else:
        state = "paused"
    cron = f"{each.cron} on arrival" if each.on_arrival else each.cron
    labels = "".join(f"  {key}={value}" for key, value in each.labels.items())
    return f"{each.name:<28}{cron:<27}{each.workflow:<32}{state}{labels}"
