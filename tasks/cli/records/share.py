"""`nemo-rl share`: a run or a comparison as one HTML file."""

from typing import IO
from urllib.parse import urlencode

import click
import rich_click

from tasks.cli.records.names import complete_runs


@rich_click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_runs)
@click.option("--output", type=click.File("wb"),
              help="The file; by default RUN.html, or comparison.html.")  # fmt: skip
def share(runs: tuple[str, ...], output: IO[bytes] | None) -> None:
    """Write RUN, or a comparison of several, as one HTML file.

    The file has charts and completions, opens without a server, and makes no requests. RUN is given
    as in `nemo-rl metrics`; a comparison replaces a sweep by its points.
    """
    from starlette.requests import Request

    from nemo_rl_core.history.queries import History
    from nemo_rl_core.history.results import run_row
    from nemo_rl_core.store.store import Store
    from nemo_rl_core.ui.app import create_app
    from nemo_rl_core.ui.pages import share as pages

    store = Store.default()
    with History(store) as history:
        rows = [run_row(history, name) for name in runs]
    scope = {"type": "http", "app": create_app(store), "path_params": {"execution": rows[0].run}}
    query = urlencode([("run", row.id) for row in rows]).encode()
    is_run = len(rows) == 1 and rows[0].node is None
    page = (pages.run if is_run else pages.comparison)(Request({**scope, "query_string": query}))
    output = output or click.File("wb")(f"{rows[0].run if is_run else 'comparison'}.html")
    output.write(page.body)
    click.echo(f"wrote {output.name}: {len(page.body) / 2**20:.1f} MiB")
