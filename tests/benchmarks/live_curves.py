"""Times refreshes of the curves of a running run with 50,000 points in each of 12 metrics.

`python tests/benchmarks/live_curves.py STORE [--repeats 20]` for an empty STORE. A refresh is what
an open page asks for after a step: the present state (the overview) and the curves as JSON.

On two cores with other work, 20 refreshes: median 48 ms (24 CPU-ms), where reading every value took
1.4 to 1.9 s. The first answer takes 1.2 s.
"""

import argparse
import math
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from starlette.testclient import TestClient

from nemo_rl_core.history.writer import HistoryWriter, NewExecution
from nemo_rl_core.store.store import Store
from nemo_rl_core.types import StepReport
from nemo_rl_core.ui.app import create_app

RUN, STEPS = "20260101T000000Z-long", 50_000
METRICS = (
    "reward",
    "loss",
    "kl",
    "policy_kl",
    "approx_entropy",
    "grad_norm",
    "learning_rate",
    "completion_length",
    "truncated_fraction",
    "zero_variance_fraction",
    "kl_generation_trainer",
    "reward_std",
)


def metrics(step: int, draw: random.Random) -> dict[str, float]:
    """Returns noisy values of a step, some of them NaN."""
    values = {name: 0.3 + 0.1 * draw.random() + step / 200_000 for name in METRICS}
    return values | ({"loss": math.nan} if step % 10_007 == 0 else {})


@contextmanager
def running(store: Store, *, steps: int = STEPS) -> Iterator[tuple[HistoryWriter, int]]:
    """Yields the writer and the node of a running run with many steps."""
    writer = HistoryWriter(store, RUN)
    log = store.runs / RUN / "run.log"
    log.parent.mkdir(parents=True)
    log.write_text("")
    writer.begin(NewExecution("workflows.grpo.grpo", "long", ["nemo-rl"], {}, log))
    node = writer.begin_node(
        "grpo_iteration 1", task="tasks.grpo_iteration.grpo_iteration", kind="task"
    )
    assert node is not None
    draw = random.Random(0)
    rows = [
        (node, step, name, value)
        for step in range(1, steps + 1)
        for name, value in metrics(step, draw).items()
    ]
    with writer._open as database:  # one transaction
        database.execute("BEGIN")
        database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", rows)
    yield writer, node
    writer.end("succeeded")


def refreshes(
    client: TestClient, writer: HistoryWriter, node: int, *, first: int, repeats: int
) -> list[tuple[float, float]]:
    """Returns milliseconds and CPU milliseconds of each refresh, after a step each."""
    times = []
    draw = random.Random(1)
    for step in range(first, first + repeats):
        writer.log_step(node, StepReport("grpo_iteration", step, 2 * STEPS, metrics(step, draw)))
        began, cpu_began = time.perf_counter(), time.process_time()
        for path in ("", "/curves.json"):
            assert client.get(f"/executions/{RUN}{path}").status_code == 200
        times.append(
            (1000 * (time.perf_counter() - began), 1000 * (time.process_time() - cpu_began))
        )
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    store = Store(arguments.store)
    with running(store) as (writer, node):
        client = TestClient(create_app(store), base_url="http://localhost")
        ((cold, _),) = refreshes(client, writer, node, first=STEPS + 1, repeats=1)
        times = refreshes(client, writer, node, first=STEPS + 2, repeats=arguments.repeats)
        wall, cpu = ([each[k] for each in times] for k in (0, 1))
        click.echo(f"first time {cold:.0f} ms")
        click.echo(f"refresh: median {statistics.median(wall):.0f} ms, most {max(wall):.0f} ms")
        click.echo(f"refresh, CPU: median {statistics.median(cpu):.0f} ms")


if __name__ == "__main__":
    main()
