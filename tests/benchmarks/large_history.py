"""Times each query on a history of 1,000 runs and 100,000 nodes.

`python tests/benchmarks/large_history.py STORE [--runs 1000] [--nodes 100]`
"""

import argparse
import json
import sqlite3
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import click

from nemo_rl_core.history.database import open_for_writing, transaction
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.stored_paths import to_stored
from nemo_rl_core.store.store import Store

STATES = ("succeeded", "succeeded", "succeeded", "failed", "aborted")
WORKFLOWS = ("workflows.grpo.grpo", "workflows.sft.sft", "workflows.dpo.dpo")
START = 1_700_000_000.0
STEPS_WITH_METRICS = 20


def fill(store: Store, *, num_runs: int, num_nodes: int) -> None:
    """Writes the history: every run is a chain of iterations; every tenth run is all cache hits.

    The curves of the first run are long.
    """
    config = {"config": {"model": {"kind": "from_config"}, "notes": "x" * 2000, "seed": 0}}
    with closing(open_for_writing(store)) as database:
        for run in range(num_runs):
            with transaction(database):
                config["config"]["seed"] = run
                execution = f"2023{run:06d}-run"
                began = START + 600 * run
                database.execute(
                    "INSERT INTO executions VALUES "
                    "(?, ?, ?, ?, ?, ?, '[]', ?, 'c0ffee', 0, '{}', '{}', '', 1, 1.0, '', '', '')",
                    (
                        execution,
                        WORKFLOWS[run % 3],
                        f"recipe_{run % 7}",
                        STATES[run % 5],
                        began,
                        began + 500,
                        json.dumps(config),
                    ),
                )
                _fill_run(database, store, execution, run, num_nodes)
        database.execute("ANALYZE")


def _fill_run(
    database: sqlite3.Connection, store: Store, execution: str, run: int, num_nodes: int
) -> None:
    first = run * num_nodes + 1
    cached = run % 10 == 9
    for index in range(num_nodes):
        node, began = first + index, START + 600 * run + 5 * index
        group = index - index % 10
        parent = None if index == group else first + group
        kind = "dynamic" if parent is None else "task"
        source = node - num_nodes if cached else None
        artifact = f"grpo_iteration-{(source or node):016x}"
        database.execute(
            "INSERT INTO nodes VALUES "
            "(?, ?, ?, ?, 'tasks.grpo_iteration.grpo_iteration', ?, ?, ?, ?, ?, '', "
            "'{\"tokens\": 10}', 'reward 0.1 → 0.9', '', 0, 100, '{}')",
            (
                node,
                execution,
                parent,
                f"grpo_iteration {index}",
                kind,
                "cached" if cached and kind == "task" else "succeeded",
                began,
                began + 4,
                source if kind == "task" else None,
            ),
        )
        database.execute(
            "INSERT INTO attempts VALUES (?, 1, 'succeeded', ?, ?, NULL, '')",
            (node, began, began + 4),
        )
        for name in ("config", "start"):
            database.execute(
                "INSERT INTO node_inputs VALUES (?, ?, 'GRPOTaskConfig', ?, ?)",
                (node, name, '{"learning_rate": 0.001}', artifact if name == "start" else None),
            )
        database.execute(
            "INSERT INTO node_outputs VALUES (?, 'o0', 'CheckpointArtifact', '{}', ?)",
            (node, artifact),
        )
        if index:
            database.execute(
                "INSERT INTO edges VALUES (?, ?, ?, 'o0', 'start')", (execution, node - 1, node)
            )
        if not cached:
            _fill_artifact(database, store, artifact, node, index)
        if index % 10 == 1:
            steps = 5000 if run == 0 else STEPS_WITH_METRICS
            database.executemany(
                "INSERT INTO metrics VALUES (?, ?, ?, ?)",
                [(node, step, name, 0.5) for name in ("loss", "reward") for step in range(steps)],
            )


def _fill_artifact(
    database: sqlite3.Connection, store: Store, artifact: str, node: int, index: int
) -> None:
    """Writes an artifact; the settings change with every tenth iteration."""
    config = {"learning_rate": 0.001 * (1 + index // 10)}
    manifest = {"kind": "checkpoint", "config": config, "parents": []}
    digest = f"{node:064x}"
    database.execute(
        "INSERT INTO artifacts VALUES (?, 'checkpoint', ?, 'hf', ?, ?, 4, "
        "'2026-01-01T00:00:00+00:00', ?, ?)",
        (
            artifact,
            f"grpo_iteration {index}",
            digest,
            to_stored(store, store.artifacts / artifact),
            json.dumps(manifest),
            node,
        ),
    )
    if index:
        parent = f"grpo_iteration-{node - 1:016x}"
        database.execute(
            "INSERT INTO artifact_parents VALUES (?, ?, ?, 'start')",
            (artifact, f"{node - 1:064x}", parent),
        )


def questions(history: History, num_runs: int, num_nodes: int) -> dict[str, Callable[[], object]]:
    """Returns the queries that the pages run."""
    middle = num_runs // 2
    execution = f"2023{middle:06d}-run"
    last = f"grpo_iteration-{(middle * num_nodes + num_nodes):016x}"
    return {
        "first page of runs": history.executions,
        "last page of runs": lambda: history.executions(offset=num_runs - 50),
        "runs of a state": lambda: history.executions(state="failed"),
        "runs of a workflow": lambda: history.executions(workflow="grpo"),
        "runs with a text": lambda: history.executions(text="recipe_3"),
        "runs with a text that none has": lambda: history.executions(text="nowhere"),
        "runs since": lambda: history.executions(since=START + 600 * (num_runs - 10)),
        "workflows": history.workflows,
        "a run": lambda: history.execution(execution),
        "its nodes": lambda: history.nodes(execution),
        "its edges": lambda: history.edges(execution),
        "its artifacts": lambda: history.artifacts_of(execution),
        "what it used": lambda: history.artifacts_used(execution),
        "a node": lambda: history.node(middle * num_nodes + 7),
        "metric names, 5,000 steps": lambda: history.metric_names(2),
        "curves, 2 of 5,000 steps": lambda: history.metrics(2),
        "an artifact by prefix": lambda: history.find_artifact(last),
        "ancestry of 100": lambda: history.ancestry(last),
        "descendants of 100": lambda: history.descendants(
            f"grpo_iteration-{(middle * num_nodes + 1):016x}"
        ),
        "users of an artifact": lambda: history.users(last),
        "sweep": history.sweep,
    }


def measure(store: Store, *, num_runs: int, num_nodes: int, repeats: int = 7) -> dict[str, float]:
    """Returns the median milliseconds of each query."""
    milliseconds = {}
    with History(store) as history:
        for name, ask in questions(history, num_runs, num_nodes).items():
            times = []
            for _ in range(repeats):
                began = time.perf_counter()
                ask()
                times.append(1000 * (time.perf_counter() - began))
            milliseconds[name] = statistics.median(times)
    return milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=100)
    arguments = parser.parse_args()
    store = Store(arguments.store)
    if not (store.root / "history.db").exists():
        began = time.perf_counter()
        fill(store, num_runs=arguments.runs, num_nodes=arguments.nodes)
        click.echo(f"written in {time.perf_counter() - began:.1f} s")
    size = (store.root / "history.db").stat().st_size / 2**20
    click.echo(f"{arguments.runs} runs of {arguments.nodes} nodes, {size:.0f} MiB")
    for name, ms in measure(store, num_runs=arguments.runs, num_nodes=arguments.nodes).items():
        click.echo(f"{ms:8.1f} ms  {name}")


if __name__ == "__main__":
    main()
