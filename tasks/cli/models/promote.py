"""`nemo-rl promote`: movable names of models, with a record of their changes."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
import rich_click

from tasks.cli.records.names import complete_artifacts, model_folder

if TYPE_CHECKING:
    from nemo_rl_core.store.aliases import Alias, Aliases


@rich_click.command("promote")
@click.argument("model", required=False, shell_complete=complete_artifacts)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--aliases", metavar="PLACE",
              help="A folder, or an address such as s3://BUCKET/FOLDER, that machines share; "
              "by default NEMO_RL_ALIASES, else aliases/ of the store.")  # fmt: skip
@click.option("--history", is_flag=True, help="Show all changes instead of the last two.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def promote(
    model: str | None, names: tuple[str, ...], *, aliases: str | None, history: bool, as_json: bool
) -> None:
    """Give MODEL each NAME; without a NAME, show the model of each name, now and before.

    MODEL is an artifact by its id, the beginning of its id or hash, its folder, its address in an
    object store, or another name, as in `nemo-rl promote staging production`. A recipe refers to
    a name by `model: {name: alias:production}`. To go back, promote the former model.
    """
    from nemo_rl_core.store.aliases import Aliases
    from nemo_rl_core.store.store import Store

    store_aliases = Aliases(Store.default(), aliases)
    if names:
        assert model is not None, "click takes the first argument for the model"
        meant = _artifact(store_aliases, model)
        shown = [store_aliases.move(name, meant) for name in names]
    else:
        shown = [store_aliases.get(name) for name in ([model] if model else store_aliases.names())]
    if as_json:
        click.echo(json.dumps([asdict(each) for each in shown]))
        return
    if not shown:
        click.echo("no names: nemo-rl promote MODEL NAME")
    for each in shown:
        for line in _lines(each, full=history):
            click.echo(line)


def _lines(alias: "Alias", *, full: bool) -> list[str]:
    moves = [*reversed(alias.moves)] if full else [alias.current, alias.former]
    lines = []
    for index, move in enumerate(moves):
        if move is not None:
            name = alias.name if index == 0 else ""
            word = "since" if index == 0 else "before, since"
            lines.append(f"{name:<16}{move.model}  {word} {move.since}")
    return lines


def _artifact(known: "Aliases", name: str) -> str:
    from nemo_rl_core.store import remote
    from nemo_rl_core.store.aliases import PREFIX

    alias = name.removeprefix(PREFIX)
    if alias in known.names():
        return known.get(alias).current.model
    return name if remote.is_remote(name) else str(model_folder(name))
