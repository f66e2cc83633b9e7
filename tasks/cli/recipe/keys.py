"""`nemo-rl keys`: the settings of a section of recipes."""

import json
import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
import rich_click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from tasks.cli.recipe.recipe_keys import Key


def _paths(_context: click.Context, _parameter: object, incomplete: str) -> list[CompletionItem]:
    from tasks.cli.recipe.recipe_keys import completions

    return [CompletionItem(word.rstrip("=.")) for word in completions(incomplete)]


@rich_click.command("keys")
@click.argument("path", metavar="[SECTION]", required=False, shell_complete=_paths)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def keys(path: str | None, *, as_json: bool) -> None:
    """List the keys of SECTION with types and defaults; without one, the sections of recipes.

    SECTION is a path such as grpo or grpo.loss; the path of a single key shows that key. Variants
    of a section, which its kind names, follow the keys that all of them have. Defaults of a
    pretrained model are shown where they differ from those of the small models.

        nemo-rl keys grpo.loss
    """
    from tasks.cli.recipe.recipe_keys import keys_at, pretrained_defaults, top_keys

    tables = keys_at(path) if path else [("", top_keys())]
    pretrained = pretrained_defaults()
    if as_json:
        click.echo(
            json.dumps([_fields(key, kind, pretrained) for kind, ks in tables for key in ks])
        )
        return
    for heading, listed in tables:
        if heading:
            click.secho(f"\n{heading}\n", bold=True)
        for line in _lines([_fields(key, heading, pretrained) for key in listed]):
            click.echo(line)


def _lines(rows: list[dict[str, str]]) -> Iterator[str]:
    """Yields two lines for each key: its default and type, and its meaning."""
    key_width = max((len(row["key"]) for row in rows), default=0)
    for row in rows:
        other = f" (pretrained model: {row['pretrained']})" if row["pretrained"] else ""
        kind = f"{row['type']}; {row['unit']}" if row["unit"] else row["type"]
        key = click.style(f"{row['key']:<{key_width}}", bold=True)
        yield f"{key}  {row['default']}{other}  [{kind}]"
        yield from textwrap.wrap(
            row["meaning"], 76, initial_indent="    ", subsequent_indent="    "
        )


def _fields(key: "Key", heading: str, pretrained: dict[str, object]) -> dict[str, str]:
    fields = {
        "key": key.path,
        "variant": heading,
        "type": key.type_name,
        "unit": key.unit,
        "default": key.default,
        "pretrained": str(pretrained.get(key.path, "")),
        "meaning": re.sub(r"\bNone\b", "null", key.meaning),
    }
    return {name: text.replace("`", "").replace("\\|", "|") for name, text in fields.items()}
