"""Settings of agents in a recipe, and the files of agents in the cache key."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from nemo_rl_core.config.agents import AgentEnvironment
from nemo_rl_core.config.environment import (
    ByTask,
    EnvironmentConfig,
    is_multi_turn,
    model_scorers,
    single_environments,
)
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.environments.contents import reward_content
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.needs import check_targets, missing_columns
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.types import Prompt, unscored

AGENT = """
from helpers.english.words import WORDS
from pathlib import Path
PROMPT = Path(__file__).with_name("prompt.txt")

async def run(base_url, api_key, row):
    return 1.0

def two(base_url, api_key):
    return 1.0
"""
PROMPT = Prompt("7", "2+2=", (1,), "4", "sums")


def read(**values: Any) -> Any:
    return TypeAdapter(EnvironmentConfig).validate_python({"kind": "agent", **values})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "counting_agent.py": AGENT,
        "prompt.txt": "count",
        "helpers/english/words.py": "WORDS = ['one']",
        "helpers/other.py": "",
        "scripts/agent.py": "import near\n",
        "scripts/near.py": "ONE = 1",
        "near.py": "hidden",
        "notes.md": "later",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "values", [{}, {"command": ["a"], "target": "b:c"}, {"command": []}, {"target": "no_function"}]
)
def test_an_agent_is_one_program(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        read(**values)


def test_unknown_keys_and_rewards_of_token_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="timeout"):
        read(command=["a"], timeout=3)
    with pytest.raises(ValidationError, match="reward_model"):
        read(command=["a"], reward={"kind": "reward_model"})
    task = {"task": "sums", "environment": {"kind": "agent", "command": ["a"]}}
    with pytest.raises(ValidationError, match="agent"):
        ByTask.model_validate({"tasks": [task]})


def test_the_reward_of_an_agent_is_one_of_the_run() -> None:
    judge = {"kind": "llm_judge", "judge": {"kind": "model", "model": "judges/one"}}
    config = read(command=["a"], reward=judge)
    assert is_multi_turn(config)
    assert single_environments(config) == [config.reward]
    assert [each.path for each in model_scorers(config)] == ["environment.reward.judge"]
    assert not single_environments(read(command=["a"]))
    assert list(missing_columns(read(command=["a"], reward={"kind": "exact"}))(PROMPT)) == []
    assert list(missing_columns(read(command=["a"]))(Prompt("", "", (), "", ""))) == []


def test_only_an_environment_reward_scores_texts() -> None:
    exact = make_scorer(read(command=["a"], reward={"kind": "exact"}))
    assert exact.score([unscored(PROMPT, "4")]) == [1.0]
    (error,) = make_scorer(read(command=["a"])).score([unscored(PROMPT, "4")])
    assert "the agent computes the reward" in str(error)
    with pytest.raises((ConfigError, ValidationError), match="agent computes its reward"):
        RolloutSettings.model_validate(
            {"environment": {"kind": "agent", "command": ["a"]}, "environment_workers": {}}
        )


@pytest.mark.parametrize(
    ("changed", "values", "counts"),
    [
        ("counting_agent.py", {"target": "counting_agent:run"}, True),
        ("helpers/english/words.py", {"target": "counting_agent:run"}, True),
        ("prompt.txt", {"target": "counting_agent:run"}, True),
        ("helpers/other.py", {"target": "counting_agent:run"}, False),
        ("counting_agent.py", {"command": ["python", "counting_agent.py"]}, True),
        ("helpers/english/words.py", {"command": ["python", "counting_agent.py"]}, True),
        ("helpers/english/words.py", {"command": ["python", "-m", "counting_agent"]}, True),
        ("scripts/near.py", {"command": ["python", "scripts/agent.py"]}, True),
        ("near.py", {"command": ["python", "scripts/agent.py"]}, False),
        ("scripts/near.py", {"command": ["sh", "scripts"]}, True),
        ("notes.md", {"command": ["cat", "notes.md", "{prompt}"]}, True),
        ("notes.md", {"command": ["true"], "files": ["helpers", "notes.md"]}, True),
        ("helpers/other.py", {"command": ["true"], "files": ["helpers", "notes.md"]}, True),
        ("prompt.txt", {"command": ["true"], "files": ["helpers", "notes.md"]}, False),
    ],
)
def test_the_files_of_an_agent_count(
    folder: Path, changed: str, values: dict[str, Any], counts: bool
) -> None:
    before = reward_content(read(**values))
    (folder / changed).write_text("CHANGED = 2\n")
    assert (reward_content(read(**values)) != before) == counts


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"command": ["no-such-program"]}, "program 'no-such-program' does not exist"),
        ({"command": ["python", "no_such_agent.py"]}, "no_such_agent.py"),
        ({"command": ["true"], "files": ["no_folder"]}, "no_folder"),
        ({"command": ["true"], "variables": ["NO_SUCH_KEY"]}, "export NO_SUCH_KEY"),
        ({"target": "no_such_module:run"}, "cannot be imported"),
        ({"target": "counting_agent:walk"}, "has no function"),
        ({"target": "counting_agent:two"}, "cannot be called as an agent"),
    ],
)
def test_what_an_agent_lacks_is_refused_before_a_run(
    folder: Path, values: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        check_targets(read(**values))


def test_programs_are_found_next_to_this_python(folder: Path) -> None:
    check_targets(read(command=["python", "counting_agent.py", "{prompt}.py"]))
    check_targets(AgentEnvironment(target="counting_agent:run"))
