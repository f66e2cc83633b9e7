"""`nemo-rl preview`: a row of data or of a recipe, with its trained tokens marked."""

import re
import sys
from pathlib import Path
from typing import get_args

import click
import rich_click

from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.config.row_policy import MaskKind, RowPolicy
from nemo_rl_core.errors import DataError
from tasks.cli.pipelines import current_pipelines
from tasks.cli.recipe.recipe_pipeline import is_shipped
from tasks.cli.recipe.run import complete_settings


@rich_click.command()
@click.argument("data", metavar="DATA_OR_RECIPE", shell_complete=complete_settings)
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_settings)
@click.option("--model", type=click.Path(path_type=Path),
              help="A folder with the tokenizer; by default the model of the recipe.")  # fmt: skip
@click.option("--row", type=int, default=0, show_default=True, help="Counted from 0.")
@click.option("--mask", type=click.Choice(get_args(MaskKind)), default="all_assistant_turns",
              show_default=True, help="Which turns are trained on.")  # fmt: skip
@click.option("--columns", multiple=True, metavar="YOURS=NAME",
              help="A column and the name to read it as, such as query=prompt; may be "
              "repeated.")  # fmt: skip
def preview(
    data: str,
    settings: tuple[str, ...],
    *,
    model: Path | None,
    row: int,
    mask: MaskKind,
    columns: tuple[str, ...],
) -> None:
    """Show one row as the model receives it.

    DATA is a file, a folder, a hub name, reasoning_gym:TASK or arithmetic. A RECIPE is a YAML file
    or the name of one of workflows/recipes, with KEY=VALUE to change a setting: its rows are read
    with its columns, templates and mask. Trained tokens are between ⟦ and ⟧; ⏹ follows each
    end-of-sequence token.
    """
    is_unknown = model is None and not (
        Path(data).exists() or re.search("[/:.]|^arithmetic$", data)
    )
    if data.endswith((".yaml", ".yml")) or is_shipped(data) or is_unknown:
        _refuse_options_of_data()
        from nemo_rl_core.data.preview import LEGEND
        from tasks.cli.recipe.recipe_preview import preview_recipe

        shown = preview_recipe(
            data,
            settings,
            row,
            pipelines=current_pipelines(),
            model=model,
            color=sys.stdout.isatty(),
        )
        click.echo(f"{shown}\n\n{LEGEND}", color=True)
        return
    if settings:
        raise click.UsageError(f"{settings[0]}: only a recipe takes settings")
    if model is None:
        raise click.UsageError("Missing option '--model': a folder with the tokenizer")
    from nemo_rl_core.data.pretrained import load_tokenizer
    from nemo_rl_core.data.preview import LEGEND, read_row, tools_line
    from nemo_rl_core.data.preview import preview as as_text

    row_format = RowFormat.of({"columns": _by_name(columns)}) if columns else None
    try:
        chosen = read_row(data, row, RowPolicy(mask=mask), row_format)
    except DataError as error:
        if "data.columns" not in (error.fix or ""):
            raise
        fix = f"{error.fix}; of this command: --columns YOUR_COLUMN=prompt"
        raise type(error)(error.problem, error.expected, error.got, fix) from error
    text = as_text(chosen, load_tokenizer(model), color=sys.stdout.isatty())
    shown = "\n\n".join([*tools_line(chosen), text, LEGEND])
    click.echo(shown, color=True)  # unchanged, in a pipe too


def _refuse_options_of_data() -> None:
    context = click.get_current_context()
    command_line = click.core.ParameterSource.COMMANDLINE
    names = [
        name for name in ("mask", "columns") if context.get_parameter_source(name) is command_line
    ]
    if names:
        raise click.UsageError(
            f"--{names[0]}: a recipe has it in its section data: data.{names[0]}"
        )


def _by_name(columns: tuple[str, ...]) -> dict[str, str]:
    wrong = next((each for each in columns if not all(each.partition("="))), None)
    if wrong is not None:
        raise click.BadParameter(f"{wrong!r} is not YOURS=NAME, such as query=prompt")
    return {name: target for name, _, target in (each.partition("=") for each in columns)}
