"""`nemo-rl run`: a pipeline by its name, with single settings changed on the command line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from tasks.cli.cluster_options import on_a_cluster
from tasks.cli.pipelines import PIPELINES

_WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"


def _pipelines(_context: Any, _parameter: Any, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in PIPELINES if name.startswith(incomplete)]


def _recipes(_context: Any, _parameter: Any, incomplete: str) -> list[CompletionItem]:
    names = sorted(path.stem for path in (_WORKFLOWS / "recipes").glob(f"{incomplete}*.yaml"))
    return [*map(CompletionItem, names), CompletionItem(incomplete, type="file")]


@click.command("run")
@click.argument("pipeline", shell_complete=_pipelines)
@click.argument("settings", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...", shell_complete=_recipes)
@click.option("--dry-run", is_flag=True,
              help="Check all, show what would run, and train nothing.")  # fmt: skip
@click.option("--print-config", is_flag=True, help="Print the whole recipe as YAML, and end.")
@click.option("--remote", is_flag=True, help="Run on a Flyte cluster, with the code as it is here.")
@click.option("--wait", is_flag=True, help="With --remote: until the run has ended.")
@on_a_cluster
def run(
    pipeline: str,
    settings: tuple[str, ...],
    *,
    dry_run: bool,
    print_config: bool,
    remote: bool,
    wait: bool,
    **cluster: Any,
) -> None:
    """Run PIPELINE as `pyflyte run workflows/PIPELINE.py` does.

    RECIPE is a YAML file or the name of one of workflows/recipes. KEY=VALUE changes one setting of
    it: the key with dots between its parts, the value in YAML.

        nemo-rl run grpo grpo_arithmetic grpo.learning_rate=1e-4 seed=3
    """
    from tasks.platform import starting

    _refuse_without_remote(remote=remote)
    starting.begin_line()
    try:
        from tasks.cli.run_settings import chosen_pipeline, show_dry_run, yaml_of

        chosen = chosen_pipeline(pipeline, settings, pipelines=PIPELINES)
    finally:
        starting.end_line()
    if print_config:
        click.echo(yaml_of(chosen.recipe), nl=False)
    if dry_run:
        show_dry_run(chosen)
    if print_config or dry_run:
        return
    if remote:
        from tasks.platform.weights_pod import refuse_small_pods

        refuse_small_pods(chosen.recipe)
        _launch(pipeline, chosen.values, wait=wait, **cluster)
    else:
        from flytekit.clis.sdk_in_container.pyflyte import main

        _as_pyflyte(main, pipeline, chosen.values)


def _refuse_without_remote(*, remote: bool) -> None:
    context = click.get_current_context()
    given = click.core.ParameterSource.COMMANDLINE
    names = ("wait", "config", "project", "domain")
    alone = [f"--{name}" for name in names if context.get_parameter_source(name) is given]
    if alone and not remote:
        raise click.UsageError(f"{', '.join(alone)}: only for a run on a cluster; add --remote")


def _launch(
    pipeline: str,
    values: dict[str, Any],
    *,
    wait: bool,
    config: Path | None,
    project: str,
    domain: str,
) -> None:
    """Registers and launches the pipeline as `pyflyte run --remote` does.

    All of the code travels: stages import most of it within their bodies, so that what is imported
    here is not what they need.
    """
    import rich_click
    from flytekit.clis.sdk_in_container.pyflyte import main
    from flytekit.configuration import Config

    from tasks.platform.code_secrets import CHECKOUT, refuse_secrets
    from tasks.platform.flyte_answers import explained_answers
    from tasks.platform.registry import refuse_missing_registry

    endpoint = Config.auto(str(config) if config else None).platform.endpoint
    refuse_missing_registry(endpoint)
    refuse_secrets(CHECKOUT)
    client = [] if config is None else ["--config", str(config)]
    waits = ["--wait"] if wait else []
    flags = ["--remote", *waits, "--copy", "all", "--project", project, "--domain", domain]
    # Without the part of pyflyte that prints an error's trace and exits.
    pyflyte = rich_click.RichGroup(
        main.name, commands=main.commands, params=main.params, callback=main.callback
    )
    with explained_answers(
        "the run cannot be launched, or waited for,",
        endpoint,
        project=project,
        domain=domain,
        what="workflows and executions",
    ):
        _as_pyflyte(pyflyte, pipeline, values, client=client, flags=flags)


def _as_pyflyte(
    main: click.Group,
    pipeline: str,
    values: dict[str, Any],
    *,
    client: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> None:
    """Goes on as `pyflyte run`, which the run's record then names as its command."""
    import sys

    config = ["--config", json.dumps(values)]
    file = str(_WORKFLOWS / f"{pipeline}.py")
    sys.argv = ["pyflyte", *client, "run", *flags, file, PIPELINES[pipeline], *config]
    main.main(args=sys.argv[1:])
