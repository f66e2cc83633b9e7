"""Conversations with tools, turn by turn."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_core.config.multi_turn import FunctionTool, ToolUse
from nemo_rl_core.environments.adapt import EnvironmentScorer
from nemo_rl_core.environments.contents import reward_content
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.interfaces import EnvironmentReturn, Scorer
from nemo_rl_core.environments.multi_turn.replies import SHOWN_TOOLS
from nemo_rl_core.environments.needs import check_targets
from nemo_rl_core.environments.remote import _End, _EnvironmentActor, _Turn
from nemo_rl_core.environments.tools import calling
from nemo_rl_core.environments.tools.calling import BrokenToolError
from nemo_rl_core.environments.tools.environment import TextCall, ToolEnvironment, find_call
from nemo_rl_core.environments.tools.mcp_source import _call
from nemo_rl_core.environments.tools.sources import make_source, schemas_of
from nemo_rl_core.errors import ConfigError
from tests.unit.agents.test_process import is_alive
from tests.unit.environments import tools_of_a_user

MODULE = tools_of_a_user.__name__
SERVER = [sys.executable, str(Path(__file__).parent / "mcp_server.py")]
ROW = {"answer": "408", "task": "products"}


class Answers(Scorer):
    """Scores 1 for the row's answer; keeps what it gets."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def score(self, rollouts: Any) -> list[Any]:
        self.batches.append(list(rollouts))
        return [float(each.text == each.prompt.answer) for each in rollouts]


def environment(*tools: Any, **options: Any) -> ToolEnvironment:
    names = [f"{MODULE}:{tool}" if isinstance(tool, str) else tool for tool in tools]
    config = ToolUse.model_validate({"tools": names, "max_calls": 99, **options})
    return ToolEnvironment(config, [make_source(each) for each in config.tools], Answers())


def call(name: str, arguments: Any, id: str | None = None) -> dict[str, Any]:
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if id is None else {**made, "id": id}


def asks(*calls: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


QUESTION = {"role": "user", "content": "12 * 34?"}


async def step(
    made: ToolEnvironment, turn: Mapping[str, Any], before: Mapping[str, Any] | None = None
) -> EnvironmentReturn:
    metadata = before or {**ROW, SHOWN_TOOLS: made.tools}
    return await made.step([[QUESTION, turn]], [metadata])


def results(made: ToolEnvironment, *calls: Mapping[str, Any]) -> list[dict[str, Any]]:
    (turns,) = asyncio.run(step(made, asks(*calls))).observations
    assert isinstance(turns, list)
    return turns


def contents(made: ToolEnvironment, *calls: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(turn["content"], *turn["outcomes"]) for turn in results(made, *calls)]


def test_calls_are_answered_and_the_last_turn_is_scored() -> None:
    made = environment({"kind": "calculator"}, "echo", max_calls=2)
    scorer: Any = made._scorer

    async def play() -> None:
        first = await step(
            made,
            asks(
                call("calculator", {"expression": "12 * 34"}, "c1"),
                call("echo", '{"text": "ab", "times": 2}'),
            ),
        )
        assert first.observations == [
            [
                {
                    "role": "tool",
                    "name": "calculator",
                    "content": "408",
                    "tool_call_id": "c1",
                    "outcomes": ["answered"],
                },
                {"role": "tool", "name": "echo", "content": "abab", "outcomes": ["answered"]},
            ]
        ]
        assert (first.rewards.tolist(), first.terminateds.tolist()) == ([0.0], [False])
        last = {"role": "assistant", "content": "408", "reasoning_content": "I know"}
        final = await made.step(
            [[QUESTION, asks(), *first.observations[0], last]], [first.metadata[0]]
        )
        assert (final.rewards.tolist(), final.terminateds.tolist()) == ([1.0], [True])
        # A further call is one too many, and its turn is the answer.
        third = await step(made, asks(call("echo", {"text": "x"})), first.metadata[0])
        assert (third.rewards.tolist(), third.terminateds.tolist()) == ([0.0], [True])

    asyncio.run(play())
    scored = scorer.batches[0][0]
    assert (scored.prompt.text, scored.text, scored.prompt.metadata) == ("12 * 34?", "408", "{}")
    roles = [turn["role"] for turn in scored.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant"]


@pytest.mark.parametrize(
    ("asked", "answer", "outcome"),
    [
        (call("clock", {}), "error: there is no tool 'clock', only echo, fail", "unknown"),
        (call("echo", {}), "error: arguments: 'text' is a required property", "arguments"),
        (
            call("echo", {"text": "a", "times": "2"}),
            "error: times: '2' is not of type 'integer'",
            "arguments",
        ),
        (
            call("echo", {"text": "a", "n": 2}),
            "error: got an unexpected keyword argument 'n'",
            "arguments",
        ),
        (call("echo", "a"), "error: arguments must be an object with text, times", "arguments"),
        (call("fail", {"kind": "value"}), "error: no", "raised"),
        (call("fail", {"kind": "key"}), "error: KeyError: 'x'", "raised"),
        (call("fail", {"kind": "exit"}), "error: RuntimeError: SystemExit(3)", "raised"),
        (call("echo", {"text": "y" * 99}), "y" * 60 + " ...", "answered"),
        (call("echo", {"text": "\ud800"}), "?", "answered"),
    ],
)
def test_what_goes_wrong_is_an_answer(asked: Any, answer: str, outcome: str) -> None:
    made = environment("echo", "fail", max_result_characters=60)
    assert contents(made, asked) == [(answer, outcome)]


def test_a_call_ends_at_its_time_limit_and_others_do_not() -> None:
    made = environment("sleep", "fetch", "echo", call_timeout_seconds=0.2)
    assert contents(
        made,
        call("sleep", {"seconds": 9}),
        call("fetch", {"seconds": 9}),
        call("fetch", {"seconds": 0.01}),
        call("echo", {"text": "a"}),
    ) == [
        ("error: no answer within 0.2 s", "timeout"),
        ("error: no answer within 0.2 s", "timeout"),
        ('{"waited": 0.01}', "answered"),
        ("a", "answered"),
    ]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["sleep", "fetch"]), st.integers(0, 9)), max_size=8))
def test_answers_are_in_the_order_of_the_calls_whatever_their_duration(pairs: Any) -> None:
    made = environment("sleep", "fetch")
    calls = [
        call(name, {"seconds": number / 300}, str(k)) for k, (name, number) in enumerate(pairs)
    ]
    answers = results(made, *calls) if calls else []
    assert [each["tool_call_id"] for each in answers] == [each["id"] for each in calls]
    values = [json.loads(each["content"]) for each in answers]
    assert values == [
        {"waited": number / 300} if name == "fetch" else number / 300 for name, number in pairs
    ]


def test_calls_that_cannot_be_read_are_answered_and_counted() -> None:
    made = environment("echo")
    faults = ["the arguments are not JSON", "the call has no name"]

    async def play() -> Any:
        only = await step(made, {"role": "assistant", "content": "", "faults": faults})
        both = await step(made, {**asks(call("echo", {"text": "a"})), "faults": faults[:1]})
        return only, both

    only, both = asyncio.run(play())
    text = "error: the arguments are not JSON"
    assert only.observations == [
        [
            {
                "role": "tool",
                "content": f"{text}\nerror: the call has no name",
                "outcomes": ["malformed"] * 2,
            }
        ]
    ]
    assert only.metadata[0]["num_calls"] == 2
    (turn,) = both.observations[0]
    assert (turn["content"], turn["outcomes"]) == (f"a\n{text}", ["answered", "malformed"])
    messages = [tuple(only.observations[0]), (QUESTION, turn), ()]
    _, metrics = made.global_post_process_and_metrics({"messages": messages})
    assert metrics == {
        "calls_per_episode": 4 / 3,
        "failed_calls": 0.75,
        "failed_calls_unknown": 0.0,
        "failed_calls_arguments": 0.0,
        "failed_calls_malformed": 0.75,
        "failed_calls_timeout": 0.0,
        "failed_calls_raised": 0.0,
    }


def test_each_episode_has_an_object_whose_calls_are_in_order() -> None:
    tools_of_a_user.closed.clear()
    target = {"kind": "function", "target": f"{MODULE}:Account", "arguments": {"balance": 10}}
    made = environment(target)
    assert made.stateful

    async def play() -> list[Any]:
        states: list[Any] = [{**ROW, "bonus": bonus, SHOWN_TOOLS: made.tools} for bonus in (0, 100)]
        seen: list[Any] = []
        for amounts in ((1, 2), (3,)):
            for episode in (0, 1):  # the two take turns
                turn = asks(*(call("pay", {"amount": amount}) for amount in amounts))
                answer = await step(made, turn, states[episode])
                states[episode] = answer.metadata[0]
                seen.append([each["content"] for each in answer.observations[0]])
        await step(made, {"role": "assistant", "content": "408"}, states[0])
        await made.end_episode(states[1])  # a limit has cut it
        lost = await step(made, asks(call("pay", {"amount": 1})), states[1])
        return [*seen, lost.errors]

    # Without order, 10 - 2 would come before 10 - 1, which takes longer.
    *seen, errors = asyncio.run(play())
    assert seen == [["9", "7"], ["109", "107"], ["4"], ["104"]]
    assert tools_of_a_user.closed == [4, 104]
    assert "the objects of the episode's tools are lost" in errors[0]


def session(**arguments: float) -> dict[str, Any]:
    return {"kind": "function", "target": f"{MODULE}:Session", "arguments": arguments}


@pytest.mark.parametrize("tools", [[session()], [session(), session(opening=0.4)]])
def test_a_cancelled_step_closes_the_objects_of_its_episode(tools: list[Any]) -> None:
    tools_of_a_user.closed.clear()
    made = environment(*tools)

    async def play() -> None:
        task = asyncio.create_task(step(made, asks(call("hold", {}))))
        await asyncio.sleep(0.2)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(play())
    assert (tools_of_a_user.closed, made._episodes) == ([-1], {})


def test_an_object_that_does_not_close_costs_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_rl_core.environments.tools.environment._CLOSE_SECONDS", 0.1)
    made = environment(session(closing=99), call_timeout_seconds=0.1)

    async def play() -> EnvironmentReturn:
        first = await step(made, asks(call("hold", {})))
        return await step(made, {"role": "assistant", "content": "408"}, first.metadata[0])

    assert asyncio.run(play()).rewards.tolist() == [1.0]


class Opened:
    """A source with one tool; counts how often it was opened and closed."""

    def __init__(self, name: str, *, stateful: bool, parameters: Any = None) -> None:
        self.schemas = [{"type": "function", "function": {"name": name, "parameters": parameters}}]
        self.name, self.stateful, self.counts = name, stateful, [0, 0]

    async def open(self, row: Mapping[str, Any], stack: AsyncExitStack) -> dict[str, Any]:
        async def call() -> str:
            raise BrokenToolError(f"{self.name} has ended")

        async def close() -> None:
            self.counts[1] += 1

        self.counts[0] += 1
        stack.push_async_callback(close)
        return {self.name: call}


def test_a_session_that_ends_costs_only_its_own_episode() -> None:
    shared, each = Opened("shared", stateful=False), Opened("each", stateful=True)
    made = ToolEnvironment(ToolUse(), [shared, each], Answers())

    async def play() -> list[Any]:
        seen = []
        for name in ("each", "shared", "shared"):
            answer = await step(made, asks(call(name, {}), call(name, {})))
            seen.append((answer.errors, [*shared.counts]))
        return seen

    assert asyncio.run(play()) == [
        (["each has ended"], [1, 0]),
        (["shared has ended"], [1, 1]),
        (["shared has ended"], [2, 2]),
    ]
    assert each.counts == [3, 3]


def test_a_schema_that_cannot_be_checked_is_an_answer() -> None:
    source = Opened("ask", stateful=False, parameters={"type": "objekt"})
    made = ToolEnvironment(ToolUse(), [source], Answers())
    ((content, outcome),) = contents(made, call("ask", {}))
    assert (content[:18], outcome) == ("error: UnknownType", "raised")


def test_calls_that_still_run_after_their_time_limit_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calling, "_MAX_LEFT", 1)
    monkeypatch.setattr(calling, "_left", set())
    made = environment("sleep", "echo", call_timeout_seconds=0.1)
    assert contents(made, call("sleep", {"seconds": 0.5}))[0][1] == "timeout"
    (error,) = asyncio.run(step(made, asks(call("echo", {"text": "a"})))).errors or ()
    assert error == "1 calls of tools that have timed out are still running"
    time.sleep(0.5)
    assert contents(made, call("echo", {"text": "a"})) == [("a", "answered")]


def test_the_actor_of_an_environment_keeps_the_objects_of_its_episodes() -> None:
    tools_of_a_user.closed.clear()
    actor = _EnvironmentActor(lambda: environment("Account"))
    assert actor.start().is_stateful
    turn = asks(call("pay", {"amount": 2}))
    metadata = {**ROW, SHOWN_TOOLS: schemas_of([FunctionTool(target=f"{MODULE}:Account")])}
    seen = []
    for _ in range(2):
        ((reply, _),) = actor.run([_Turn([QUESTION, turn], metadata)])
        metadata = reply.metadata
        seen.append(reply.messages[0]["content"])
    actor.run([_End(metadata)])
    assert (seen, tools_of_a_user.closed) == (["-2", "-4"], [-4])
    actor.close()


def test_an_object_cannot_speak_before_the_policy() -> None:
    (error,) = asyncio.run(step(environment("Greeting"), asks(call("greet", {})))).errors or ()
    assert "Greeting.reset returned str" in str(error)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("without_hint", "query is missing a type hint"),
        ("without_description", "no description for the argument 'query'"),
        ("without_docstring", "it has no docstring"),
        ("Empty", "has no tools"),
        ("nothing", "no function"),
    ],
)
def test_a_tool_that_cannot_be_described_is_refused_before_the_run(
    target: str, message: str
) -> None:
    config = ToolUse.model_validate({"tools": [f"{MODULE}:{target}"]})
    with pytest.raises(ConfigError, match=message):
        check_targets(config)


def test_the_arguments_of_a_class_and_equal_names_are_checked() -> None:
    wrong = {"kind": "function", "target": f"{MODULE}:Account", "arguments": {"money": 1}}
    with pytest.raises(ConfigError, match="money"):
        check_targets(ToolUse.model_validate({"tools": [wrong]}))
    twice = [{**wrong, "arguments": {"balance": balance}} for balance in (1, 2)]
    with pytest.raises(ConfigError, match="several tools of the name 'pay'"):
        check_targets(ToolUse.model_validate({"tools": twice}))
    with pytest.raises(ValueError, match="repeats a tool"):
        ToolUse.model_validate({"tools": [f"{MODULE}:echo"] * 2})


def test_schemas_are_those_of_transformers() -> None:
    from transformers.utils import get_json_schema

    config = ToolUse.model_validate({"tools": [f"{MODULE}:echo", f"{MODULE}:Account"]})
    assert schemas_of(config.tools) == [
        get_json_schema(tools_of_a_user.echo),
        get_json_schema(tools_of_a_user.Account.pay),
    ]


def test_methods_of_a_class_without_an_object_are_tools_too() -> None:
    made = environment("Names")
    names = [schema["function"]["name"] for schema in made.tools]
    assert names == ["of_nobody", "of_the_class"]
    assert contents(made, call("of_the_class", {}), call("of_nobody", {})) == [
        ("Names", "answered"),
        ("nobody", "answered"),
    ]


def test_the_source_of_a_tool_is_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    served = {"kind": "mcp", "command": [sys.executable, "server.py"]}
    for tool in ("key_tools:a", served):
        config = ToolUse.model_validate({"tools": [tool]})
        digests = []
        for text in ("a = 1", "a = 2"):
            Path("key_tools.py").write_text(text)
            Path("server.py").write_text(text)
            digests.append(reward_content(config))
        assert digests[0] != digests[1]


def test_only_tools_that_the_row_names_can_be_called() -> None:
    made = environment("echo", "sleep")
    before = {**ROW, SHOWN_TOOLS: made.tools[:1]}
    answer = asyncio.run(step(made, asks(call("sleep", {"seconds": 0})), before))
    assert answer.observations[0][0]["content"] == "error: there is no tool 'sleep', only echo"


@pytest.mark.parametrize(
    ("turn", "found"),
    [
        ("408", None),
        ("", None),
        ("</tool>", None),
        ("<tool>calculator 1 + 2</tool>", TextCall("calculator", "1 + 2")),
        ("Well: <tool> calculator: 1 + 2 </tool> 3", TextCall("calculator", "1 + 2")),
        ("<tool>python\nx = 1\nprint(x)\n</tool>", TextCall("python", "x = 1\nprint(x)")),
        ("<tool>calculator 1 + 2", TextCall("calculator", "1 + 2")),
        ("<tool>a 1</tool><tool>b 2</tool>", TextCall("a", "1")),
        ("<tool></tool>", TextCall("", "")),
        ("<tool>clock</tool>", TextCall("clock", "")),
    ],
)
def test_calls_in_text_are_found(turn: str, found: TextCall | None) -> None:
    assert find_call(turn) == found


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("<tool>calculator 12 * 34</tool>", "408"),
        ("<tool>sleep 0</tool>", "0"),
        ('<tool>echo {"text": "ab", "times": 2}</tool>', "abab"),
        ("<tool>echo </result>a<tool>b</tool>", "ab"),
        ("<tool>clock</tool>", "error: there is no tool 'clock', only calculator, echo, sleep"),
    ],
)
def test_without_a_template_for_tools_calls_are_text(text: str, result: str) -> None:
    made = environment({"kind": "calculator"}, "echo", "sleep")
    answer = asyncio.run(step(made, {"role": "assistant", "content": text}, ROW))
    (turn,) = answer.observations[0]
    assert (turn["role"], turn["content"]) == ("environment", f"\n<result>{result}</result>\n")
    assert answer.next_stop_strings == [["</tool>"]]


def test_conversations_of_a_step_are_scored_together() -> None:
    made = environment("echo")
    logs = [[QUESTION, {"role": "assistant", "content": text}] for text in ("408", "1", "408")]
    answer = asyncio.run(made.step(logs, [ROW] * 3))
    assert answer.rewards.tolist() == [1.0, 0.0, 1.0]
    assert len(made._scorer.batches) == 1  # type: ignore[attr-defined]


def test_a_reward_function_reads_the_conversation() -> None:
    answer = {"kind": "function", "target": f"{MODULE}:few_calls"}
    scorer: Any = make_scorer(ToolUse.model_validate({"answer": answer}))
    result = {"role": "tool", "content": "408"}
    log = [QUESTION, asks(), result, {"role": "assistant", "content": "408"}]
    returned = asyncio.run(scorer.environment.step([log], [ROW]))
    assert (returned.errors, returned.rewards.tolist()) == ([None], [0.25])


def test_the_config_makes_an_environment() -> None:
    scorer = make_scorer(ToolUse())
    assert isinstance(scorer, EnvironmentScorer)
    scorer.close()


@pytest.mark.slow
def test_a_server_answers_fails_and_is_started_again() -> None:
    made = environment({"kind": "mcp", "command": SERVER})
    each = environment({"kind": "mcp", "command": SERVER, "session": "episode"})
    assert (made.stateful, each.stateful) == (False, True)
    assert [each["function"]["name"] for each in made.tools] == ["lookup"]

    async def play() -> list[Any]:
        seen: list[Any] = []
        for served, cities in ((made, ["Rome", "Oslo", "Atlantis", "Rome"]), (each, ["Rome"] * 2)):
            for city in cities:  # each in a new episode
                answer = await step(served, asks(call("lookup", {"city": city})))
                (error,) = answer.errors or ()
                seen.append(error or answer.observations[0][0]["content"])
            await served._close()
        return seen

    first, second, error, again, *others = asyncio.run(play())
    assert (first, second) == ("Rome is call 1", "Oslo is call 2")
    assert "Connection closed" in error
    assert again == "Rome is call 1"
    assert others == ["Rome is call 1"] * 2


@pytest.mark.slow
def test_a_server_that_hangs_is_replaced() -> None:
    made = environment({"kind": "mcp", "command": SERVER}, call_timeout_seconds=2)

    async def answer(city: str) -> str:
        answered = await step(made, asks(call("lookup", {"city": city})))
        assert answered.errors in (None, [None])
        return str(answered.observations[0][0]["content"])

    async def play() -> list[Any]:
        process = int(await answer("process"))
        # Another episode's call waits at the same server.
        hung = await asyncio.gather(answer("Pompeii"), answer("Oslo"))
        seen = [*hung, await answer("Rome"), process, int(await answer("process"))]
        await made._close()
        return seen

    one, two, again, *processes = asyncio.run(play())
    assert (one, two) == ("error: no answer within 2 s",) * 2
    assert again == "Rome is call 1"
    assert len({*processes}) == 2
    assert not any(map(is_alive, processes))


@pytest.mark.slow
def test_a_running_server_is_called_over_http() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        subprocess.Popen([*SERVER, str(port)], stderr=subprocess.DEVNULL) as server,
        ExitStack() as stack,
    ):
        stack.callback(server.kill)
        for _ in range(300):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        made = environment({"kind": "mcp", "url": f"http://127.0.0.1:{port}/mcp"})

        async def play() -> list[Any]:
            one = await step(made, asks(call("lookup", {"city": "Rome"})))
            server.kill()
            server.wait()
            two = await step(made, asks(call("lookup", {"city": "Rome"})))
            await made._close()
            return [one.observations[0][0]["content"], *(two.errors or ())]

        answer, error = asyncio.run(play())
    assert answer == "Rome is call 1"
    assert "MCP server of the tool 'lookup' does not answer" in error


@pytest.mark.slow
def test_a_server_that_does_not_start_is_refused() -> None:
    config = ToolUse.model_validate(
        {"tools": [{"kind": "mcp", "command": [sys.executable, "-c", "1/0"]}]}
    )
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        check_targets(config)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(RuntimeError("no text"), ValueError), (OSError("closed"), BrokenToolError)],
)
def test_a_result_that_does_not_fit_its_schema_does_not_close_the_server(
    error: Exception, raised: type[Exception]
) -> None:
    class Client:
        async def call_tool(self, name: str, arguments: Any) -> Any:
            raise error

    with pytest.raises(raised):
        asyncio.run(_call(Client(), "lookup"))  # type: ignore[arg-type]


SILENT = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request.get("method") == "initialize":
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
        result["serverInfo"] = {"name": "silent", "version": "1"}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
    elif "id" in request and request["method"] != "tools/list":
        error = {"code": -32601, "message": "no"}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}), flush=True)
"""


@pytest.mark.slow
def test_a_server_that_does_not_list_its_tools_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_rl_core.environments.tools.mcp_source._START_SECONDS", 3.0)
    config = ToolUse.model_validate(
        {"tools": [{"kind": "mcp", "command": [sys.executable, "-c", SILENT]}]}
    )
    with pytest.raises(ConfigError, match="cannot be asked for its tools"):
        check_targets(config)
