"""Times each page on a store of 1,000 runs and 100,000 nodes, as an answer and in a browser.

`python tests/benchmarks/large_pages.py STORE [--browser] [--repeats 20]`; an empty STORE is filled
first by `large_history.py`.

On two quiet cores in a browser, 9 openings, medians: 41 ms (an artifact looked up) to 79 ms (the
last page of executions). The 95th percentile of so few is an estimate: 147 ms at most, for an
ancestry of 100.
"""

import argparse
import importlib.util
import socket
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click
from starlette.testclient import TestClient

from nemo_rl_core.store.store import Store
from nemo_rl_core.ui.app import create_app
from nemo_rl_core.ui.server import create_server

RUNS, NODES = 1000, 100
CHROMIUM = Path("/usr/bin/chromium")


def fill(store: Store) -> None:
    """Writes the large history."""
    path = Path(__file__).with_name("large_history.py")
    spec = importlib.util.spec_from_file_location("large_history", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.fill(store, num_runs=RUNS, num_nodes=NODES)


def pages() -> dict[str, str]:
    """Returns every page, about the middle of the history."""
    middle = RUNS // 2
    run, other = f"2023{middle:06d}-run", f"2023{middle + 3:06d}-run"
    node = middle * NODES + 2
    last = f"grpo_iteration-{(middle + 1) * NODES:016x}"
    return {
        "executions": "/",
        "executions, last page": f"/?offset={RUNS - 50}",
        "executions, filtered": "/?state=failed&workflow=workflows.grpo.grpo&text=recipe_3",
        "executions, text that none has": "/?text=nowhere",
        "executions, by accuracy": "/?sort=-accuracy",
        "executions, by reward, seeds folded": "/?sort=-reward&group=seed",
        "overview": f"/executions/{run}",
        "graph": f"/executions/{run}/graph",
        "nodes": f"/executions/{run}/nodes",
        "timeline": f"/executions/{run}/timeline",
        "curves": f"/executions/{run}/curves",
        "curves, 5,000 steps": "/executions/2023000000-run/curves",
        "node": f"/nodes/{node}",
        "node, 5,000 steps": "/nodes/2",
        "artifact": f"/artifacts/{last}",
        "ancestry of 100": f"/artifacts/{last}/ancestry",
        "find": f"/find?q={last[:-1]}",
        "find everywhere": "/find?q=recipe_3",
        "models": "/models",
        "log": f"/executions/{run}/log",
        "compare": f"/compare?run={run}&run={other}",
    }


def response_times(store: Store, repeats: int) -> dict[str, list[float]]:
    """Returns milliseconds of each answer, without a network."""
    client = TestClient(create_app(store), base_url="http://localhost", follow_redirects=False)

    def ask(path: str) -> None:
        assert client.get(path).status_code in (200, 303), path

    return _times(ask, repeats)


def load_times(store: Store, repeats: int) -> dict[str, list[float]]:
    """Returns milliseconds until a browser has loaded each page, including its graph if any."""
    from playwright.sync_api import sync_playwright

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = create_server(create_app(store))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with sync_playwright() as playwright:
            arguments = ["--headless", "--no-sandbox", "--disable-gpu"]
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
            page = browser.new_page()
            times = _times(lambda path: page.goto(address + path, wait_until="load"), repeats)
            browser.close()
        server.should_exit = True
        thread.join()
    return times


def _times(act: Callable[[str], object], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for name, path in pages().items():
        act(path)  # the first time compiles templates and fills SQLite's cache
        for _ in range(repeats):
            began = time.perf_counter()
            act(path)
            times.setdefault(name, []).append(1000 * (time.perf_counter() - began))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--browser", action="store_true")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    store = Store(arguments.store)
    if not (store.root / "history.db").exists():
        fill(store)
    measure = load_times if arguments.browser else response_times
    click.echo("median    p95 [ms]")
    for name, times in measure(store, arguments.repeats).items():
        p95 = statistics.quantiles(times, n=20)[-1]
        click.echo(f"{statistics.median(times):6.1f} {p95:6.1f}  {name}")


if __name__ == "__main__":
    main()
