"""Environments of the real package `verifiers`.

Its pinned versions conflict with this project's, so it is not in a lock: `make test-verifiers`
installs it in addition to the environment and runs this file; without it all tests except the first
are skipped.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nemo_rl_core import train
from nemo_rl_core.environments.multi_turn import verifiers as verifiers_adapter
from nemo_rl_core.environments.multi_turn.verifiers import VerifiersEnvironment
from nemo_rl_core.errors import ConfigError

QUESTIONS = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
is_installed = importlib.util.find_spec("verifiers") is not None
needs_verifiers = pytest.mark.skipif(
    not is_installed, reason="verifiers is not installed: `make test-verifiers` has it"
)


def test_a_missing_verifiers_package_is_refused() -> None:
    code = (
        "import sys; sys.modules['verifiers'] = None\n"
        "from nemo_rl_core.environments.multi_turn.verifiers import VerifiersEnvironment\n"
        "VerifiersEnvironment('math-python')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ConfigError: the package verifiers is not installed" in done.stderr


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An environment that repeats turns until the turn "end", by the interface of `verifiers`."""
    client_class = type(
        "Client", (), {"__init__": lambda self, client: vars(self).update(client=client)}
    )
    client_class.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    for name, members in {
        "verifiers": {},
        "verifiers.types": {"ResponseMessage": SimpleNamespace, "Response": SimpleNamespace},
        "verifiers.clients": {"Client": client_class},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)

    async def rollout(row: Any, client: Any, model: str, _: Any) -> dict[str, Any]:
        messages = list(row["prompt"])
        while True:
            text = (await client.get_response(messages, model)).message.content
            if text == "boom":
                raise RuntimeError("no such turn")
            if text == "end":
                return {"reward": 1.0}
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": text}]

    async def score_rollout(state: Any) -> None:
        state["reward"] += 1

    environment = VerifiersEnvironment(
        SimpleNamespace(rollout=rollout, rubric=SimpleNamespace(score_rollout=score_rollout))
    )
    yield environment
    environment.shutdown()


ROW = {"prompt": [{"role": "user", "content": "0+1="}]}


def test_running_episodes_stay_and_failed_ones_go(echo: Any) -> None:
    first = echo.step(turns([ROW, ROW, ROW], "a", "b", "c"), [{}, {}, {}])
    assert [each["content"] for each in first.observations] == ["a", "b", "c"]
    assert len(echo._episodes) == 3
    idle = next(iter(echo._episodes.values()))
    idle.last_turn -= verifiers_adapter._IDLE_SECONDS
    echo.step(turns([ROW], "d"), [{}])  # begins an episode, which drops the idle one
    last = echo.step(turns([ROW, ROW, ROW], "a", "end", "boom"), first.metadata)
    assert last.rewards.tolist()[1] == 2.0
    assert "had no turn for an hour" in str(last.errors[0])
    assert "no such turn" in str(last.errors[2])
    assert len(echo._episodes) == 1


def exact(completion: Any, answer: str, **_: Any) -> float:
    last = completion[-1]
    text = last["content"] if isinstance(last, dict) else last.content
    return 1.0 if text.strip() == answer else 0.25


def make(kind: str) -> Any:
    import verifiers
    from datasets import Dataset

    from nemo_rl_core.environments.multi_turn.verifiers import VerifiersEnvironment

    class Again(verifiers.MultiTurnEnv):  # type: ignore[misc]
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            if "boom" in str(messages[-1].content):
                raise RuntimeError("no such turn")
            return [{"role": "user", "content": f"after {len(messages)}:"}]

    options = {"dataset": Dataset.from_list(QUESTIONS), "rubric": verifiers.Rubric(funcs=[exact])}
    if kind == "single":
        return VerifiersEnvironment(verifiers.SingleTurnEnv(**options))
    return VerifiersEnvironment(Again(max_turns=2, **options))


def turns(rows: list[dict[str, Any]], *texts: str) -> list[list[dict[str, str]]]:
    return [
        [*row["prompt"], {"role": "assistant", "content": text}]
        for row, text in zip(rows, texts, strict=True)
    ]


@needs_verifiers
def test_one_turn_is_scored_by_the_rubric() -> None:
    environment = make("single")
    rows = environment.rows(2)
    assert rows[0] == {
        "prompt": [{"role": "user", "content": "0+1="}],
        "answer": "1",
        "metadata": {"info": {}},
    }
    result = environment.step(turns(rows, "1", "1"), [{"answer": row["answer"]} for row in rows])
    assert result.rewards.tolist() == [1.0, 0.25]
    assert result.terminateds.tolist() == [True, True]
    environment.shutdown()


@needs_verifiers
def test_several_turns_are_answered_and_an_error_affects_only_its_row() -> None:
    environment = make("multi")
    rows = environment.rows(2)
    logs = turns(rows, "5", "boom")
    first = environment.step(logs, [{"answer": row["answer"]} for row in rows])
    assert first.observations[0] == {"role": "environment", "content": "after 2:"}
    assert first.terminateds.tolist() == [False, True]
    assert first.errors is not None
    assert "no such turn" in str(first.errors[1])
    log = [*logs[0], first.observations[0], {"role": "assistant", "content": "1"}]
    # An actor gets a copy of its metadata back.
    (about,) = json.loads(json.dumps(first.metadata[:1]))
    last = environment.step([log], [about])
    assert (last.rewards.tolist(), last.terminateds.tolist()) == ([1.0], [True])
    elsewhere = environment.step([log], [about])
    assert "the episode is in another process" in str(elsewhere.errors)
    environment.shutdown()


@needs_verifiers
def test_a_policy_trains_on_episodes(tiny_model: Path) -> None:
    from tests.unit.trainers.test_own_policy import ROLLOUTS, CustomPolicy

    environment = make("multi")
    result = train(
        CustomPolicy(str(tiny_model)),
        environment.rows(),
        reward_fn=environment,
        loss={"kl": None},
        rollouts={"max_turns": 2, "max_rollout_tokens": 40},
        **ROLLOUTS,
    )
    assert all(0.0 <= step["reward"] <= 1.0 for step in result.metrics)
    assert result.metrics[0]["reward"] > 0
    environment.shutdown()


@needs_verifiers
def test_tools_of_the_chat_template_are_refused() -> None:
    import verifiers
    from datasets import Dataset

    from nemo_rl_core.environments.multi_turn.verifiers import VerifiersEnvironment

    def double(number: int) -> int:
        """Doubles.

        Args:
            number: Number to double.
        """
        return 2 * number

    tools = verifiers.ToolEnv(tools=[double], dataset=Dataset.from_list(QUESTIONS))
    with pytest.raises(ConfigError, match="ToolEnv offers tools through the chat template"):
        VerifiersEnvironment(tools)
    with pytest.raises(ConfigError, match="verifiers cannot load the environment 'no-such-env'"):
        VerifiersEnvironment("no-such-env")
