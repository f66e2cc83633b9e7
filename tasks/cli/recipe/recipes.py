"""`nemo-rl recipes`: the pipelines, and the recipes that are part of the project."""

import json
from collections.abc import Iterator

import click
import rich_click

from tasks.cli.pipelines import complete_pipelines, current_pipelines


@rich_click.command("recipes")
@click.argument("pipeline", required=False, shell_complete=complete_pipelines)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def recipes(pipeline: str | None, *, as_json: bool) -> None:
    """List the recipes of PIPELINE, or those of all pipelines, with a sentence on each.

    nemo-rl recipes grpo
    """
    from nemo_rl_core.telemetry.console import console_on
    from tasks.cli.recipe.recipe_pipeline import pipeline_of
    from tasks.recipes.recipe_file import RECIPES

    pipelines = current_pipelines()
    if pipeline is not None:
        pipelines.refuse_unknown(pipeline)
    rows = [
        {
            "pipeline": name,
            "recipe": path.stem,
            "about": " ".join(_comment(path.read_text())).partition(". ")[0].rstrip("."),
        }
        for path in sorted(RECIPES.glob("*.yaml"))
        if (name := pipeline_of(path.stem, pipelines)) == (pipeline or name)
    ]
    rows.sort(key=lambda row: (row["pipeline"], row["recipe"]))
    if as_json:
        click.echo(json.dumps(rows))
        return
    from rich import box
    from rich.table import Table

    table = Table(*rows[0], box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row.values())
    console = console_on()
    console.print(table)
    console.print(f"nemo-rl run {rows[0]['pipeline']} {rows[0]['recipe']} --dry-run", markup=False)


def _comment(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.startswith("#"):
            return
        yield line.removeprefix("#").strip()
