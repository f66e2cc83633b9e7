"""Environment that answers tool calls, and scores the first turn without one.

A call is `<tool>NAME ARGUMENT</tool>`, where the argument may have several lines, and the answer is
`<result>TEXT</result>`:

    What is 12 * 34?
    <tool>calculator 12 * 34</tool>
    <result>408</result>
    408
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from nemo_rl_core.config.multi_turn import ToolUse
from nemo_rl_core.environments.interfaces import EnvironmentReturn, Message, Scorer, shorten
from nemo_rl_core.environments.multi_turn.replies import Reply, joined_replies
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Completion, Prompt, Rollout

Tool = Callable[[str], str]
"""Maps an argument to a result; if it raises ValueError, the message is the result."""

_OPEN, _CLOSE = "<tool>", "</tool>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call of a turn."""

    name: str
    argument: str


def find_call(turn: str) -> ToolCall | None:
    """Returns the first call of a turn, or None; an unclosed call counts too.

    A stop string may have removed its end.

    Example:
        >>> find_call("Let me see: <tool>calculator 3 * 4</tool>")
        ToolCall(name='calculator', argument='3 * 4')
    """
    _, opened, inside = turn.partition(_OPEN)
    if not opened:
        return None
    name, *argument = re.split(r"[\s:]+", inside.partition(_CLOSE)[0].strip(), maxsplit=1)
    return ToolCall(name, "".join(argument))


class ToolEnvironment:
    """Answers tool calls, and scores the first turn without one; stateless between calls.

    A call that fails because of the policy (an unknown name, a program that crashes) is answered
    with an error message. If a tool itself is broken, the conversation has an error.

    Args:
        config: Limits of a conversation.
        tools: Tools by name.
        scorer: Scorer of the last turn. The prompt is the first message, and the completion is only
            the last turn.
    """

    first_stop_strings = (_CLOSE,)

    def __init__(self, config: ToolUse, tools: Mapping[str, Tool], scorer: Scorer) -> None:
        self._config, self._tools, self._scorer = config, dict(tools), scorer

    def step(
        self, message_log_batch: Sequence[Sequence[Message]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Answers the last turn of each of `B` conversations."""
        num_calls = [stored.get("num_calls", 0) for stored in metadata]
        calls = [
            find_call(log[-1]["content"]) if count < self._config.max_calls else None
            for log, count in zip(message_log_batch, num_calls, strict=True)
        ]
        rows = list(zip(calls, message_log_batch, metadata, strict=True))
        last = [_as_rollout(log, stored) for call, log, stored in rows if call is None]
        scores = iter(self._scorer.score(last))
        # The sandbox limits the number of programs that run at once.
        with ThreadPoolExecutor() as pool:
            results = pool.map(self._answer, filter(None, calls))
        replies = []
        for call, count, stored in zip(calls, num_calls, metadata, strict=True):
            outcome = next(scores) if call is None else next(results)
            reply = Reply(
                outcome if isinstance(outcome, float) else 0.0,
                terminated=call is None,
                observation=outcome if isinstance(outcome, str) else "",
                metadata={**stored, "num_calls": count + (call is not None)},
                stop_strings=None if call is None else [_CLOSE],
                error=str(outcome) if isinstance(outcome, RewardError) else None,
            )
            replies.append(reply)
        return joined_replies(replies)

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Returns the unchanged batch; the run already has metrics of its rewards."""
        return batch, {}

    def shutdown(self) -> None:
        """Closes the scorer."""
        self._scorer.close()

    def _answer(self, call: ToolCall) -> str | RewardError:
        tool = self._tools.get(call.name)
        if tool is None:
            result = f"error: there is no tool {shorten(call.name, 40)!r}, only " + ", ".join(
                sorted(self._tools)
            )
            return _result(result)
        try:
            return _result(self._cut(tool(call.argument)))
        except ValueError as error:
            return _result(self._cut(f"error: {error}"))
        # Broad on purpose: a broken tool costs only this conversation, not the batch.
        except Exception as error:  # noqa: BLE001 (becomes the conversation's error)
            return RewardError(
                f"the tool {call.name!r} is broken",
                expected="a result, or a ValueError for a call that fails",
                got=f"{type(error).__name__}: {shorten(str(error), 300)}",
                fix="fix the tool, or leave it out of environment.tools",
            )

    def _cut(self, text: str) -> str:
        most = self._config.max_result_characters
        # A result must not contain the end of a result, or a call.
        safe = text.replace("</result>", "").replace(_OPEN, "").replace(_CLOSE, "")
        return safe if len(safe) <= most else f"{safe[:most]} ..."


def _result(text: str) -> str:
    return f"\n<result>{text}</result>\n"


def _as_rollout(log: Sequence[Message], metadata: Mapping[str, Any]) -> Rollout:
    prompt = Prompt(
        id=str(metadata.get("id", "")),
        text=log[0]["content"],
        token_ids=(),
        answer=metadata["answer"],
        task=metadata["task"],
        metadata=json.dumps({key: metadata[key] for key in metadata.keys() - {"answer", "task"}}),
    )
    return Rollout(prompt, Completion((), (), truncated=False), log[-1]["content"])
