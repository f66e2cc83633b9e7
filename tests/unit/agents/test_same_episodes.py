"""An agent samples the tokens of the same episodes in the environment of the project."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.agents.episode import AgentRollouts
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.generation.hugging_face import HuggingFaceBackend
from nemo_rl_core.config.agents import AgentEnvironment
from nemo_rl_core.config.generated_data import GuessNumberData
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.data.datasets.generated import guess_number_rows
from nemo_rl_core.data.pretrained import load_tokenizer, stop_token_ids
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.environments.multi_turn.games import GameEnvironment
from nemo_rl_core.games.guess_number import NumberGuess
from nemo_rl_core.rollouts.episode import Bounds
from nemo_rl_core.rollouts.multi_turn import MultiTurnRollouts
from nemo_rl_core.rollouts.stream import RolloutStream
from nemo_rl_core.types import Prompt, Rollout
from tests.unit.rollouts.test_stream import Engine

AGENT = {"kind": "agent", "target": "tests.unit.agents.guessing_agent:run", "max_concurrent": 8}
SETTINGS = RolloutSettings.model_validate(
    {
        "environment": AGENT,
        "rollouts": {"max_turns": 6, "max_rollout_tokens": 84},
        "generation": {"backend": "hf", "max_new_tokens": 4},
        "seed": 5,
    }
)


class OwnPace(GameEnvironment):
    """The game, each conversation at its own pace, as those of agents."""

    async def step(self, *args: Any) -> EnvironmentReturn:  # type: ignore[override]
        return super().step(*args)


class InThisProcess:
    """A transformers model without workers."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self._backend = HuggingFaceBackend()
        setup = GenerationSetup(
            model_folder=folder,
            config=SETTINGS.generation,
            max_model_len=132,
            stop_token_ids=stop_token_ids(folder, tokenizer),
        )
        self._backend.setup(setup)

    def generate(self, batch: Any, greedy: bool) -> Any:
        return self._backend.generate(batch, greedy=greedy)


@pytest.fixture(scope="module")
def played(tiny_model: Path) -> Iterator[tuple[Sequence[Rollout], Sequence[Rollout]]]:
    tokenizer = load_tokenizer(tiny_model)
    engine: Any = InThisProcess(tiny_model, tokenizer)
    data = GuessNumberData(max_number=9, num_train=4, num_validation=1)
    rows, _ = guess_number_rows(data, seed=2)
    prompts = [
        Prompt(
            str(row["id"]),
            row["prompt"],
            tuple(prompt_token_ids(tokenizer, row["prompt"])),
            row["answer"],
            row["task"],
            row["metadata"],
        )
        for row in rows
    ]
    agents = AgentRollouts(engine, tokenizer, SETTINGS, make_scorer(SETTINGS.environment))
    game = OwnPace(NumberGuess, illegal_penalty=0.25)
    turns = MultiTurnRollouts(
        engine, tokenizer, game, seed=SETTINGS.seed, bounds=Bounds.of(SETTINGS)
    )
    options: dict[str, Any] = {"num_generations_per_prompt": 4, "step": 3}
    try:
        yield list(agents.run(prompts, **options)), list(turns.run(prompts, **options))
    finally:
        agents.close()


def test_an_agent_samples_the_tokens_of_the_environment(
    played: tuple[Sequence[Rollout], Sequence[Rollout]],
) -> None:
    of_agents, of_turns = played
    assert len(of_agents) == len(of_turns) == 16
    for one, other in zip(of_agents, of_turns, strict=True):
        assert one.error is other.error is None
        assert (one.group, one.sample, one.prompt) == (other.group, other.sample, other.prompt)
        assert one.completion == other.completion  # tokens, logprobs, masks, bit for bit
        assert one.reward == other.reward
    assert sum(len(each.turn_rewards) for each in of_agents) > 32
    assert len({each.completion.token_ids for each in of_agents}) > 8


@pytest.mark.slow
def test_branches_of_an_agent_are_samples_of_one_episode(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two_paths.py").write_text(
        "from openai import AsyncOpenAI\n"
        "async def run(base_url, api_key, row):\n"
        "    client = AsyncOpenAI(base_url=base_url, api_key=api_key)\n"
        "    for text in (row['prompt'], '1-2='):\n"
        "        await client.chat.completions.create(\n"
        "            model='any', messages=[{'role': 'user', 'content': text}])\n"
        "    return 0.5\n"
    )
    tokenizer = load_tokenizer(tiny_model)
    engine: Any = InThisProcess(tiny_model, tokenizer)
    settings = SETTINGS.replace(environment=AgentEnvironment(target="two_paths:run"))
    agents = AgentRollouts(engine, tokenizer, settings, make_scorer(settings.environment))
    ids = {text: tuple(prompt_token_ids(tokenizer, text)) for text in ("3-4=", "1-2=")}
    prompt = Prompt("0", "3-4=", ids["3-4="], "", "guess_number")
    try:
        rollouts = agents.run([prompt], num_generations_per_prompt=2, step=3)
    finally:
        agents.close()
    assert [(each.group, each.sample, each.part) for each in rollouts] == [
        *((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1))
    ]
    assert [each.reward for each in rollouts] == [0.5] * 4
    for pair in (rollouts[:2], rollouts[2:]):
        assert {each.prompt.token_ids for each in pair} == {*ids.values()}
    assert len(rollouts.episodes()) == 2


def test_agents_play_while_an_engine_streams(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    engine: Any = Engine(tokenizer, tiny_model)
    agents = AgentRollouts(engine, tokenizer, SETTINGS, make_scorer(SETTINGS.environment))
    metadata = json.dumps({"game": {"secret": 3, "low": 0, "high": 9}, "max_turns": 3})
    ids = tuple(prompt_token_ids(tokenizer, "0-9="))
    prompt = Prompt("0", "0-9=", ids, "3", "guess_number", metadata)
    try:
        with RolloutStream(engine, agents.episode, None, seed=5) as stream:
            for step in (0, 1):
                stream.begin([prompt], num_generations_per_prompt=2, step=step)
            rollouts = [each for step in (0, 1) for each in stream.take(step)]
    finally:
        agents.close()
    # The engine always guesses 5, which is too large once, and then out of bounds.
    assert [each.turn_rewards for each in rollouts] == [(0.0, 0.0, -0.5)] * 4
    assert {tokenizer.decode(each.completion.token_ids) for each in rollouts} == {
        "5<eos>0-4=5<eos>0-4=5<eos>"
    }
