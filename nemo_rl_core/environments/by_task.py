"""Several environments in one run, told apart by the task of a row."""

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
from nemo_rl_core.environments.multi_turn.replies import Reply, ask, failed, joined_replies
from nemo_rl_core.environments.post_processing import post_process
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Rollout

Row = TypeVar("Row")
Result = TypeVar("Result")


class ByTaskScorer(Scorer):
    """Each completion is scored by its task's scorer; a task without one is an error.

    Args:
        scorers: By the names of tasks; they are closed with this one.
    """

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self._scorers = dict(scorers)

    def score(self, rollouts: Sequence[Rollout]) -> list[float | RewardError]:
        """One outcome a rollout."""

        def score_task(task: str, rows: list[Rollout]) -> list[float | RewardError]:
            scorer = self._scorers.get(task)
            if scorer is None:
                return [_unknown(task, self._scorers)] * len(rows)
            return scorer.score(rows)

        return _routed(rollouts, [rollout.prompt.task for rollout in rollouts], score_task)

    def release_memory(self) -> None:
        """That of every scorer."""
        for scorer in self._scorers.values():
            scorer.release_memory()

    def close(self) -> None:
        """Closes every scorer, also when one of them fails to."""
        with ExitStack() as stack:
            for scorer in self._scorers.values():
                stack.callback(scorer.close)


class ByTaskEnvironment:
    """Each conversation goes on with its task's environment, which its metadata must keep naming.

    The metadata of all of them are dicts; `task` is put back where one does not keep it.

    Args:
        environments: By the names of tasks.
    """

    def __init__(self, environments: Mapping[str, EnvironmentInterface]) -> None:
        self._environments = dict(environments)

    @property
    def first_stop_strings(self) -> list[str]:
        """What ends the first completion of any task: it is sampled before a task is asked."""
        parts = self._environments.values()
        return list(dict.fromkeys(s for e in parts for s in getattr(e, "first_stop_strings", ())))

    def step(
        self, message_log_batch: Sequence[Sequence[Message]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Answers to the last turn of each of `B` conversations."""

        def answer(task: str, rows: list[tuple[Sequence[Message], Any]]) -> list[Reply]:
            environment = self._environments.get(task)
            if environment is None:
                return [failed(_unknown(task, self._environments))] * len(rows)
            logs, metadata = [log for log, _ in rows], [about for _, about in rows]
            replies = ask(environment, logs, metadata)
            return [_of_task(task, reply) for reply in replies]

        rows = list(zip(message_log_batch, metadata, strict=True))
        return joined_replies(_routed(rows, [about["task"] for about in metadata], answer))

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Each task's rows adapted by its own environment; metrics are called `<task>_<name>`."""
        rewards = batch["rewards"].clone()
        metrics: dict[str, float] = {}
        for task in dict.fromkeys(batch["tasks"]):
            places = [place for place, each in enumerate(batch["tasks"]) if each == task]
            rows = {
                name: [column[place] for place in places]
                if isinstance(column, list)
                else column[places]
                for name, column in batch.items()
            }
            rewards[places], found = post_process(self._environments[task], rows)
            metrics |= {f"{task}_{name}": value for name, value in found.items()}
        return {**batch, "rewards": rewards}, metrics

    def shutdown(self) -> None:
        """Ends every environment that can be ended, also when one of them fails to."""
        with ExitStack() as stack:
            for environment in self._environments.values():
                end = getattr(environment, "shutdown", None)
                if callable(end):
                    stack.callback(end)


def _routed(
    rows: Sequence[Row], tasks: Sequence[str], ask_task: Callable[[str, list[Row]], list[Result]]
) -> list[Result]:
    """What `ask_task` says of the rows of each task, in the order of the rows."""
    found: dict[int, Result] = {}
    for task in dict.fromkeys(tasks):
        places = [place for place, each in enumerate(tasks) if each == task]
        found |= zip(places, ask_task(task, [rows[place] for place in places]), strict=True)
    return [found[place] for place in range(len(rows))]


def _of_task(task: str, reply: Reply | RewardError) -> Reply:
    if isinstance(reply, RewardError):
        return failed(reply)
    return replace(reply, metadata={**(reply.metadata or {}), "task": task})


def _unknown(task: str, known: Mapping[str, Any]) -> RewardError:
    return RewardError(
        f"no environment scores the task {task!r}",
        expected=f"one of {', '.join(sorted(known))}",
        got=repr(task),
        fix="name it in environment.tasks, or give the row another task",
    )
