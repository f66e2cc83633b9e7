"""`nemo-rl preview`: a row of data with its trained tokens marked."""

import sys
from pathlib import Path
from typing import get_args

import click

from nemo_rl_core.config.data import MaskKind, RowPolicy


@click.command()
@click.argument("data")
@click.option("--model", type=click.Path(path_type=Path), required=True,
              help="A folder with the tokenizer.")  # fmt: skip
@click.option("--row", type=int, default=0, show_default=True, help="Counted from 0.")
@click.option("--mask", type=click.Choice(get_args(MaskKind)), default="all_assistant_turns",
              show_default=True, help="Which turns are trained on.")  # fmt: skip
def preview(data: str, model: Path, row: int, mask: MaskKind) -> None:
    """Show the trained tokens of one row.

    DATA is a file, a folder, a hub name, reasoning_gym:TASK or arithmetic. Trained tokens are
    between ⟦ and ⟧, and ⏹ follows each end-of-sequence token.
    """
    from nemo_rl_core.data.pretrained import load_tokenizer
    from nemo_rl_core.data.preview import LEGEND, read_row
    from nemo_rl_core.data.preview import preview as as_text

    chosen = read_row(data, row, RowPolicy(mask=mask))
    shown = as_text(chosen, load_tokenizer(model), colour=sys.stdout.isatty())
    click.echo(f"{shown}\n\n{LEGEND}", color=True)  # unchanged, in a pipe too
