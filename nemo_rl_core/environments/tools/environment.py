"""The conversation: calls are answered, and the turn without one is scored.

A call is `<tool>NAME ARGUMENT</tool>`, where the argument may have several lines, and the answer to
it is `<result>TEXT</result>`:

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
from nemo_rl_core.errors import RewardError
from nemo_rl_core.types import Completion, Prompt, Rollout

Tool = Callable[[str], str]
"""Its argument to its result; a ValueError's text is the result of a call that failed."""

_OPEN, _CLOSE = "<tool>", "</tool>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a turn asks for."""

    name: str
    argument: str


def find_call(turn: str) -> ToolCall | None:
    """The first call of a turn; what stands behind it is not read.

    A call that is not closed counts: a stop string may have taken its end.

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
    """Answers to calls, and has the first turn without one scored; holds nothing between calls.

    A call that fails (an unknown name, a program that crashes) is answered with what went wrong:
    it is the policy's affair. Where a tool itself is broken, the conversation has an error.

    Args:
        config: The bounds.
        tools: By name.
        scorer: For the last turn. It sees the first message as the prompt, and that turn alone as
            the completion.

    Attributes:
        first_stop_strings: Where the first turn must stop, since no step comes before it.
    """

    first_stop_strings = (_CLOSE,)

    def __init__(self, config: ToolUse, tools: Mapping[str, Tool], scorer: Scorer) -> None:
        self._config, self._tools, self._scorer = config, dict(tools), scorer

    def step(
        self, message_log_batch: Sequence[Sequence[Message]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Answers to the last turn of each of `B` conversations."""
        import torch

        num = len(message_log_batch)
        calls = [find_call(log[-1]["content"]) for log in message_log_batch]
        made = [stored.get("num_calls", 0) for stored in metadata]
        left = [self._config.max_calls - each for each in made]
        ended = [call is None or room <= 0 for call, room in zip(calls, left, strict=True)]
        last = [i for i in range(num) if ended[i]]
        scored = self._scorer.score([_as_rollout(message_log_batch[i], metadata[i]) for i in last])
        waiting = [call for call, over in zip(calls, ended, strict=True) if call and not over]
        # Programs run in processes of their own; how many at once is their sandbox's affair.
        with ThreadPoolExecutor() as pool:
            answers = pool.map(self._answer, waiting)
        scores = iter(scored)
        outcomes = [next(scores) if over else next(answers) for over in ended]
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": said if isinstance(said, str) else ""}
                for said in outcomes
            ],
            metadata=[
                {**stored, "num_calls": before + (not over)}
                for stored, before, over in zip(metadata, made, ended, strict=True)
            ],
            next_stop_strings=[None if over else [_CLOSE] for over in ended],
            rewards=torch.tensor(
                [each if isinstance(each, float) else 0.0 for each in outcomes],
                dtype=torch.float32,
            ),
            terminateds=torch.tensor(ended, dtype=torch.bool),
            errors=[str(each) if isinstance(each, RewardError) else None for each in outcomes],
        )

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """The batch as it was; the metrics of its rewards are the run's own."""
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
        # Named fault boundary: a tool that is broken costs this conversation, not the batch.
        except Exception as error:  # noqa: BLE001 (becomes the conversation's error)
            return RewardError(
                f"the tool {call.name!r} is broken",
                expected="a result, or a ValueError for a call that fails",
                got=f"{type(error).__name__}: {shorten(str(error), 300)}",
                fix="mend the tool, or leave it out of environment.tools",
            )

    def _cut(self, text: str) -> str:
        most = self._config.max_result_characters
        # A result must not look like the end of itself, or like a call.
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
