"""`nemo-rl run`: a pipeline by its name, with single settings changed on the command line."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import rich_click
from click.shell_completion import CompletionItem

from tasks.cli.cluster_options import on_a_cluster
from tasks.cli.pipelines import complete_pipelines, current_pipelines

_WORKFLOWS = Path(__file__).resolve().parents[3] / "workflows"


def complete_settings(_context: Any, _parameter: Any, incomplete: str) -> list[CompletionItem]:
    """Completes a recipe by its name or file, or the key of a setting."""
    names = sorted(path.stem for path in (_WORKFLOWS / "recipes").glob(f"{incomplete}*.yaml"))
    keys = [] if not incomplete or "/" in incomplete or "=" in incomplete else _keys(incomplete)
    return [*map(CompletionItem, [*names, *keys]), CompletionItem(incomplete, type="file")]


def _keys(incomplete: str) -> list[str]:
    from nemo_rl_core.errors import ConfigError
    from tasks.cli.recipe.recipe_keys import completions

    try:
        return completions(incomplete)
    except ConfigError:  # no recipe has the section
        return []


@rich_click.command("run")
@click.argument("pipeline", shell_complete=complete_pipelines)
@click.argument(
    "settings", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...", shell_complete=complete_settings
)
@click.option("--dry-run", is_flag=True,
              help="Check everything and show what would run, without training.")  # fmt: skip
@click.option("--print-config", is_flag=True, help="Print the complete recipe as YAML, and exit.")
@click.option("--verbose", "-v", is_flag=True,
              help="Also print KL, length, entropy, truncation, gradient norm and equal "
              "groups.")  # fmt: skip
@click.option("--remote", is_flag=True, help="Run on a Flyte cluster, with the code as it is here.")
@click.option("--wait", is_flag=True, help="With --remote: wait until the run has ended.")
@on_a_cluster
def run(
    pipeline: str,
    settings: tuple[str, ...],
    *,
    dry_run: bool,
    print_config: bool,
    verbose: bool,
    remote: bool,
    wait: bool,
    **cluster: Any,
) -> None:
    """Run PIPELINE in the same way as `pyflyte run workflows/PIPELINE.py`.

    RECIPE is a YAML file or a name that `nemo-rl recipes PIPELINE` lists. KEY=VALUE changes one
    setting: the key with dots between its parts, the value in YAML; `nemo-rl keys` lists them.

        nemo-rl run grpo grpo_arithmetic grpo.learning_rate=1e-4 seed=3

        nemo-rl run sft mine.yaml --dry-run

    PIPELINE is one of convert, distill, dpo, evaluate, grpo, post_train, ppo, regression,
    reward_model, sft and sweep.
    """
    from nemo_rl_core.telemetry.display_lines import VERBOSE
    from tasks.local_run import starting

    _refuse_without_remote(remote=remote)
    _refuse_unknown(pipeline, settings)
    if verbose:
        os.environ[VERBOSE] = "1"
    starting.begin_line()
    try:
        from tasks.cli.recipe.run_settings import chosen_pipeline, show_dry_run, yaml_of

        chosen = chosen_pipeline(pipeline, settings, pipelines=current_pipelines())
    finally:
        starting.end_line()
    if print_config:
        click.echo(yaml_of(chosen.recipe), nl=False)
    if dry_run:
        show_dry_run(chosen)
    if print_config or dry_run:
        return
    if remote:
        from tasks.planning.weights_pod import refuse_small_pods

        refuse_small_pods(chosen.recipe)
        _launch(pipeline, chosen.values, wait=wait, **cluster)
    else:
        from flytekit.clis.sdk_in_container.pyflyte import main

        _as_pyflyte(main, pipeline, chosen.values)


def _refuse_unknown(pipeline: str, settings: Sequence[str]) -> None:
    """Refuses unknown names before the imports of the pipeline, which take seconds."""
    from tasks.recipes.recipe_file import with_base

    current_pipelines().refuse_unknown(pipeline)
    if settings and "=" not in settings[0]:
        with_base({"recipe": settings[0]})


def _refuse_without_remote(*, remote: bool) -> None:
    context = click.get_current_context()
    command_line = click.core.ParameterSource.COMMANDLINE
    options = {
        "wait": "--wait",
        "config": "--flyte-config",
        "project": "--project",
        "domain": "--domain",
    }
    remote_options = [
        option
        for name, option in options.items()
        if context.get_parameter_source(name) is command_line
    ]
    if remote_options and not remote:
        raise click.UsageError(
            f"{', '.join(remote_options)}: only for a run on a cluster; add --remote"
        )


def _launch(
    pipeline: str,
    values: dict[str, Any],
    *,
    wait: bool,
    config: Path | None,
    project: str,
    domain: str,
) -> None:
    """Registers and launches the pipeline in the same way as `pyflyte run --remote`.

    All code is uploaded: stages import most of it in their functions, so the modules that are
    imported here are not enough.
    """
    import rich_click
    from flytekit.clis.sdk_in_container.pyflyte import main
    from flytekit.configuration import Config

    from tasks.flyte.code_secrets import CHECKOUT, refuse_secrets
    from tasks.flyte.flyte_answers import explained_answers
    from tasks.pods.registry import refuse_missing_registry

    endpoint = Config.auto(str(config) if config else None).platform.endpoint
    refuse_missing_registry(endpoint)
    refuse_secrets(CHECKOUT)
    client = [] if config is None else ["--config", str(config)]
    waits = ["--wait"] if wait else []
    flags = ["--remote", *waits, "--copy", "all", "--project", project, "--domain", domain]
    # Calls the part of pyflyte that does not print an error's traceback and exit.
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
    """Calls `pyflyte run`, and sets `sys.argv`, which the record of the run contains, to that."""
    import sys

    from tasks.local_run.command_help import patch_recipe_options

    patch_recipe_options()
    workflow = current_pipelines()[pipeline]
    config = ["--config", json.dumps(values)]
    file = str(_WORKFLOWS / f"{pipeline}.py")
    sys.argv = ["pyflyte", *client, "run", *flags, file, workflow, *config]
    # Errors are shown by this group, in the same form as those of other commands.
    exit_code = main.main(args=sys.argv[1:], standalone_mode=False)
    if isinstance(exit_code, int) and exit_code:
        raise SystemExit(exit_code)
