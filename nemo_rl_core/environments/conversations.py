"""Answers of an environment to conversations: all together, concurrently, or in actors."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from nemo_rl_core.distributed.event_loop import CallQueue, Gathered
from nemo_rl_core.environments.interfaces import EnvironmentInterface, Message
from nemo_rl_core.environments.multi_turn.replies import (
    Reply,
    checked_replies,
    checked_reply,
    end_episode,
)
from nemo_rl_core.environments.remote import RemoteEnvironment
from nemo_rl_core.errors import RewardError


class ConversationAnswers:
    """The environment's side of one conversation.

    Args:
        environment: Environment, whose `end_episode` is called at the end, if it has one.
        answer: Function that answers the last turn.
    """

    def __init__(
        self,
        environment: Any,
        answer: Callable[[Sequence[Message], Any], Awaitable[Reply | RewardError]],
    ) -> None:
        self._environment, self._answer = environment, answer

    async def __call__(self, log: Sequence[Message], metadata: Any) -> Reply | RewardError:
        """Answers the last turn of the conversation."""
        return await self._answer(log, metadata)

    async def end(self, metadata: Any) -> None:
        """Ends the conversation, however it has ended."""
        await end_episode(self._environment, metadata)


def answers_at_once(environment: EnvironmentInterface) -> bool:
    """Whether conversations that are ready are answered together, by one blocking call."""
    has_actors = isinstance(environment, RemoteEnvironment)
    return not (has_actors or inspect.iscoroutinefunction(environment.step))


def conversations(
    environment: EnvironmentInterface, calls: CallQueue
) -> Callable[[int], ConversationAnswers]:
    """Returns a function that opens the conversation of a numbered episode with an environment.

    Args:
        calls: Queue for an environment in this process whose `step` blocks.
    """
    if isinstance(environment, RemoteEnvironment):
        return lambda number: _remote(environment, number)
    if not answers_at_once(environment):
        return lambda number: ConversationAnswers(environment, partial(checked_reply, environment))
    gathered: Gathered[tuple[Sequence[Message], Any], Reply | RewardError] = Gathered(
        lambda asked: checked_replies(
            environment, [log for log, _ in asked], [metadata for _, metadata in asked]
        ),
        calls,
    )
    return lambda number: ConversationAnswers(environment, lambda *asked: gathered.ask(asked))


def _remote(environment: RemoteEnvironment, number: int) -> ConversationAnswers:
    conversation = environment.conversation(number)
    return ConversationAnswers(conversation, conversation.answer)
