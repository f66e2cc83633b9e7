"""Episodes whose environment runs in actors: their homes, their losses, and replays."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.config.environment import EnvironmentWorkers
from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.data.tokenizer import build_arithmetic_tokenizer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.environments.remote import RemoteEnvironment
from nemo_rl_core.rollouts.episode import Bounds
from nemo_rl_core.rollouts.multi_turn import MultiTurnRollouts
from nemo_rl_core.types import Prompt, Rollout
from tests.unit.rollouts.conftest import Scripted

NUM_EPISODES = 6
BOUNDS = Bounds(max_turns=9, max_tokens=80, max_new_tokens=6)


class Counting:
    """Counts the turns of each episode in this process; ends at the third.

    The second turn of episode 2 kills the process, if `folder` has no file `killed`.
    """

    stateful = True

    def __init__(self, folder: Path, *, deterministic: bool, offset: int = 0) -> None:
        self.folder, self.deterministic, self.offset = folder, deterministic, offset
        self.turns: dict[str, int] = {}

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any]) -> EnvironmentReturn:
        counts = []
        for about in metadata:
            name = about["answer"]
            # Only the process that has the first turn has the state of the others.
            self.turns[name] = self.turns[name] + 1 if "turns" in about else 1
            counts.append(self.turns[name])
            if (name, counts[-1]) == ("2", 2) and not (self.folder / "killed").exists():
                (self.folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": f"{count + self.offset}="} for count in counts
            ],
            metadata=[{**about, "turns": 1} for about in metadata],
            next_stop_strings=[None] * len(counts),
            rewards=torch.tensor(counts).float(),
            terminateds=torch.tensor([count == 3 for count in counts]),
        )


class Forgetful(Counting):
    """Answers differently in each process, although it claims not to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, deterministic=True, offset=os.getpid() % 1000)


class Sleeping:
    seconds = 0.5

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any]) -> EnvironmentReturn:
        time.sleep(self.seconds)
        (log,) = message_log_batch
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "1="}],
            metadata=list(metadata),
            next_stop_strings=[None],
            rewards=torch.ones(1),
            terminateds=torch.tensor([sum(each["role"] == "assistant" for each in log) == 2]),
        )


@pytest.fixture
def play(session: ClusterSession) -> Iterator[Callable[..., list[Rollout]]]:
    tokenizer = build_arithmetic_tokenizer()
    texts = [f"{number}+" for number in range(NUM_EPISODES)]
    prompts = [
        Prompt(text, text, tuple(prompt_token_ids(tokenizer, text)), text[:-1], "")
        for text in texts
    ]
    made: list[RemoteEnvironment] = []

    def run(make: Callable[[], Any], num_workers: int = 2) -> list[Rollout]:
        made.append(RemoteEnvironment(make, EnvironmentWorkers(num_workers=num_workers)))
        engine = Scripted(tokenizer, lambda request: "5")
        rollouts = MultiTurnRollouts(engine, tokenizer, made[-1], seed=3, bounds=BOUNDS)
        start = time.monotonic()
        played = list(rollouts.run(prompts, num_generations_per_prompt=1, step=1))
        run.seconds = time.monotonic() - start  # type: ignore[attr-defined]
        return played

    yield run
    for each in made:
        each.shutdown()


def test_an_episode_stays_in_its_actor_and_a_lost_actor_fails_its_episodes(
    play: Callable[..., list[Rollout]], tmp_path: Path
) -> None:
    make = partial(Counting, tmp_path, deterministic=False)
    rollouts = play(make)
    for number, each in enumerate(rollouts):
        if number % 2:  # of the other actor
            assert (each.turn_rewards, each.error) == ((1, 2, 3), None)
        else:
            assert "the environment's actor" in str(each.error)
    assert "died" in str(rollouts[2].error)
    assert "was replaced" in str(rollouts[0].error)
    undisturbed = play(make)
    assert [each.turn_rewards for each in undisturbed] == [(1, 2, 3)] * NUM_EPISODES
    assert [undisturbed[number] for number in (1, 3, 5)] == [rollouts[n] for n in (1, 3, 5)]


def test_turns_of_a_deterministic_environment_are_replayed(
    play: Callable[..., list[Rollout]], tmp_path: Path
) -> None:
    make = partial(Counting, tmp_path, deterministic=True)
    disturbed = play(make)
    assert (tmp_path / "killed").exists()
    assert disturbed == play(make)
    assert [each.turn_rewards for each in disturbed] == [(1, 2, 3)] * NUM_EPISODES


@pytest.mark.thorough
def test_a_replay_with_other_answers_is_refused(
    play: Callable[..., list[Rollout]], tmp_path: Path
) -> None:
    rollouts = play(partial(Forgetful, tmp_path))
    assert [each.error is None for each in rollouts] == [False, True] * 3
    assert "'Forgetful' is not deterministic" in str(rollouts[2].error)


def test_actors_answer_conversations_in_parallel(play: Callable[..., list[Rollout]]) -> None:
    rollouts = play(Sleeping, num_workers=3)
    assert [each.reward for each in rollouts] == [2] * NUM_EPISODES
    in_turns = NUM_EPISODES * 2 * Sleeping.seconds
    assert play.seconds < 0.75 * in_turns  # type: ignore[attr-defined]
