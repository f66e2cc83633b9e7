"""Episodes of agents: a process each, which calls the policy through the server of the run."""

import asyncio
import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_core.agents.host import REWARD_FILE
from nemo_rl_core.agents.process import AgentHost, ProcessResult, row_of, variables_of
from nemo_rl_core.agents.server import AgentServer
from nemo_rl_core.agents.session import AgentSample, Session
from nemo_rl_core.config.agents import AgentEnvironment
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.distributed.event_loop import CallQueue, Gathered, run_on_loop
from nemo_rl_core.environments.agent_programs import agent_source
from nemo_rl_core.environments.interfaces import Scorer, checked
from nemo_rl_core.errors import ConfigError, RewardError
from nemo_rl_core.models.interfaces import GenerationInterface
from nemo_rl_core.rollouts.engine import (
    Complete,
    RolloutIndex,
)
from nemo_rl_core.rollouts.episode import Bounds, PlayedEpisode
from nemo_rl_core.rollouts.multi_turn import EpisodeRollouts
from nemo_rl_core.rollouts.remote_rollouts import Turns
from nemo_rl_core.types import Prompt, Rollout, unscored

_NUM_SHOWN_LINES = 3
_CHECK_SECONDS = 10.0
"""Time between two checks of the files of a command, which each episode reads again."""


class Agents:
    """The agents of a sampler, and the server that they call.

    Args:
        settings: Settings whose environment is an agent.
        scorer: Scorer of `environment.reward`; not used if the agent reports its reward.

    Attributes:
        scores: Scores texts in another thread, all that are ready at once.
    """

    def __init__(self, settings: RolloutSettings, tokenizer: Any, scorer: Scorer) -> None:
        assert isinstance(settings.environment, AgentEnvironment)
        self.config, self.tokenizer = settings.environment, tokenizer
        self.bounds = Bounds.of(settings)
        self.max_opening_tokens = settings.max_prompt_tokens
        generation = settings.generation
        self.sampling = {
            "temperature": generation.temperature,
            **{name: value for name, value in generation.reshaping.items() if value is not None},
        }
        self.slots = asyncio.Semaphore(self.config.max_concurrent)
        self.running: set[asyncio.Task[ProcessResult]] = set()
        self.server = AgentServer()
        self._address: asyncio.Future[str] | None = None
        self.host = AgentHost(self.config)
        self._source, self._is_changed = agent_source(self.config), False
        self._next_check = 0.0
        self._calls = CallQueue()
        self.scores: Gathered[Rollout, float | RewardError] = Gathered(scorer.score, self._calls)
        threading.Thread(target=self._calls.serve, name="scores", daemon=True).start()

    async def address(self) -> str:
        """Starts the server once, and returns its address."""
        if self._address is None:
            self._address = asyncio.ensure_future(self.server.start())
        return await asyncio.shield(self._address)

    async def command(self, row: Mapping[str, Any]) -> list[str]:
        """Returns the command of an episode; empty for a function.

        Raises:
            ConfigError: If files have changed since the run began, as its cache key has them.
        """
        if self.config.command is None:
            return []
        if time.monotonic() > self._next_check:
            self._next_check = time.monotonic() + _CHECK_SECONDS
            self._is_changed |= await asyncio.to_thread(agent_source, self.config) != self._source
        if self._is_changed:
            raise ConfigError(
                "the files of the agent have changed since the run began",
                fix="run again with the new files, or restore them",
            )
        return [each.replace("{prompt}", row["prompt"]) for each in self.config.command]

    async def close(self) -> None:
        """Ends episodes that still run, the server and the host of the agents."""
        for each in self.running:
            each.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        self._calls.stop()
        await self.host.stop()
        if self._address is not None:
            await self._address
            await self.server.stop()


class AgentEpisode:
    """One run of an agent; see `AgentEnvironment`.

    Each path of the agent's session is a training sample with the reward of the episode.
    """

    def __init__(self, agents: Agents, prompt: Prompt, index: RolloutIndex) -> None:
        self._agents, self._prompt, self._index = agents, prompt, index

    async def play(self, complete: Complete) -> Sequence[PlayedEpisode]:
        """Starts the agent, waits for its end, and scores the episode."""
        agents, prompt = self._agents, self._prompt
        session = Session(
            agents.tokenizer,
            self._index,
            complete=complete,
            bounds=agents.bounds,
            prompt=prompt,
            sampling=agents.sampling,
            max_opening_tokens=agents.max_opening_tokens,
        )
        async with agents.slots:
            running = asyncio.create_task(self._run(session))
            agents.running.add(running)
            running.add_done_callback(agents.running.discard)
            try:
                result = await running
            finally:
                running.cancel()
        samples = session.samples()
        if not samples:
            return [PlayedEpisode.failed(prompt, _no_samples(result, session).in_one_line)]
        outcome = await self._outcome(result, samples)
        return [_played(prompt, sample, outcome) for sample in samples]

    async def _run(self, session: Session) -> ProcessResult:
        config, row = self._agents.config, row_of(self._prompt)
        address = await self._agents.address()
        command = await self._agents.command(row)
        key = self._agents.server.open(session)
        try:
            return await self._agents.host.play(
                command=command,
                row=json.dumps(row),
                variables=variables_of(config, base_url=address, api_key=key),
            )
        except OSError as error:
            raise RewardError("the agent cannot be started", got=str(error)) from error
        finally:
            self._agents.server.end(key)

    async def _outcome(
        self, result: ProcessResult, samples: Sequence[AgentSample]
    ) -> float | RewardError:
        is_scored = self._agents.config.reward is not None
        # An agent often raises an error at a limit; the text up to there can still be scored.
        may_fail = is_scored and any(sample.truncated for sample in samples)
        if result.exit_code is None or (result.exit_code and not may_fail):
            return _failure(result)
        if is_scored:
            last_text = samples[-1].texts[-1]
            return await self._agents.scores.ask(unscored(self._prompt, last_text))
        return reported_reward(result, self._prompt)


class AgentRollouts(EpisodeRollouts):
    """Plays the episodes of an agent; see `AgentEpisode`."""

    def __init__(
        self,
        generation: GenerationInterface,
        tokenizer: Any,
        settings: RolloutSettings,
        scorer: Scorer,
    ) -> None:
        super().__init__(generation, tokenizer, seed=settings.seed)
        self._agents = Agents(settings, tokenizer, scorer)

    def episode(self, prompt: Prompt, index: RolloutIndex, answers: object = None) -> AgentEpisode:
        """Creates an episode that has not begun; an agent has no `answers`."""
        return AgentEpisode(self._agents, prompt, index)

    def close(self) -> None:
        """Ends all processes and the server."""
        run_on_loop(self._agents.close())


def _played(prompt: Prompt, sample: AgentSample, outcome: float | RewardError) -> PlayedEpisode:
    error = outcome.in_one_line if isinstance(outcome, RewardError) else None
    reward = None if isinstance(outcome, RewardError) else outcome
    rewards = (0.0,) * (len(sample.texts) - 1) + (reward or 0.0,)
    return PlayedEpisode(
        sample.sequence,
        truncated=sample.truncated,
        text="\n".join(sample.texts),
        turns=Turns(sample.turns, rewards, sample.num_written, sample.num_unread_tokens),
        reward=reward,
        error=error,
        prompt_ids=None if sample.opening_ids is prompt.token_ids else sample.opening_ids,
    )


def reported_reward(result: ProcessResult, prompt: Prompt) -> float | RewardError:
    """Returns the reward that an agent wrote: a JSON number, or an object with `reward`."""
    try:
        reward = json.loads(result.reward)
        reward = reward["reward"] if isinstance(reward, dict) else reward
    except (ValueError, KeyError, RecursionError):
        return RewardError(
            f"the agent wrote no reward to the file of {REWARD_FILE}, and what it prints is none",
            expected="a number in that file, or environment.reward",
            got=f"{_shown(result.reward)}; output {_shown(result.output)}; "
            f"errors {_shown(result.errors)}",
            fix="write the reward to that file, or set environment.reward",
        )
    return checked(reward, prompt=prompt.text, completion=result.reward, source="the agent")


def _failure(result: ProcessResult) -> RewardError:
    code = result.exit_code
    how = "did not end in time" if code is None else f"ended with exit code {code}"
    return RewardError(
        f"the agent {how}",
        expected="an agent that ends with exit code 0 within environment.episode_timeout_seconds",
        got=f"errors {_shown(result.errors)}; output {_shown(result.output)}",
    )


def _no_samples(result: ProcessResult, session: Session) -> RewardError:
    if result.exit_code != 0:
        return _failure(result)
    calls = f"{session.num_ambiguous} ambiguous calls, {session.num_unanswered} unanswered turns"
    return RewardError(
        "the agent sampled nothing that can be trained on",
        expected="calls of the policy at OPENAI_BASE_URL or ANTHROPIC_BASE_URL",
        got=f"{calls}; errors {_shown(result.errors)}; output {_shown(result.output)}",
    )


def _shown(text: str) -> str:
    lines = [line.strip()[:200] for line in text.splitlines() if line.strip()]
    return repr(" | ".join(lines[-_NUM_SHOWN_LINES:]))
