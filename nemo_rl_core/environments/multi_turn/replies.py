"""Rows of an `EnvironmentReturn`: making, checking, joining and splitting them."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_rl_core.distributed.event_loop import run_on_loop
from nemo_rl_core.environments.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    Message,
    attempt,
    checked,
    failure,
    raised,
)
from nemo_rl_core.errors import RewardError

ROLE = "environment"


@dataclass(frozen=True, slots=True)
class Reply:
    """One row of an `EnvironmentReturn`; with an `error`, the conversation has ended."""

    reward: float = 0.0
    terminated: bool = True
    observation: str = ""
    metadata: Any = None
    stop_strings: list[str] | None = None
    answer: str | None = None
    error: str | None = None
    role: str = ROLE
    truncation_reward: float = 0.0


def failed(error: RewardError) -> Reply:
    """Returns the reply that ends a conversation with an error."""
    return Reply(error=error.in_one_line)


def display_name(environment: EnvironmentInterface) -> str:
    """Returns the name of an environment in error messages."""
    return f"the environment {type(environment).__name__!r}"


def ask(
    environment: EnvironmentInterface,
    message_log_batch: Sequence[Sequence[Message]],
    metadata: Sequence[Any],
) -> list[Reply | RewardError]:
    """Runs one step of an environment, and returns one unchecked reply, or an error, per row.

    If the environment raises, it is called again for each row separately, so that only the rows
    that it cannot score are lost.
    """
    replies: list[Reply] = []

    def step() -> float:
        returned: Any = environment.step(message_log_batch, metadata)
        if inspect.iscoroutine(returned):
            returned = run_on_loop(returned)
        replies.extend(split(returned, len(message_log_batch)))
        return 0.0

    if not message_log_batch:
        return []
    first = message_log_batch[0]
    problem = attempt(
        step,
        prompt=first[0]["content"],
        completion=first[-1]["content"],
        source=display_name(environment),
    )
    if not isinstance(problem, RewardError):
        return list(replies)
    if len(message_log_batch) == 1:
        return [problem]
    pairs = zip(message_log_batch, metadata, strict=True)
    return [
        reply for log, row_metadata in pairs for reply in ask(environment, [log], [row_metadata])
    ]


def checked_replies(
    environment: EnvironmentInterface,
    message_log_batch: Sequence[Sequence[Message]],
    metadata: Sequence[Any],
) -> list[Reply | RewardError]:
    """Calls `ask`; a reply with an error or without a finite reward becomes a `RewardError`."""
    source = display_name(environment)
    return [
        checked_row(reply, log, source)
        for log, reply in zip(
            message_log_batch, ask(environment, message_log_batch, metadata), strict=True
        )
    ]


async def checked_reply(
    environment: Any, log: Sequence[Message], metadata: Any
) -> Reply | RewardError:
    """Awaits the `step` of an environment for one conversation; see `checked_replies`."""
    context = {"prompt": log[0]["content"], "completion": log[-1]["content"]}
    try:
        (reply,) = split(await environment.step([log], [metadata]), 1)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (becomes an outcome)
        return raised(error, source=display_name(environment), **context)
    return checked_row(reply, log, display_name(environment))


def checked_row(
    reply: Reply | RewardError, log: Sequence[Message], source: str
) -> Reply | RewardError:
    """Returns a reply, or a `RewardError` if it has an error or no finite reward."""
    if isinstance(reply, RewardError):
        return reply
    context = {"prompt": log[0]["content"], "completion": log[-1]["content"], "source": source}
    if reply.error is not None:
        return failure("could not score", reply.error, **context)
    reward = checked(reply.reward, **context)
    if isinstance(reward, RewardError):
        return reward
    truncation_reward = checked(reply.truncation_reward, **context)
    if isinstance(truncation_reward, RewardError):
        return truncation_reward
    return replace(reply, reward=reward, truncation_reward=truncation_reward)


def joined_replies(replies: Sequence[Reply]) -> EnvironmentReturn:
    """Joins `B` replies into one batch."""
    import torch

    return EnvironmentReturn(
        observations=[{"role": each.role, "content": each.observation} for each in replies],
        metadata=[each.metadata for each in replies],
        next_stop_strings=[each.stop_strings for each in replies],
        rewards=torch.tensor([each.reward for each in replies], dtype=torch.float32),
        terminateds=torch.tensor([each.terminated for each in replies], dtype=torch.bool),
        answers=[each.answer for each in replies],
        errors=[each.error for each in replies],
        truncation_rewards=torch.tensor(
            [each.truncation_reward for each in replies], dtype=torch.float32
        ),
    )


def split(returned: EnvironmentReturn, num_rows: int) -> list[Reply]:
    """Splits a batch into its rows.

    Raises:
        ValueError: If the number of rows differs, or an unfinished conversation has no observation.
    """
    rewards, ended = returned.rewards.tolist(), returned.terminateds.tolist()
    nothing: list[None] = [None] * num_rows
    truncation_rewards = (
        [0.0] * num_rows
        if returned.truncation_rewards is None
        else returned.truncation_rewards.tolist()
    )
    if not returned.observations and not all(ended):
        raise ValueError("the environment returned no observations for unfinished conversations")
    messages = returned.observations or [{"role": ROLE, "content": ""}] * num_rows
    columns = (
        rewards,
        ended,
        [each["content"] for each in messages],
        returned.metadata or nothing,
        returned.next_stop_strings or nothing,
        returned.answers or nothing,
        returned.errors or nothing,
        [each["role"] for each in messages],
        truncation_rewards,
    )
    replies = [Reply(*row) for row in zip(*columns, strict=True)]
    if len(replies) != num_rows:
        raise ValueError(f"{len(replies)} rewards for {num_rows} conversations")
    return replies
