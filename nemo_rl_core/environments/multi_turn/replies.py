"""What an environment says to one conversation, and how a batch is made of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_rl_core.environments.interfaces import (
    EnvironmentInterface,
    EnvironmentReturn,
    Message,
    attempt,
    checked,
    failure,
)
from nemo_rl_core.errors import RewardError

ROLE = "environment"


@dataclass(frozen=True, slots=True)
class Reply:
    """One row of an `EnvironmentReturn`; see there.

    Attributes:
        reward: Of the last turn.
        terminated: Whether the conversation has ended.
        observation: What to append to it; not read when it has ended.
        metadata: What the environment wants back.
        stop_strings: Where the next completion must stop.
        answer: What was found in the completion.
        error: Why it could not be scored; it has ended then.
        role: Of the observation.
        truncation_reward: What is added to the reward if there is no room for another turn.
    """

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
    """The end of a conversation that could not be scored."""
    return Reply(error=error.in_one_line)


def source_of(environment: EnvironmentInterface) -> str:
    """What to call an environment in messages."""
    return f"the environment {type(environment).__name__!r}"


def ask(
    environment: EnvironmentInterface,
    message_log_batch: Sequence[Sequence[Message]],
    metadata: Sequence[Any],
) -> list[Reply | RewardError]:
    """One step of an environment, row by row.

    Where it raises, it is asked again for each row alone, so that only those rows are lost that it
    cannot score.

    Args:
        environment: Whatever it raises becomes an error of rows.
        message_log_batch: `B` conversations.
        metadata: `B`, what the environment wants back.

    Returns:
        One reply a row as the environment gave it, or why there is none.
    """
    replies: list[Reply] = []

    def step() -> float:
        returned = environment.step(message_log_batch, metadata)
        replies.extend(split(returned, len(message_log_batch)))
        return 0.0

    if not message_log_batch:
        return []
    first = message_log_batch[0]
    problem = attempt(
        step,
        prompt=first[0]["content"],
        completion=first[-1]["content"],
        source=source_of(environment),
    )
    if not isinstance(problem, RewardError):
        return list(replies)
    if len(message_log_batch) == 1:
        return [problem]
    pairs = zip(message_log_batch, metadata, strict=True)
    return [reply for log, about in pairs for reply in ask(environment, [log], [about])]


def checked_replies(
    environment: EnvironmentInterface,
    message_log_batch: Sequence[Sequence[Message]],
    metadata: Sequence[Any],
) -> list[Reply | RewardError]:
    """As `ask`, where a reply with an error, or whose reward is no finite number, is none."""
    source = source_of(environment)
    return [
        reply if isinstance(reply, RewardError) else _valid(reply, log, source)
        for log, reply in zip(
            message_log_batch, ask(environment, message_log_batch, metadata), strict=True
        )
    ]


def _valid(reply: Reply, log: Sequence[Message], source: str) -> Reply | RewardError:
    about = {"prompt": log[0]["content"], "completion": log[-1]["content"], "source": source}
    if reply.error is not None:
        return failure("could not score", reply.error, **about)
    reward = checked(reply.reward, **about)
    if isinstance(reward, RewardError):
        return reward
    truncation_reward = checked(reply.truncation_reward, **about)
    if isinstance(truncation_reward, RewardError):
        return truncation_reward
    return replace(reply, reward=reward, truncation_reward=truncation_reward)


def joined_replies(replies: Sequence[Reply]) -> EnvironmentReturn:
    """`B` replies as one batch."""
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
    """A batch row by row.

    Args:
        returned: What an environment returned.
        num_rows: How many conversations it was given.

    Raises:
        ValueError: If it has another number of rows, or lacks what a conversation that goes on
            needs.
    """
    rewards, ended = returned.rewards.tolist(), returned.terminateds.tolist()
    nothing: list[None] = [None] * num_rows
    truncation_rewards = (
        [0.0] * num_rows
        if returned.truncation_rewards is None
        else returned.truncation_rewards.tolist()
    )
    silence = [{"role": ROLE, "content": ""}] * num_rows
    if not returned.observations and not all(ended):
        raise ValueError("the environment says nothing to conversations that go on")
    rows = zip(
        rewards,
        ended,
        returned.observations or silence,
        returned.metadata or nothing,
        returned.next_stop_strings or nothing,
        returned.answers or nothing,
        returned.errors or nothing,
        truncation_rewards,
        strict=True,
    )
    replies = [
        Reply(
            reward,
            done,
            said["content"],
            kept,
            stops,
            answer,
            error,
            said["role"],
            truncation_reward,
        )
        for reward, done, said, kept, stops, answer, error, truncation_reward in rows
    ]
    if len(replies) != num_rows:
        raise ValueError(f"{len(replies)} rewards for {num_rows} conversations")
    return replies
