"""`nemo-rl promote`: names of models that move, with the record of their moves."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from nemo_rl_core.store.aliases import Alias, Aliases


@click.command("promote")
@click.argument("model", required=False)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--aliases", metavar="PLACE",
              help="A folder, or an address as s3://BUCKET/FOLDER, that several machines share; by "
              "default NEMO_RL_ALIASES, else aliases/ of the store.")  # fmt: skip
@click.option("--history", is_flag=True, help="Show every move, and not the last two.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def promote(
    model: str | None,
    names: tuple[str, ...],
    *,
    aliases: str | None,
    history: bool,
    as_json: bool,
) -> None:
    """Give MODEL each NAME; without a NAME, show what names mean, since when, and meant before.

    MODEL is an artifact by its id, the beginning of its id or hash, its folder, its address in an
    object store, or another name, as in `nemo-rl promote staging production`. A recipe begins with
    what a name means by `model: {name: alias:production}`. To go back, promote the former model.
    """
    from nemo_rl_core.store.aliases import Aliases
    from nemo_rl_core.store.store import Store

    known = Aliases(Store.default(), aliases)
    if names:
        assert model is not None, "click takes the first argument for the model"
        meant = _artifact(known, model)
        shown = [known.move(name, meant) for name in names]
    else:
        shown = [known.get(name) for name in ([model] if model else known.names())]
    if as_json:
        click.echo(json.dumps([asdict(each) for each in shown]))
        return
    if not shown:
        click.echo("no names: nemo-rl promote MODEL NAME")
    for each in shown:
        for line in _lines(each, whole=history):
            click.echo(line)


def _lines(alias: "Alias", *, whole: bool) -> list[str]:
    moves = [*reversed(alias.moves)] if whole else [alias.current, alias.former]
    lines = []
    for place, move in enumerate(moves):
        if move is not None:
            name = alias.name if place == 0 else ""
            word = "since" if place == 0 else "before, since"
            lines.append(f"{name:<16}{move.model}  {word} {move.since}")
    return lines


def _artifact(known: "Aliases", name: str) -> str:
    """The artifact that an argument means: of another name, or as other commands take it."""
    from nemo_rl_core.store import remote
    from nemo_rl_core.store.aliases import PREFIX
    from tasks.cli.model_folder import model_folder

    own = name.removeprefix(PREFIX)
    if own in known.names():
        return known.get(own).current.model
    return name if remote.is_remote(name) else str(model_folder(name))
