"""Agents that are killed or stopped fail their episodes, and change no bit of the others."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_rl_core.agents.episode import AgentRollouts
from nemo_rl_core.config.agents import AgentEnvironment
from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.types import Prompt, Rollout
from tests.unit.agents.test_killed_run import wait_until
from tests.unit.agents.test_process import processes_with
from tests.unit.agents.test_same_episodes import SETTINGS, InThisProcess

pytestmark = pytest.mark.slow

Play = Callable[..., Sequence[Rollout]]
TEXTS = ("3-4=", "1-2=", "5-9=", "0-7=")


@pytest.fixture(scope="module")
def play(tiny_model: Path) -> Play:
    tokenizer = load_tokenizer(tiny_model)
    engine: Any = InThisProcess(tiny_model, tokenizer)
    prompts = [
        Prompt(str(number), text, tuple(prompt_token_ids(tokenizer, text)), "", "chat")
        for number, text in enumerate(TEXTS)
    ]

    def play(
        fault: str, *, timeout_seconds: float = 600, strike: Callable[[Any], None] | None = None
    ) -> Sequence[Rollout]:
        environment = AgentEnvironment(
            target="tests.unit.agents.faulty_agent:run",
            variables=["AGENT_FAULT"],
            episode_timeout_seconds=timeout_seconds,
        )
        settings = SETTINGS.replace(environment=environment)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AGENT_FAULT", fault)
            agents = AgentRollouts(engine, tokenizer, settings, make_scorer(environment))
            if strike is not None:
                threading.Thread(target=strike, args=(agents._agents.host,)).start()
            try:
                return list(agents.run(prompts, num_generations_per_prompt=4, step=3))
            finally:
                agents.close()
                wait_until(lambda: not processes_with(f"AGENT_FAULT={fault}", named="agents/"))

    return play


@pytest.fixture(scope="module")
def undisturbed(play: Play) -> Sequence[Rollout]:
    return play("none undisturbed")


@pytest.fixture(scope="module")
def failed(play: Play) -> Sequence[Rollout]:
    """The rollouts if the agents that a fault hits raise an error."""
    return play("error")


def errors(rollouts: Sequence[Rollout]) -> dict[int, str]:
    return {number: each.error for number, each in enumerate(rollouts) if each.error}


def assert_others_equal(rollouts: Sequence[Rollout], undisturbed: Sequence[Rollout]) -> None:
    for one, other in zip(rollouts, undisturbed, strict=True):
        assert other.error is None
        if one.error is None:
            assert (one.completion, one.reward) == (other.completion, other.reward)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("error", "LookupError: lost"),
        ("kill between calls", "exit code -9"),
        ("kill in call", "exit code -9"),
    ],
)
def test_only_the_episodes_that_a_fault_hits_fail(
    play: Play,
    undisturbed: Sequence[Rollout],
    failed: Sequence[Rollout],
    fault: str,
    error: str,
) -> None:
    rollouts = play(fault)
    assert 0 < len(errors(failed)) < 16
    assert errors(rollouts).keys() == errors(failed).keys()
    assert all(error in each for each in errors(rollouts).values())
    assert_others_equal(rollouts, undisturbed)


def test_a_stopped_agent_fails_its_episode_at_the_time_limit(
    play: Play, undisturbed: Sequence[Rollout], failed: Sequence[Rollout]
) -> None:
    rollouts = play("stop in call", timeout_seconds=10)
    assert errors(failed).keys() <= errors(rollouts).keys()  # a busy machine may time out more
    assert all("did not end in time" in each for each in errors(rollouts).values())
    assert_others_equal(rollouts, undisturbed)


def kill(wait_seconds: float, find: Callable[[int], int | None], host: Any) -> None:
    """Kills a process of the host of agents, some time after the first agent has started."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        process = host._process
        if process is not None and psutil.Process(process.pid).children():
            time.sleep(wait_seconds)
            if (found := find(process.pid)) is not None:
                os.kill(found, signal.SIGKILL)
                return
        time.sleep(0.001)


def guard_of(host: int) -> int | None:
    return next((each.pid for each in psutil.Process(host).children()), None)


@pytest.mark.parametrize("wait_seconds", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("find", [int, guard_of])
def test_a_killed_host_of_agents_costs_no_more_than_their_episodes(
    play: Play,
    undisturbed: Sequence[Rollout],
    find: Callable[[int], int | None],
    wait_seconds: float,
) -> None:
    fault = f"none {find.__name__} {wait_seconds}"
    rollouts = play(fault, strike=partial(kill, wait_seconds, find))
    assert len(errors(rollouts)) < 16
    assert all("exit code" in each for each in errors(rollouts).values()), errors(rollouts)
    assert_others_equal(rollouts, undisturbed)
