"""Writes pictures of every kind of page of a store, to look at: `python -m tests.ui.pictures`.

Arguments: STORE and FOLDER. Each page is written in light and dark at 1440 and 390 pixels: the list
of runs, every view of the latest run of each workflow and state, the latest artifact of each kind,
its completions, and a comparison.
"""

import argparse
from itertools import product
from pathlib import Path
from typing import Literal

import click
from playwright.sync_api import sync_playwright

from nemo_rl_core.history.queries import History
from nemo_rl_core.store.store import Store
from nemo_rl_core.ui import completions
from nemo_rl_core.ui.pages.executions import TABS
from tests.ui.conftest import _ARGUMENTS, CHROMIUM, served

WIDTHS = (1440, 390)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def pages(store: Store) -> dict[str, str]:
    """Returns the addresses by file name."""
    named = {
        "runs": "/",
        "runs-grouped": "/?group=recipe&sort=-reward",
        "models": "/models",
        "find": "/find?q=reward",
        "not-found": "/executions/none",
        "refused": "/?state=none",
    }
    with History(store) as history:
        runs = history.executions(limit=500).items
        latest = {(run.workflow.rpartition(".")[2], run.state): run.id for run in runs[::-1]}
        for (workflow, state), run in latest.items():
            views = TABS if state == "succeeded" else ("overview", "curves", "log")
            named |= {
                f"{workflow}-{state}-{view}": f"/executions/{run}/{view}".removesuffix("/overview")
                for view in views
            }
        artifacts = {one.kind: one for run in runs[::-1] for one in history.artifacts_of(run.id)}
    named["compare"] = f"/compare?{'&'.join(f'run={run.id}' for run in runs[:3])}"
    for kind, one in artifacts.items():
        address = f"/artifacts/{one.id}"
        named |= {kind: address, f"{kind}-ancestry": f"{address}/ancestry"}
        if completions.has_completions(Path(one.path)):
            named[f"{kind}-completions"] = f"{address}/completions"
            named[f"{kind}-tokens"] = f"{address}/completions?row=0&tint=difference"
            named[f"{kind}-prompt"] = f"{address}/completions?step=all&text=1"
    return named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    store = Store(arguments.store)
    with served(store) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        for width, scheme in product(WIDTHS, SCHEMES):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            for name, path in pages(store).items():
                page.goto(address + path)
                page.wait_for_timeout(200)  # charts and graphs are drawn
                page.screenshot(path=arguments.folder / f"{name}-{scheme}-{width}.png")
                overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
                if overflow > 0:
                    click.echo(f"{name}-{scheme}-{width}: {overflow} px too wide")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
