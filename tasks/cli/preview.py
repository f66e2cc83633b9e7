"""`nemo-rl preview`: a row of data with its trained tokens marked."""

import sys
from pathlib import Path
from typing import get_args

import click

from nemo_rl_core.config.row_format import RowFormat
from nemo_rl_core.config.row_policy import MaskKind, RowPolicy
from nemo_rl_core.errors import DataError


@click.command()
@click.argument("data")
@click.option("--model", type=click.Path(path_type=Path), required=True,
              help="A folder with the tokenizer.")  # fmt: skip
@click.option("--row", type=int, default=0, show_default=True, help="Counted from 0.")
@click.option("--mask", type=click.Choice(get_args(MaskKind)), default="all_assistant_turns",
              show_default=True, help="Which turns are trained on.")  # fmt: skip
@click.option("--columns", multiple=True, metavar="YOURS=NAME",
              help="A column and what it is read as, such as query=prompt; repeat it for "
              "others.")  # fmt: skip
def preview(data: str, model: Path, row: int, mask: MaskKind, columns: tuple[str, ...]) -> None:
    """Show the trained tokens of one row.

    DATA is a file, a folder, a hub name, reasoning_gym:TASK or arithmetic. Trained tokens are
    between ⟦ and ⟧, and ⏹ follows each end-of-sequence token.
    """
    from nemo_rl_core.data.pretrained import load_tokenizer
    from nemo_rl_core.data.preview import LEGEND, read_row
    from nemo_rl_core.data.preview import preview as as_text

    form = RowFormat.of({"columns": _by_name(columns)}) if columns else None
    try:
        chosen = read_row(data, row, RowPolicy(mask=mask), form)
    except DataError as error:
        if "data.columns" not in (error.fix or ""):
            raise
        fix = f"{error.fix}; of this command: --columns YOUR_COLUMN=prompt"
        raise type(error)(error.problem, error.expected, error.got, fix) from error
    shown = as_text(chosen, load_tokenizer(model), colour=sys.stdout.isatty())
    click.echo(f"{shown}\n\n{LEGEND}", color=True)  # unchanged, in a pipe too


def _by_name(columns: tuple[str, ...]) -> dict[str, str]:
    wrong = next((each for each in columns if not all(each.partition("="))), None)
    if wrong is not None:
        raise click.BadParameter(f"{wrong!r} is not YOURS=NAME, such as query=prompt")
    return {name: target for name, _, target in (each.partition("=") for each in columns)}
