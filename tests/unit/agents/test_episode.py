"""Episodes of agents in their own processes: their samples, rewards and failures."""

import asyncio
import json
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.agents.episode import AgentEpisode, Agents
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.data.renderer import Renderer
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.rollouts.engine import CompletionRequest, RolloutIndex
from nemo_rl_core.rollouts.episode import PlayedEpisode
from nemo_rl_core.types import Prompt
from tests.unit.agents.conftest import RecordedEngine
from tests.unit.agents.test_process import is_alive

CALCULATOR = """
import json
from openai import AsyncOpenAI

TOOLS = [{"type": "function", "function": {
    "name": "add", "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"},
                                                    "b": {"type": "number"}}}}}]

async def run(base_url, api_key, row):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = row["messages"]
    while True:
        answer = await client.chat.completions.create(
            model="any", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return float(message.content == row["answer"])
        for call in message.tool_calls:
            total = sum(json.loads(call.function.arguments).values())
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": str(total)})
"""
ASK = """
import json, os, sys, time, urllib.request
row = json.load(sys.stdin)
def ask(text, **fields):
    body = {"model": "any", "messages": [{"role": "user", "content": text}], **fields}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
         "Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
def report(text):
    open(os.environ["NEMO_RL_REWARD_FILE"], "w").write(text)
"""


def agents_of(engine: RecordedEngine, environment: dict[str, Any], *, max_turns: int = 5) -> Agents:
    settings = RolloutSettings.model_validate(
        {
            "environment": {"kind": "agent", **environment},
            "rollouts": {"max_turns": max_turns, "max_rollout_tokens": 400},
            "generation": {"max_new_tokens": 100},
        }
    )
    return Agents(settings, engine.tokenizer, make_scorer(settings.environment))


def play(
    engine: RecordedEngine,
    environment: dict[str, Any],
    prompts: Sequence[tuple[str, str]] = (("Hi", ""),),
    *,
    max_turns: int = 5,
    metadata: str = "{}",
) -> list[Sequence[PlayedEpisode]]:
    renderer = Renderer(engine.tokenizer)

    async def played() -> list[Sequence[PlayedEpisode]]:
        agents = agents_of(engine, environment, max_turns=max_turns)
        episodes = []
        for number, (text, answer) in enumerate(prompts):
            ids = tuple(renderer.opening([{"role": "user", "content": text}], row="0"))
            prompt = Prompt(str(number), text, ids, answer, "chat", metadata)
            episodes.append(AgentEpisode(agents, prompt, RolloutIndex(7, 3, number, 0)))
        try:
            return list(await asyncio.gather(*(each.play(engine) for each in episodes)))
        finally:
            await agents.close()

    return asyncio.run(played())


def python(code: str, **options: Any) -> dict[str, Any]:
    return {"command": [sys.executable, "-c", ASK + code], **options}


def one(played: list[Sequence[PlayedEpisode]]) -> PlayedEpisode:
    ((sample,),) = played
    return sample


def test_eight_agents_call_a_tool_at_once(
    chat_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "calculator.py").write_text(CALCULATOR)
    by_prompt = {}

    def text(request: CompletionRequest) -> str:
        new_text = chat_tokenizer.decode(request.token_ids)
        if request.before is None:
            a, b = new_text.rpartition("user\n")[2].partition("<|im_end|>")[0].split("+")
            call = {"name": "add", "arguments": {"a": int(a), "b": int(b)}}
            return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return new_text.partition("<tool_response>\n")[2].partition("\n")[0]

    engine = RecordedEngine(chat_tokenizer, text)
    prompts = [(f"{n}+{n * n}", str(n + n * n + n % 2)) for n in range(8)]
    played = play(engine, {"target": "calculator:run", "max_concurrent": 8}, prompts)
    full = [(*prompt, *new) for prompt, new in engine.completions]
    for number, (sample,) in enumerate(played):
        # A wrong reference for odd numbers; the agent compares.
        assert (sample.reward, sample.error) == (1.0 - number % 2, None)
        assert sample.turns.rewards == (0.0, 1.0 - number % 2)
        assert [each["role"] for each in sample.turns.messages] == [
            *("user", "assistant", "tool", "assistant")
        ]
        block = sample.sequence.row.reference.block
        ids = tuple(block["input_ids"][sample.sequence.row.number].tolist())
        assert ids in full
        assert sample.prompt_ids == ids[: len(sample.prompt_ids)]
        by_prompt[sample.prompt_ids] = ids
    assert len(by_prompt) == 8  # the tools are in the prompt, and no session got another's


def test_paths_of_an_agent_share_its_reward(engine: RecordedEngine) -> None:
    code = 'ask("Hi"); ask("Summary"); report(json.dumps({"reward": 0.25}))'
    ((first, second),) = play(engine, python(code))
    assert [first.reward, second.reward] == [0.25, 0.25]
    texts = {each.turns.messages[0]["content"]: each.prompt_ids for each in (first, second)}
    assert texts.keys() == {"Hi", "Summary"}
    assert texts["Hi"] is None  # it shares the prompt's tokens
    assert texts["Summary"] is not None


def test_the_policy_cannot_print_its_reward(chat_tokenizer: Any) -> None:
    engine = RecordedEngine(chat_tokenizer, lambda request: '{"reward": 9}')
    sample = one(play(engine, python('report("0.5"); print(ask("Hi"))')))
    assert sample.reward == 0.5
    sample = one(play(engine, python('print(ask("Hi"))')))
    assert (sample.reward, "wrote no reward" in str(sample.error)) == (None, True)


def test_a_scorer_reads_the_last_turn(engine: RecordedEngine) -> None:
    code = 'ask("Hi"); ask(row["prompt"] + "?"); sys.exit(row["answer"] == "no")'
    environment = python(code, reward={"kind": "regex", "pattern": r"The answer is \d+\."})
    played = play(engine, environment, [("one", ""), ("two", ""), ("three", "no")])
    assert [[each.reward for each in samples] for samples in played] == [
        *([1.0, 1.0], [1.0, 1.0], [None, None])
    ]
    assert "exit code 1" in str(played[2][0].error)


@pytest.mark.parametrize(
    ("code", "options", "error"),
    [
        ("sys.stderr.write('no key'); sys.exit(3)", {}, "ended with exit code 3; got: .*no key"),
        ("ask('Hi'); report('1'); sys.exit(3)", {}, "exit code 3"),
        ("ask('Hi'); os.kill(os.getpid(), 9)", {}, "exit code -9"),
        ("ask('Hi'); time.sleep(99)", {"episode_timeout_seconds": 1.5}, "did not end in time"),
        ("ask('Hi')", {}, "wrote no reward.*got: ''; output ''"),
        ("ask('Hi'); print('{\"reward\": 1}')", {}, "no reward to the file of NEMO_RL"),
        ("ask('Hi'); report('[' * 60_000)", {}, "wrote no reward"),
        ("ask('Hi'); os.mkfifo(os.environ['NEMO_RL_REWARD_FILE'])", {}, "wrote no reward"),
        ("ask('Hi'); report('{}')", {}, "wrote no reward"),
        ("ask('Hi'); report('NaN')", {}, "not finite"),
        ("ask('Hi'); report('null')", {}, "not a number"),
        ("report('1')", {}, "sampled nothing"),
        ("ask('Hi', temperature=0.5)", {}, "exit code 1.*HTTP Error 400"),
    ],
)
def test_failures_are_errors_of_their_episode(
    engine: RecordedEngine, code: str, options: dict[str, Any], error: str
) -> None:
    sample = one(play(engine, python(code, **options)))
    assert sample.reward is None
    assert sample.error is not None
    assert re.search(error, sample.error), sample.error


@pytest.mark.parametrize("is_scored", [False, True])
def test_an_agent_that_stops_at_a_limit_can_be_scored(
    engine: RecordedEngine, is_scored: bool
) -> None:
    code = """
messages = [{"role": "user", "content": "Hi"}]
while True:
    messages.append({"role": "assistant", "content": ask("", messages=messages)})
    messages.append({"role": "user", "content": "More."})
"""
    reward = {"reward": {"kind": "regex", "pattern": "The.*"}} if is_scored else {}
    sample = one(play(engine, python(code, **reward), max_turns=2))
    assert sample.truncated
    assert len(sample.turns.rewards) == 2
    if is_scored:
        assert (sample.reward, sample.turns.rewards) == (1.0, (0.0, 1.0))
    else:
        assert "exit code 1" in str(sample.error)


def test_a_child_that_outlives_its_agent_is_ended(engine: RecordedEngine, tmp_path: Path) -> None:
    noted = tmp_path / "child"
    code = f"""
ask("Hi")
child = os.fork()
if child == 0:
    os.setsid()
    time.sleep(1000)
    ask("later")
open({str(noted)!r}, "w").write(str(child))
report('1')
"""
    assert one(play(engine, python(code))).reward == 1.0
    assert len(engine.requests) == 1
    assert not is_alive(int(noted.read_text()))


def test_a_run_that_stops_ends_its_agents(engine: RecordedEngine, tmp_path: Path) -> None:
    noted = tmp_path / "process"
    code = f'ask("Hi"); open({str(noted)!r}, "w").write(str(os.getpid())); time.sleep(1000)'

    async def stop() -> None:
        agents = agents_of(engine, python(code))
        episode = AgentEpisode(agents, Prompt("0", "Hi", (), "", ""), RolloutIndex(7, 3, 0, 0))
        playing = asyncio.create_task(episode.play(engine))
        while not (noted.exists() and noted.read_text()):
            await asyncio.sleep(0.02)
        await agents.close()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(asyncio.wait_for(stop(), 60))
    assert not is_alive(int(noted.read_text()))


def test_no_port_remains(engine: RecordedEngine, tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    code = f'ask("Hi"); open({str(noted)!r}, "w").write(os.environ["OPENAI_BASE_URL"])'
    play(engine, python(code))
    port = int(noted.read_text().removesuffix("/v1").rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_scorer_that_raises_ends_no_other_episode(
    engine: RecordedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward.py").write_text(
        "def score(completion, answer):\n    return 1 / int(answer)\n"
    )
    environment = python('ask("Hi")', reward={"kind": "function", "target": "my_reward:score"})
    (one_sample,), (other,) = play(engine, environment, [("a", "0"), ("b", "4")])
    assert (one_sample.reward, other.reward) == (None, 0.25)
    assert "ZeroDivisionError" in str(one_sample.error)


def test_a_changed_agent_is_refused(
    chat_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first episode rewrites the program, which the second would run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nemo_rl_core.agents.episode._CHECK_SECONDS", 0.0)
    program = tmp_path / "my_agent.py"
    code = ASK + "ask('Hi'); report('1')\n"
    program.write_text(code)

    def text(request: CompletionRequest) -> str:
        program.write_text(f"{code}CHANGED = 1\n")
        return "Hello."

    engine = RecordedEngine(chat_tokenizer, text)
    environment = {"command": ["python", "my_agent.py"], "max_concurrent": 1}
    with pytest.raises(ConfigError, match="have changed since the run began"):
        play(engine, environment, [("a", ""), ("b", "")])
    assert len(engine.requests) == 1
