"""Times the first answers about a sweep of 100 points with 30 iterations each.

`python -m tests.benchmarks.sweep_pages STORE` for an empty STORE, which is filled with 3,000
nodes of 12 metrics and 20 steps. Every page is asked for the first time by a new server, and again.

EPYC, two cores with a load of 30 by other programs, one run, CPU-seconds first and again: overview
2.3 and 0.7, curves 4.1 and 2.1, curves as JSON 3.7 and 1.3. With a query for each bucket of each
metric, and full detail for alarms, these were 7.2, 27.5 and 23.5, first and again.
"""

import argparse
import random
import time
from pathlib import Path

import click
from starlette.testclient import TestClient

from nemo_rl_core.history.records import point_label
from nemo_rl_core.history.writer import HistoryWriter, NewExecution, NodeEnd
from nemo_rl_core.store.store import Store
from nemo_rl_core.ui.app import create_app
from tests.benchmarks.live_curves import METRICS

RUN, POINTS, ITERATIONS, STEPS = "20260101T000000Z-sweep", 100, 30, 20
PAGES = ("", "/curves", "/curves.json")


def fill(store: Store) -> None:
    """Writes the sweep, with noisy values."""
    writer, draw = HistoryWriter(store, RUN), random.Random(0)
    log = store.runs / RUN / "run.log"
    log.parent.mkdir(parents=True)
    log.write_text("")
    writer.begin(NewExecution("workflows.sweep.sweep", "", [], {}, log))
    mapped = writer.begin_node("sweep_point", task="tasks.sweep_point.map", kind="task")
    rows: list[tuple[int, int, str, float]] = []
    for number in range(POINTS):
        point = {"seed": number // 10, "grpo.learning_rate": 1e-4 * (number % 10 + 1)}
        name = f"sweep_point ({point_label(point)})"
        task = "tasks.sweep_point.sweep_point"
        parent = writer.begin_node(name, task=task, kind="task", parent=mapped, point=point)
        for iteration in range(ITERATIONS):
            name, task = f"grpo_iteration {iteration + 1}", "tasks.grpo_iteration.grpo_iteration"
            node = writer.begin_node(name, task=task, kind="task", parent=parent, point=point)
            assert node is not None
            steps = range(iteration * STEPS + 1, (iteration + 1) * STEPS + 1)
            rows += [(node, s, metric, 0.04 * draw.random()) for metric in METRICS for s in steps]
            writer.end_node(node, NodeEnd("succeeded"))
    with writer._open as database:  # one transaction
        database.execute("BEGIN")
        database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", rows)
    writer.end("succeeded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    store = Store(parser.parse_args().store)
    if not (store.root / "history.db").exists():
        fill(store)
    for page in PAGES:
        client = TestClient(create_app(store), base_url="http://localhost")
        for when in ("first", "again"):
            began, cpu_began = time.perf_counter(), time.process_time()
            assert client.get(f"/executions/{RUN}{page}").status_code == 200
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
            click.echo(f"{seconds:6.2f} s {cpu:6.2f} CPU-s  {page or 'overview'}, {when}")


if __name__ == "__main__":
    main()
