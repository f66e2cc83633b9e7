"""Writes the README's screenshots of the page: `python tests/ui/screenshots.py STORE FOLDER`.

STORE holds an asynchronous GRPO run, a synchronous one, and the rerun of the latter. The pictures
are in `deployment/screenshots/`, which is not part of the installed package.
"""

import argparse
import socket
import threading
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from nemo_rl_core.history.queries import History
from nemo_rl_core.store.store import Store
from nemo_rl_core.ui.app import create_app
from nemo_rl_core.ui.server import create_server

CHROMIUM = Path("/usr/bin/chromium")
WIDTH, HEIGHT = 1180, 760


def pictures(store: Store) -> dict[str, tuple[str, str]]:
    """Returns the page's path and the color scheme by file name."""
    with History(store) as history:
        rerun, first, ahead = history.executions(workflow="grpo", limit=3).items
        exports = [one for one in history.artifacts_of(first.id) if one.stage == "export"]
        training = [a for a in history.artifacts_of(first.id) if a.stage.startswith("grpo_iter")]
    return {
        "executions": ("/", "light"),
        "graph": (f"/executions/{first.id}/graph", "light"),
        "timeline": (f"/executions/{rerun.id}/timeline", "dark"),
        "curves": (f"/executions/{first.id}/curves", "dark"),
        "compare": (f"/compare?run={first.id}&run={ahead.id}&metric=reward", "light"),
        "ancestry": (f"/artifacts/{exports[0].id}/ancestry", "light"),
        "completions": (f"/artifacts/{training[-1].id}/completions?order=best", "light"),
    }


def write(browser: Browser, address: str, store: Store, folder: Path) -> None:
    """Writes one PNG per page."""
    for name, (path, scheme) in pictures(store).items():
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
        page.goto(address + path)
        page.wait_for_load_state("networkidle")
        if name == "compare":  # below the differences
            page.get_by_text("grpo_iteration: reward").first.scroll_into_view_if_needed()
            page.mouse.wheel(0, HEIGHT // 2)
            page.wait_for_timeout(300)
        # Hide the path of the store on this machine.
        page.evaluate("document.querySelector('.foot .mono').textContent = '~/.nemo_rl'")
        page.screenshot(path=folder / f"{name}.png")
        page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    store = Store(arguments.store)
    with socket.create_server(("127.0.0.1", 0)) as listener, sync_playwright() as playwright:
        server = create_server(create_app(store))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        arguments_of_browser = ["--headless", "--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments_of_browser)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        write(browser, address, store, arguments.folder)
        browser.close()
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
