"""The recorded runs as pandas data frames, for notebooks and scripts."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_core.errors import ConfigError
from nemo_rl_core.history.queries import History
from nemo_rl_core.history.results import RunQuery, run_row, run_rows
from nemo_rl_core.history.run_columns import RunRow, differing, record_of
from nemo_rl_core.store.store import Store

if TYPE_CHECKING:
    import pandas as pd


_NO_ROW = RunRow("", "", None, "", "", "succeeded", 0.0, None)


def runs(*, store: str | Path | None = None, **query: Any) -> "pd.DataFrame":
    """Returns a row per run and per point of a sweep, newest first, with settings and results.

    Settings that differ between the rows are columns, by their paths in the recipe. Settings that
    only rows of another workflow have count if they differ between those.

    Args:
        store: Folder of the store; by default that of NEMO_RL_HOME.
        **query: Fields of `RunQuery`, such as `workflow="grpo"`, `where=["accuracy>0.5"]` or
            `sort="-reward"`. All rows by default.

    Example:
        >>> import nemo_rl_core
        >>> frame = nemo_rl_core.runs(where=["seed=1"])                        # doctest: +SKIP
        >>> frame[["id", "grpo.learning_rate", "accuracy"]]                    # doctest: +SKIP
    """
    import pandas as pd

    with History(_store(store)) as history:
        rows = run_rows(history, RunQuery(**{"limit": None, **query})).items
    values: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.settings.items():
            values.setdefault(name, set()).add(repr(value))
    names = {name for each in differing(rows).values() for name in each}
    names |= {name for name, different in values.items() if len(different) > 1}
    records = [record_of(row) | {n: row.settings.get(n) for n in sorted(names)} for row in rows]
    frame = pd.DataFrame.from_records(records, columns=[*record_of(_NO_ROW), *sorted(names)])
    for name in ("started_at", "ended_at"):
        frame[name] = pd.to_datetime(frame[name], unit="s", utc=True)
    return frame


def run_metrics(run: str, *names: str, store: str | Path | None = None) -> "pd.DataFrame":
    """Returns the metrics of a run or a point: a row per node and step, a column per metric.

    Args:
        run: Its id as in `runs()`, or the beginning of it.
        *names: Metrics; all by default, without the machine's.
        store: Folder of the store; by default that of NEMO_RL_HOME.

    Example:
        >>> import nemo_rl_core
        >>> nemo_rl_core.run_metrics("20261127T133941Z", "reward")                 # doctest: +SKIP
    """
    import pandas as pd

    with History(_store(store)) as history:
        row = run_row(history, run)
        nodes = [
            node for node in history.nodes(row.run) if node.kind == "task" and row.has(node.point)
        ]
        curves = {node.id: history.metrics(node.id, names=list(names) or None) for node in nodes}
    frames = []
    for node in nodes:
        columns = {
            name: pd.Series(dict(points), dtype="float64")
            for name, points in curves[node.id].items()
            if names or not name.startswith("machine/")
        }
        if columns:
            frame = pd.DataFrame(columns).rename_axis("step").reset_index()
            frame.insert(0, "stage", node.title)
            frame.insert(0, "node", node.id)
            frames.append(frame)
    recorded = {name for frame in frames for name in frame.columns}
    if missing := [name for name in names if name not in recorded]:
        raise ConfigError(
            f"the run {row.id} has no metric {missing[0]!r}",
            got=", ".join(missing),
            fix="nemo_rl_core.run_metrics(run) has all of its metrics as columns",
        )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def run_rollouts(run: str, *, store: str | Path | None = None) -> "pd.DataFrame":
    """Returns the recorded completions of a run or a point, a row each, with artifact and step.

    Args:
        run: Its id as in `runs()`, or the beginning of it.
        store: Folder of the store; by default that of NEMO_RL_HOME.

    Example:
        >>> import nemo_rl_core
        >>> completions = nemo_rl_core.run_rollouts("20261127T133941Z")            # doctest: +SKIP
        >>> completions.groupby("step").reward.mean()                          # doctest: +SKIP
    """
    import pandas as pd

    with History(_store(store)) as history:
        row = run_row(history, run)
        points = history.points_of(row.run)
        folders = {
            artifact.id: Path(artifact.path) / "rollouts"
            for artifact in history.artifacts_of(row.run)
            if row.has(points.get(artifact.id))
        }
    frames = []
    for artifact, folder in folders.items():
        for path in sorted(folder.glob("step_*.parquet")):
            frame = pd.read_parquet(path)
            frame.insert(0, "step", int(path.stem.removeprefix("step_")))
            frame.insert(0, "artifact", artifact)
            frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _store(store: str | Path | None) -> Store:
    return Store.default() if store is None else Store(Path(store).expanduser())
