"""Files with the rollouts of each step, which can be trained on again without an engine."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from nemo_rl_core.data.json_values import parsed
from nemo_rl_core.distributed.batched_data_dict import RemoteRows
from nemo_rl_core.errors import DataError
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.types import Completion, Prompt, Rollout

if TYPE_CHECKING:
    import pyarrow as pa


_ENVIRONMENT_METRICS = b"environment_metrics"
_TRAINER_LOGPROBS = "trainer_logprobs"

MAX_LOCAL_TOKENS = 2**20
"""Largest remote step that this process writes, which takes some tenths of a second."""
Start = Callable[[Callable[[], None]], Callable[[], object]]


def in_a_task(function: Callable[[], None]) -> Callable[[], object]:
    """Calls a function in a Ray task on this machine; returns a function that waits for it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    task = ray.remote(num_cpus=0, scheduling_strategy=this_node)(_call).remote(function)
    return partial(ray.get, task)


def _call(function: Callable[[], None]) -> None:
    function()


class RolloutRecords:
    """The rollouts of the steps of a run.

    Steps of many remote tokens are written by a Ray task while the next step runs: this process
    would have to fetch them.

    Args:
        folder: Folder of `step_000001.parquet` and so on; created by the first `save`.
        start: Calls a function elsewhere, and returns a function that waits for its end. By
            default a Ray task.
        max_local_tokens: Most tokens of a remote step that this process writes.
    """

    def __init__(
        self,
        folder: Path,
        start: "Start | None" = None,
        *,
        max_local_tokens: int = MAX_LOCAL_TOKENS,
    ) -> None:
        self.folder = folder
        self._start, self._max_local_tokens = start or in_a_task, max_local_tokens
        self._finish: Callable[[], object] = int

    def steps(self) -> list[int]:
        """Returns the numbers of the recorded steps, in order."""
        return sorted(int(path.stem.removeprefix("step_")) for path in self._files())

    def load(self, step: int) -> list[Rollout]:
        """Loads the rollouts of a step."""
        path = self._path(step)
        if not path.exists():
            steps = self.steps()
            raise DataError(
                f"no rollouts of step {step} in {self.folder.name!r}",
                expected=f"a step from {steps[0]} to {steps[-1]}" if steps else path.name,
                got=f"{len(steps)} recorded steps",
                fix="give the folder `rollouts` of a training artifact that has this step",
            )
        return load_rollouts(path)

    def environment_metrics(self, step: int) -> dict[str, float]:
        """Loads the environment's metrics of a step that `load` can read."""
        import pyarrow.parquet as pq

        metadata = pq.read_schema(self._path(step)).metadata or {}
        metrics: dict[str, float] = json.loads(metadata.get(_ENVIRONMENT_METRICS, b"{}"))
        return metrics

    def save(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        *,
        advantages: Tensor | None = None,
        trainer_logprobs: Tensor | RemoteRows | None = None,
        environment_metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Writes a step, or starts a task that does; see `save_rollouts`."""
        self.finish()
        write = partial(
            save_rollouts,
            rollouts,
            self._path(step).absolute(),  # a task has another working directory
            advantages=advantages,
            trainer_logprobs=trainer_logprobs,
            environment_metrics=environment_metrics,
        )
        if isinstance(rollouts, RemoteRollouts) and rollouts.num_tokens > self._max_local_tokens:
            self._finish = self._start(write)
        else:
            write()

    def finish(self) -> None:
        """Waits until the last step is written; raises the error of writing it, if any."""
        finish, self._finish = self._finish, int
        finish()

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.parquet"

    def _files(self) -> list[Path]:
        return [path for path in self.folder.glob("step_*.parquet") if path.stem[5:].isdigit()]


def save_rollouts(
    rollouts: Sequence[Rollout],
    path: Path,
    *,
    advantages: Tensor | None = None,
    trainer_logprobs: Tensor | RemoteRows | None = None,
    environment_metrics: Mapping[str, float] | None = None,
) -> None:
    """Writes one row per rollout as parquet; the same rollouts give the same bytes.

    Args:
        advantages: One advantage per valid rollout, if the algorithm computes them.
        trainer_logprobs: `[B, T-1]` logprobs of the valid rollouts under the trained weights before
            the step, if it computes them. They become a column of float32, 4 bytes per token.
        environment_metrics: Metrics of the environment's `global_post_process_and_metrics`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [_row(rollout) for rollout in rollouts]
    valid = [row for row in rows if row["error"] is None]
    if advantages is not None:
        for row, advantage in zip(valid, advantages.tolist(), strict=True):
            row["advantage"] = advantage
    if trainer_logprobs is not None:
        if isinstance(trainer_logprobs, RemoteRows):
            (trainer_logprobs,) = trainer_logprobs.fetched().values()
            assert isinstance(trainer_logprobs, Tensor)
        for row, logprobs in zip(valid, trainer_logprobs.detach().numpy(), strict=True):
            start = len(row["prompt_ids"]) - 1  # the first token has no prediction
            row[_TRAINER_LOGPROBS] = logprobs[start : start + len(row["completion_ids"])].tolist()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not validated with `RolloutSchema`, which takes ten times as long as all else here:
    # rewards were checked when they arrived, and `load_rollouts` checks the rest.
    schema = _schema()
    columns = [
        _list_column([row[field.name] for row in rows], _OF_TOKENS[field.name])
        if field.name in _OF_TOKENS
        else pa.array([row[field.name] for row in rows], type=field.type)
        for field in schema
    ]
    if trainer_logprobs is not None:
        column = _list_column([row.get(_TRAINER_LOGPROBS, ()) for row in rows], np.float32)
        schema, columns = (
            schema.append(pa.field(_TRAINER_LOGPROBS, column.type)),
            [*columns, column],
        )
    if environment_metrics:
        schema = schema.with_metadata({_ENVIRONMENT_METRICS: json.dumps(dict(environment_metrics))})
    pq.write_table(pa.Table.from_arrays(columns, schema=schema), path)


def load_rollouts(path: Path) -> list[Rollout]:
    """Loads the rollouts, with advantages, that `save_rollouts` wrote."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            f"{path.name!r} cannot be read as rollouts",
            expected="a parquet file that a training step wrote",
            got=str(error).splitlines()[0][:200],
            fix="take the file from the artifact again",
        ) from error
    if "part" not in table.column_names:  # of earlier versions
        table = table.append_column("part", pa.array([0] * len(table), pa.int64()))
    missing = [name for name in _schema().names if name not in table.column_names]
    if missing:
        raise DataError(
            f"{path.name!r} does not have all columns of rollouts",
            expected=f"the columns {', '.join(_schema().names)}",
            got=f"no column {', '.join(missing)}",
            fix="sample again: the file was written by an earlier version, or by something else",
        )
    rows = table.to_pylist()
    _check(rows, path)
    return [_rollout(row) for row in rows]


def _check(rows: list[dict[str, Any]], path: Path) -> None:
    import pandas as pd

    from nemo_rl_core.data.frames import check_frame
    from nemo_rl_core.data.record_frames import RolloutSchema

    if rows:
        check_frame(RolloutSchema, pd.DataFrame(rows), name=f"rollouts {path.stem}")


def _schema() -> "pa.Schema":
    import pyarrow as pa

    ids, numbers = pa.list_(pa.int64()), pa.list_(pa.float64())
    return pa.schema(
        [
            ("prompt_id", pa.string()),
            ("group", pa.int64()),
            ("sample", pa.int64()),
            ("task", pa.string()),
            ("prompt", pa.string()),
            ("completion", pa.string()),
            ("answer", pa.string()),
            ("reward", pa.float64()),
            ("advantage", pa.float64()),
            ("truncated", pa.bool_()),
            ("error", pa.string()),
            ("turn_rewards", numbers),
            ("components", numbers),
            ("messages", pa.string()),
            ("metadata", pa.string()),
            ("prompt_ids", ids),
            ("completion_ids", ids),
            ("logprobs", numbers),
            ("generated", pa.list_(pa.bool_())),
            ("weight_versions", ids),
            ("num_unread_tokens", pa.int64()),
            ("part", pa.int64()),
        ]
    )


_OF_TOKENS: dict[str, type[np.generic]] = {
    "prompt_ids": np.int64,
    "completion_ids": np.int64,
    "logprobs": np.float64,
    "generated": np.bool_,
    "weight_versions": np.int64,
}


def _list_column(rows: Sequence[Sequence[Any]], dtype: type[np.generic]) -> "pa.Array":
    import pyarrow as pa

    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.fromiter(chain.from_iterable(rows), dtype, int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _row(rollout: Rollout) -> dict[str, Any]:
    prompt, completion = rollout.prompt, rollout.completion
    return {
        "prompt_id": prompt.id,
        "group": rollout.group,
        "sample": rollout.sample,
        "task": prompt.task,
        "prompt": prompt.text,
        "completion": rollout.text,
        "answer": prompt.answer,
        "reward": rollout.reward,
        "advantage": rollout.advantage,
        "truncated": completion.truncated,
        "error": rollout.error,
        "turn_rewards": list(rollout.turn_rewards),
        "components": list(rollout.components),
        "messages": json.dumps(rollout.messages, ensure_ascii=False),
        "metadata": prompt.metadata,
        "prompt_ids": prompt.token_ids,
        "completion_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "generated": completion.generated,
        "weight_versions": completion.weight_versions,
        "num_unread_tokens": completion.num_unread_tokens,
        "part": rollout.part,
    }


def _rollout(row: dict[str, Any]) -> Rollout:
    return Rollout(
        Prompt(
            id=row["prompt_id"],
            text=row["prompt"],
            token_ids=tuple(row["prompt_ids"]),
            answer=row["answer"],
            task=row["task"],
            metadata=row["metadata"],
        ),
        Completion(
            tuple(row["completion_ids"]),
            tuple(row["logprobs"]),
            row["truncated"],
            tuple(row["generated"]),
            tuple(row["weight_versions"]),
            row["num_unread_tokens"],
        ),
        row["completion"],
        reward=row["reward"],
        advantage=row["advantage"],
        components=tuple(row["components"]),
        group=row["group"],
        sample=row["sample"],
        turn_rewards=tuple(row["turn_rewards"]),
        # Earlier versions wrote a list of roles and contents.
        messages=tuple(parsed(row["messages"], list)),
        error=row["error"],
        part=row["part"],
    )
