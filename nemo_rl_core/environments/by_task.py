"""Several environments in one run, selected by the task of a row."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

from nemo_rl_core.environments.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    Message,
    Scorer,
)
from nemo_rl_core.environments.multi_turn.replies import (
    Reply,
    ask,
    end_episode,
    failed,
    joined_replies,
)
from nemo_rl_core.environments.post_processing import post_process
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Rollout

Row = TypeVar("Row")
Result = TypeVar("Result")


class ByTaskScorer(Scorer):
    """Scores each completion with the scorer of its task; a task without one is an error."""

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self._scorers = dict(scorers)

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """Returns one outcome per rollout."""

        def score_task(task: str, rows: list[Rollout]) -> list[float | RewardError]:
            scorer = self._scorers.get(task)
            if scorer is None:
                return [_unknown(task, self._scorers)] * len(rows)
            return scorer.score(rows)

        return _routed(rollouts, [rollout.prompt.task for rollout in rollouts], score_task)

    def release_memory(self) -> None:
        """Releases the memory of every scorer."""
        for scorer in self._scorers.values():
            scorer.release_memory()

    def close(self) -> None:
        """Closes every scorer, even if closing one of them fails."""
        with ExitStack() as stack:
            for scorer in self._scorers.values():
                stack.callback(scorer.close)


class ByTaskEnvironment:
    """Passes each conversation to the environment of its task.

    The metadata of every environment must be a dict. `task` is added to it after each step, so
    that the next step finds the environment.
    """

    def __init__(self, environments: Mapping[str, EnvironmentInterface]) -> None:
        self._environments = dict(environments)

    @property
    def first_stop_strings(self) -> list[str]:
        """Stop strings of all tasks, since the first completion is sampled before any step."""
        parts = self._environments.values()
        return list(dict.fromkeys(s for e in parts for s in getattr(e, "first_stop_strings", ())))

    @property
    def stateful(self) -> bool:
        """Whether an environment keeps the state of episodes."""
        return any(getattr(each, "stateful", False) for each in self._environments.values())

    async def end_episode(self, metadata: Any) -> None:
        """Ends an episode in the environment of its task."""
        await end_episode(self._environments.get(metadata["task"]), metadata)

    def step(
        self, message_log_batch: Sequence[Sequence[Message]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Answers the last turn of each of `B` conversations."""

        def answer(task: str, rows: list[tuple[Sequence[Message], Any]]) -> list[Reply]:
            environment = self._environments.get(task)
            if environment is None:
                return [failed(_unknown(task, self._environments))] * len(rows)
            logs, metadata = [log for log, _ in rows], [row_metadata for _, row_metadata in rows]
            replies = ask(environment, logs, metadata)
            return [_with_task(task, reply) for reply in replies]

        rows = list(zip(message_log_batch, metadata, strict=True))
        return joined_replies(
            _routed(rows, [row_metadata["task"] for row_metadata in metadata], answer)
        )

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Adapts each task's rows with its environment; metrics are named `<task>_<name>`."""
        rewards = batch["rewards"].clone()
        metrics: dict[str, float] = {}
        for task in dict.fromkeys(batch["tasks"]):
            indices = [index for index, each in enumerate(batch["tasks"]) if each == task]
            rows = {
                name: [column[index] for index in indices]
                if isinstance(column, list)
                else column[indices]
                for name, column in batch.items()
            }
            rewards[indices], task_metrics = post_process(self._environments[task], rows)
            metrics |= {f"{task}_{name}": value for name, value in task_metrics.items()}
        return {**batch, "rewards": rewards}, metrics

    def shutdown(self) -> None:
        """Shuts down every environment that supports it, even if one of them fails."""
        with ExitStack() as stack:
            for environment in self._environments.values():
                end = getattr(environment, "shutdown", None)
                if callable(end):
                    stack.callback(end)


def _routed(
    rows: Sequence[Row], tasks: Sequence[str], ask_task: Callable[[str, list[Row]], list[Result]]
) -> list[Result]:
    results: dict[int, Result] = {}
    for task in dict.fromkeys(tasks):
        indices = [index for index, each in enumerate(tasks) if each == task]
        results |= zip(indices, ask_task(task, [rows[index] for index in indices]), strict=True)
    return [results[index] for index in range(len(rows))]


def _with_task(task: str, reply: Reply | RewardError) -> Reply:
    if isinstance(reply, RewardError):
        return failed(reply)
    return replace(reply, metadata={**(reply.metadata or {}), "task": task})


def _unknown(task: str, by_task: Mapping[str, Any]) -> RewardError:
    return RewardError(
        f"no environment scores the task {task!r}",
        expected=f"one of {', '.join(sorted(by_task))}",
        got=repr(task),
        fix="add it to environment.tasks, or change the row's task",
    )
