"""Answers of an environment to conversations: all together, concurrently, or in actors."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from nemo_rl_core.distributed.event_loop import CallQueue, Gathered
from nemo_rl_core.environments.interfaces import EnvironmentInterface, Message
from nemo_rl_core.environments.multi_turn.replies import Reply, checked_replies, checked_reply
from nemo_rl_core.environments.remote import RemoteEnvironment
from nemo_rl_core.errors import RewardError

Answer = Callable[[Sequence[Message], Any], Awaitable[Reply | RewardError]]
"""Answers the last turn of one conversation."""


def answers_at_once(environment: EnvironmentInterface) -> bool:
    """Whether conversations that are ready are answered together, by one blocking call."""
    has_actors = isinstance(environment, RemoteEnvironment)
    return not (has_actors or inspect.iscoroutinefunction(environment.step))


def conversations(environment: EnvironmentInterface, calls: CallQueue) -> Callable[[int], Answer]:
    """Returns a function that opens the conversation of a numbered episode with an environment.

    Args:
        calls: Queue for an environment in this process whose `step` blocks.
    """
    if isinstance(environment, RemoteEnvironment):
        return environment.conversation
    if not answers_at_once(environment):
        return lambda number: partial(checked_reply, environment)
    gathered: Gathered[tuple[Sequence[Message], Any], Reply | RewardError] = Gathered(
        lambda asked: checked_replies(
            environment, [log for log, _ in asked], [metadata for _, metadata in asked]
        ),
        calls,
    )
    return lambda number: lambda log, metadata: gathered.ask((log, metadata))
