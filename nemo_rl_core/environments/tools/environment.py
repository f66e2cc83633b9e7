"""Environment that answers tool calls, and scores the first turn without one.

A chat template that writes tools shows them to the policy, whose calls are the `tool_calls` of its
turns. Without such a template the prompt must describe the tools; a call is then
`<tool>NAME ARGUMENT</tool>`, and the answer `<result>TEXT</result>`:

    What is 12 * 34?
    <tool>calculator 12 * 34</tool>
    <result>408</result>
    408
"""

import asyncio
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from nemo_rl_core.config.multi_turn import ToolUse
from nemo_rl_core.distributed.event_loop import CallQueue, Gathered
from nemo_rl_core.environments.interfaces import (
    EnvironmentReturn,
    Message,
    Scorer,
    reads_only_rewards,
    shorten,
)
from nemo_rl_core.environments.multi_turn.replies import (
    SHOWN_TOOLS,
    Reply,
    failed,
    joined_replies,
)
from nemo_rl_core.environments.tools.calling import (
    BrokenToolError,
    Function,
    as_text,
    from_json,
    in_thread,
    invoke,
    misfit,
    name_of,
)
from nemo_rl_core.environments.tools.mcp_source import is_call_of_server
from nemo_rl_core.environments.tools.sources import ToolSource
from nemo_rl_core.errors import NemoRLError, RewardError
from nemo_rl_core.types import Completion, Prompt, Rollout

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
FAILURES = ("unknown", "arguments", "malformed", "timeout", "raised")
"""Outcomes of calls besides `answered`."""

_OPEN_SECONDS, _CLOSE_SECONDS = 120.0, 30.0
_OPEN, _CLOSE = "<tool>", "</tool>"
_STATE = ("num_calls", "num_prompt_turns", "episode", SHOWN_TOOLS)
"""Keys of an episode's metadata that are not columns of its row."""


class _Opened(NamedTuple):
    functions: dict[str, Function]
    stack: AsyncExitStack


class ToolEnvironment:
    """Answers tool calls, and scores the first turn without one.

    What goes wrong because of the policy, or in a tool, is an answer to the policy: an unknown
    name, arguments that do not fit, a call that cannot be read, a time-out, an exception. If an MCP
    server has ended, or the object of an episode is lost, the conversation has an error.

    Args:
        config: Limits of a conversation.
        sources: Tools.
        scorer: Scorer of the last turn. The completion is only that turn, without reasoning, and
            `messages` is the conversation.

    Attributes:
        tools: Schemas of the tools.
        stateful: Whether an episode keeps objects or sessions between steps.
    """

    first_stop_strings = (_CLOSE,)

    def __init__(self, config: ToolUse, sources: Sequence[ToolSource], scorer: Scorer) -> None:
        self.tools = [schema for source in sources for schema in source.schemas]
        self._schemas = {name_of(schema): schema for schema in self.tools}
        self._config, self._scorer = config, scorer
        self._scores = Gathered(scorer.score, _Threads())
        self._once = [each for each in sources if not each.stateful]
        self._each = [each for each in sources if each.stateful]
        self.stateful = bool(self._each)
        self._shared: asyncio.Task[_Opened] | None = None
        self._replaced: set[asyncio.Task[None]] = set()
        self._is_closed = asyncio.Event()
        self._episodes: dict[str, _Opened] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def step(
        self, message_log_batch: Sequence[Sequence[Message]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Answers the last turn of each of `B` conversations."""
        self._loop = asyncio.get_running_loop()
        rows = zip(message_log_batch, metadata, strict=True)
        return joined_replies(await asyncio.gather(*(self._reply(*row) for row in rows)))

    @reads_only_rewards
    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Returns the unchanged batch, calls per episode, and shares of calls that failed."""
        outcomes = [
            outcome
            for messages in batch["messages"]
            for turn in messages
            for outcome in turn.get("outcomes", ())
        ]
        num_calls = max(len(outcomes), 1)
        return batch, {
            "calls_per_episode": len(outcomes) / max(len(batch["messages"]), 1),
            "failed_calls": sum(each in FAILURES for each in outcomes) / num_calls,
            **{f"failed_calls_{each}": outcomes.count(each) / num_calls for each in FAILURES},
        }

    async def end_episode(self, metadata: Any) -> None:
        """Closes the objects and sessions of an episode that is over."""
        if opened := self._episodes.pop(metadata.get("episode", ""), None):
            try:
                async with asyncio.timeout(_CLOSE_SECONDS) as limit:
                    await opened.stack.aclose()
            except TimeoutError:
                if not limit.expired():
                    raise
                _LOG.warning("the tools of an episode did not close in %g s", _CLOSE_SECONDS)

    def shutdown(self) -> None:
        """Closes all tools and the scorer."""
        if self._loop is not None and self._loop.is_running():
            closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
            with suppress(TimeoutError):
                closing.result(_CLOSE_SECONDS)
        self._scorer.close()

    async def _close(self) -> None:
        open_episodes = [self.end_episode({"episode": name}) for name in self._episodes]
        self._is_closed.set()
        closing = *open_episodes, *self._replaced, self._close_shared()
        await asyncio.gather(*closing, return_exceptions=True)

    async def _close_shared(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            await (await shared).stack.aclose()

    async def _reply(self, log: Sequence[Message], stored: Mapping[str, Any]) -> Reply:
        turn = log[-1]
        is_native = SHOWN_TOOLS in stored
        calls = turn.get("tool_calls", []) if is_native else self._calls_in_text(turn["content"])
        faults = turn.get("faults", [])
        state = {
            **stored,
            "num_prompt_turns": stored.get("num_prompt_turns", len(log) - 1),
            "num_calls": stored.get("num_calls", 0) + len(calls) + len(faults),
        }
        if not (calls or faults) or state["num_calls"] > self._config.max_calls:
            outcome = await self._scores.ask(_as_rollout(log, state))
            await self.end_episode(state)
            return failed(outcome) if isinstance(outcome, RewardError) else Reply(outcome)
        try:
            functions, state = await self._functions(state)
            results = await asyncio.gather(
                *(self._result(call["function"], functions, state) for call in calls)
            )
        except NemoRLError as error:  # not the policy's fault
            await self.end_episode(state)
            return Reply(error=error.in_one_line)
        except BaseException:  # cancelled, for example
            await self.end_episode(state)
            raise
        answers = [_answer(call, *each) for call, each in zip(calls, results, strict=True)]
        if faults:
            answers = _with_faults(answers, faults)
        turns = answers if is_native else [_in_text(each) for each in answers]
        return Reply(terminated=False, turns=tuple(turns), metadata=state, stop_strings=[_CLOSE])

    async def _functions(self, state: dict[str, Any]) -> tuple[dict[str, Function], dict[str, Any]]:
        """Returns the functions of an episode, and its state with the name of its objects."""
        opening = self._shared
        if opening is None:
            opening = self._shared = asyncio.create_task(_open(self._once, {}))
        try:
            shared = (await asyncio.shield(opening)).functions
        except NemoRLError:
            if self._shared is opening:
                self._shared = None  # opened again for the next call
            raise
        if not self._each:
            return shared, state
        if "episode" not in state:
            state = {**state, "episode": uuid4().hex}
            row = {key: value for key, value in state.items() if key not in _STATE}
            self._episodes[state["episode"]] = await _open(self._each, row)
        if state["episode"] not in self._episodes:
            raise RewardError(
                "the objects of the episode's tools are lost",
                expected="one process that plays all turns of the episode",
                got="a step in another process, or in one that has been replaced",
                fix="leave environment_workers out, or see why its actor has ended",
            )
        return {**shared, **self._episodes[state["episode"]].functions}, state

    async def _result(
        self, call: Mapping[str, Any], functions: Mapping[str, Function], state: Mapping[str, Any]
    ) -> tuple[str, str]:
        """Returns the answer to a call, and its outcome."""
        name, arguments = call["name"], from_json(call.get("arguments", {}))
        shown = set(map(name_of, state[SHOWN_TOOLS])) if SHOWN_TOOLS in state else {*functions}
        if name not in functions or name not in shown:
            names = ", ".join(sorted(shown & functions.keys()))
            return f"error: there is no tool {shorten(name, 40)!r}, only {names}", "unknown"
        function = functions[name]
        limit = self._config.call_timeout_seconds
        try:
            async with asyncio.timeout(limit) as timeout:
                if fault := misfit(self._schemas[name], function, arguments):
                    return self._cut(f"error: {fault}"), "arguments"
                return self._cut(as_text(await invoke(function, arguments))), "answered"
        except NemoRLError as error:
            if isinstance(error, BrokenToolError) and self._is_shared(name, function):
                await self._close_shared()  # opened again for the next call
            raise
        # Broad on purpose: a tool may raise anything.
        except Exception as error:  # noqa: BLE001 (becomes the answer)
            if isinstance(error, TimeoutError) and timeout.expired():
                if is_call_of_server(function) and self._is_shared(name, function):
                    self._replace_shared()  # the server may hang
                return f"error: no answer within {limit:g} s", "timeout"
            text = str(error) or type(error).__name__
            named = text if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            return self._cut(f"error: {named}"), "raised"

    def _is_shared(self, name: str, function: Function) -> bool:
        shared = self._shared
        return bool(shared and shared.done() and shared.result().functions.get(name) is function)

    def _replace_shared(self) -> None:
        """Opens shared tools again for the next call; calls in progress may end."""
        assert self._shared is not None
        closing = asyncio.create_task(self._close_later(self._shared.result()))
        self._shared = None
        self._replaced.add(closing)
        closing.add_done_callback(self._replaced.discard)

    async def _close_later(self, opened: _Opened) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_closed.wait(), self._config.call_timeout_seconds)
        await opened.stack.aclose()

    def _cut(self, text: str) -> str:
        most = self._config.max_result_characters
        return text if len(text) <= most else f"{text[:most]} ..."

    def _calls_in_text(self, content: str) -> list[Mapping[str, Any]]:
        call = find_call(content)
        if call is None:
            return []
        arguments = from_json(call.argument)
        if not isinstance(arguments, Mapping):
            schema = self._schemas.get(call.name, {"function": {}})
            arguments = _first_argument(schema["function"].get("parameters", {}), call.argument)
        return [{"function": {"name": call.name, "arguments": arguments}}]


class _Threads(CallQueue):
    """Runs calls in separate threads."""

    async def run(self, call: Callable[[], T]) -> T:
        return await in_thread(call)


class TextCall(NamedTuple):
    """Tool call in a text."""

    name: str
    argument: str


def find_call(turn: str) -> TextCall | None:
    """Returns the first call in the text of a turn, or None; an unclosed call counts too.

    A stop string may have removed its end.

    Example:
        >>> find_call("Let me see: <tool>calculator 3 * 4</tool>")
        TextCall(name='calculator', argument='3 * 4')
    """
    _, opened, inside = turn.partition(_OPEN)
    if not opened:
        return None
    name, *argument = re.split(r"[\s:]+", inside.partition(_CLOSE)[0].strip(), maxsplit=1)
    return TextCall(name, "".join(argument))


async def _open(sources: Sequence[ToolSource], row: Mapping[str, Any]) -> _Opened:
    stack = AsyncExitStack()
    functions: dict[str, Function] = {}
    try:
        async with asyncio.timeout(_OPEN_SECONDS):
            for source in sources:
                functions |= await source.open(row, stack)
    except BaseException as error:
        await stack.aclose()
        if isinstance(error, NemoRLError) or not isinstance(error, Exception):
            raise
        raise RewardError(
            "the tools of an episode cannot be opened",
            got=f"{type(error).__name__}: {shorten(str(error), 300)}",
            fix="fix the class of the tools, or its method reset",
        ) from error
    return _Opened(functions, stack)


def _first_argument(parameters: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Returns the argument of a call in text as that of the first parameter."""
    for name, schema in parameters.get("properties", {}).items():
        return {name: text if schema.get("type") == "string" else from_json(text)}
    return {}


def _answer(call: Mapping[str, Any], text: str, outcome: str) -> dict[str, Any]:
    turn = {"role": "tool", "name": call["function"]["name"], "content": text}
    identified = {"tool_call_id": call["id"]} if "id" in call else {}
    return {**turn, **identified, "outcomes": [outcome]}


def _with_faults(answers: Sequence[dict[str, Any]], faults: Sequence[str]) -> list[dict[str, Any]]:
    """Adds the texts about calls that cannot be read to the last answer: they have no name."""
    text = "\n".join(f"error: {fault}" for fault in faults)
    *others, last = answers or [{"role": "tool", "content": "", "outcomes": []}]
    outcomes = [*last["outcomes"], *["malformed"] * len(faults)]
    return [
        *others,
        {**last, "content": f"{last['content']}\n{text}".strip(), "outcomes": outcomes},
    ]


def _in_text(answer: dict[str, Any]) -> dict[str, Any]:
    # A result must not contain the end of a result, or a call.
    text = answer["content"].replace("</result>", "").replace(_OPEN, "").replace(_CLOSE, "")
    content = f"\n<result>{text}</result>\n"
    return {"role": "environment", "content": content, "outcomes": answer["outcomes"]}


def _as_rollout(log: Sequence[Message], state: Mapping[str, Any]) -> Rollout:
    question = [dict(turn) for turn in log[: state["num_prompt_turns"]]]
    is_plain = len(question) == 1 and question[0]["role"] == "user"
    row = {key: value for key, value in state.items() if key not in _STATE}
    prompt = Prompt(
        id=str(row.get("id", "")),
        text=question[0]["content"] if is_plain else json.dumps(question, ensure_ascii=False),
        token_ids=(),
        answer=row.pop("answer"),
        task=row.pop("task"),
        metadata=json.dumps(row),
    )
    messages = tuple(dict(turn) for turn in log)
    completion = Completion((), (), truncated=False)
    return Rollout(prompt, completion, log[-1]["content"], messages=messages)
