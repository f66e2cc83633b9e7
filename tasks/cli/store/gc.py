"""`nemo-rl gc`: free disk."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import rich_click

from nemo_rl_core.history.labels import set_pin
from nemo_rl_core.maintenance.collect import Plan, make_plan, remove
from nemo_rl_core.maintenance.disk import allocated
from nemo_rl_core.maintenance.retention import RetentionPolicy
from nemo_rl_core.maintenance.survey import find_run
from nemo_rl_core.store.store import Store
from tasks.cli.records.names import complete_runs
from tasks.cli.store.units import Age, Size, show_bytes


@rich_click.command()
@click.option("--keep-runs", type=click.IntRange(min=0), help="Keep this many of the newest runs.")
@click.option("--older-than", type=Age(), help="Remove only runs older than this, such as 30d.")
@click.option("--max-size", type=Size(), help="Then remove the oldest runs until the store fits.")
@click.option("--work-older-than", type=Age(), default="14d", show_default=True,
              help="Remove leftovers of killed runs older than this.")  # fmt: skip
@click.option("--pin", metavar="RUN", multiple=True, shell_complete=complete_runs,
              help="Keep this run at any age.")  # fmt: skip
@click.option("--unpin", metavar="RUN", multiple=True, shell_complete=complete_runs,
              help="Remove a pin.")  # fmt: skip
@click.option("--dry-run", "-n", is_flag=True, help="Show the plan; remove nothing.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def gc(*, pin: tuple[str, ...], unpin: tuple[str, ...], **options: Any) -> None:
    """Free disk: remove artifacts that no kept run needs.

    Without options, removes artifacts of runs without folders, and leftovers of killed runs. With
    --keep-runs and --older-than, also removes runs beyond that number AND older than that age,
    except pinned and running ones. An artifact is kept while a kept run made or used it or one of
    its descendants.

    Records of removed runs stay in the history; models/ is never touched.
    """
    store = Store.default()
    if pin or unpin:
        _pin(store, pin, unpin)
        return
    policy = RetentionPolicy(
        keep_runs=options["keep_runs"],
        older_than_seconds=options["older_than"],
        max_bytes=options["max_size"],
        work_older_than_seconds=options["work_older_than"],
    )
    _collect(store, policy, **{key: options[key] for key in ("dry_run", "yes", "as_json")})


def _pin(store: Store, pin: tuple[str, ...], unpin: tuple[str, ...]) -> None:
    for name in pin:
        folder = find_run(store, name)
        set_pin(store, folder.name, pinned=True)
        click.echo(f"pinned {folder.name}")
    for name in unpin:
        folder = find_run(store, name)
        set_pin(store, folder.name, pinned=False)
        click.echo(f"unpinned {folder.name}")


def _collect(
    store: Store, policy: RetentionPolicy, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    if not store.root.is_dir():
        click.echo(json.dumps({}) if as_json else f"there is no store at {store.root}")
        return
    if not (dry_run or yes or sys.stdin.isatty()):
        raise click.UsageError("no terminal for a confirmation: pass --yes or --dry-run")
    plan = make_plan(store, policy)
    in_use: tuple[str, ...] = ()
    if not as_json:
        _show(store, plan)
    removes = not (dry_run or plan.is_empty)
    if removes and not yes:
        click.confirm(f"Remove these, and free {show_bytes(plan.freed_bytes)}?", abort=True)
    if not dry_run:
        from tasks.flyte.flyte_cache import drop_dangling  # imports protobuf

        done = remove(store, policy, plan)
        plan, in_use = done.plan, done.in_use
        drop_dangling(store)
    left = plan.num_bytes - plan.freed_bytes
    too_big = policy.max_bytes is not None and left > policy.max_bytes
    if as_json:
        fields = asdict(plan) | {"dry_run": dry_run, "in_use": in_use, "left_bytes": left}
        click.echo(json.dumps(fields, default=str, indent=1))
    elif removes:
        click.echo(f"freed {show_bytes(plan.freed_bytes)}; {show_bytes(left)} left")
        for name in in_use:
            click.echo(f"kept, since a run has started to use it: {name}")
    if too_big:
        click.echo(f"the store still takes {show_bytes(left)}: the rest is pinned, in use, "
                   "of unfinished runs, or models/", err=True)  # fmt: skip
        raise SystemExit(1)


def _show(store: Store, plan: Plan) -> None:
    if plan.problem:
        click.echo(f"all runs and artifacts stay: {plan.problem}", err=True)
        click.echo("  fix: `nemo-rl verify` finds the problem of the store", err=True)
    paths: dict[str, list[Path]] = {
        "run": [store.runs / name for name in plan.runs],
        "artifact": [store.artifacts / name for name in plan.artifacts],
        "work": [store.work / name for name in plan.work],
        "leftover": list(plan.leftovers),
    }
    for word, found in paths.items():
        for path in found:
            click.echo(f"{word:<9} {show_bytes(allocated(path)):>9}  {path.name}")
    total = show_bytes(plan.num_bytes)
    if plan.is_empty:
        click.echo(f"nothing to remove; the store takes {total}")
    else:
        click.echo(f"that is {show_bytes(plan.freed_bytes)} of {total}")
