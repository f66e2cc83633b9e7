"""An environment's answers, conversation by conversation, each checked."""

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment says to one conversation.

    Attributes:
        message: `role` and `content`; None when it has ended.
        metadata: What the environment wants back at the next step.
        stop_strings: Where the next completion must stop.
        reward: Of the turn.
    """

    message: dict[str, str] | None
    metadata: Any
    stop_strings: tuple[str, ...]
    reward: float


def replies_to(
    conversations: Sequence[Sequence[Message]],
    metadata: Sequence[Any],
    environment: EnvironmentInterface,
) -> list[Reply | RewardError]:
    """Asks the environment once for all conversations.

    Args:
        conversations: `B`, each ending with a turn of the policy.
        metadata: `B`, of the environment's last answer.
        environment: Whatever it raises, or gives a wrong number of, is every conversation's error.

    Returns:
        One reply a conversation, or why it could not be judged.
    """
    source = f"the environment {type(environment).__name__!r}"
    returned: list[EnvironmentReturn] = []

    def step() -> float:
        returned.append(environment.step(conversations, metadata))
        return 0.0

    about = {**_about(conversations[0]), "source": source}
    problem = attempt(step, **about)
    if isinstance(problem, RewardError):
        return [problem] * len(conversations)
    counts = _counts(returned[0])
    if set(counts.values()) != {len(conversations)}:
        got = ", ".join(f"{count} {name}" for name, count in counts.items())
        wrong = failure(
            f"answered {len(conversations)} conversations with a wrong number", got, **about
        )
        return [wrong] * len(conversations)
    return [
        _reply(returned[0], place, {**_about(conversation), "source": source})
        for place, conversation in enumerate(conversations)
    ]


def _counts(returned: EnvironmentReturn) -> dict[str, int]:
    counts = {
        "rewards": len(returned.rewards),
        "terminateds": len(returned.terminateds),
    }
    if not bool(returned.terminateds.all()):
        # All three may be empty once nothing is to be said any more.
        counts |= {"observations": len(returned.observations), "metadata": len(returned.metadata)}
    if returned.errors is not None:
        counts["errors"] = len(returned.errors)
    return counts


def _reply(returned: EnvironmentReturn, place: int, about: dict[str, str]) -> Reply | RewardError:
    error = returned.errors[place] if returned.errors else None
    if error is not None:
        return failure("could not judge", error, **about)
    reward = checked(returned.rewards[place], **about)
    if isinstance(reward, RewardError):
        return reward
    if bool(returned.terminateds[place]):
        return Reply(None, None, (), reward)
    stops = returned.next_stop_strings[place] if returned.next_stop_strings else None
    return Reply(returned.observations[place], returned.metadata[place], tuple(stops or ()), reward)


def _about(conversation: Sequence[Message]) -> dict[str, str]:
    first, last = conversation[0], conversation[-1]
    return {"prompt": first["content"], "completion": last["content"]}
