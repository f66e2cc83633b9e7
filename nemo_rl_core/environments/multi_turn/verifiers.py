"""Environments of the package `verifiers` (its classes `SingleTurnEnv` and `MultiTurnEnv`).

The package calls a client for every turn of the policy. Here the client waits until the next `step`
brings the turn: the environment's original loop runs, on exactly the sampled tokens.
"""

import asyncio
import importlib
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from nemo_rl_core.environments.interfaces import EnvironmentReturn, Message
from nemo_rl_core.environments.multi_turn.replies import Reply, failed, joined_replies
from nemo_rl_core.environments.rewards.awaiting import AsyncCalls
from nemo_rl_core.errors import ConfigError, RewardError

_EPISODE = "verifiers_episode"
_IDLE_SECONDS = 3600.0
"""After this time without a turn, an episode is dropped: the policy's limits have ended it."""


class VerifiersEnvironment:
    """Runs an environment of `verifiers` with the policy of a trainer.

    Episodes live in this process, so `environment_workers` may have only one actor. Environments
    whose turns call tools through the chat template are refused: completions are text here.

    Args:
        environment: Id for `verifiers.load_environment`, or the environment itself.
        **arguments: Further arguments of `load_environment`.

    Raises:
        ConfigError: If the package is not installed, the environment cannot be loaded, or it needs
            tool calls.
    """

    def __init__(self, environment: Any, **arguments: Any) -> None:
        try:
            self._verifiers = importlib.import_module("verifiers")
        except ImportError as error:
            raise ConfigError(
                "the package verifiers is not installed",
                expected="verifiers 0.1",
                got=str(error),
                fix="see docs/environments.md: its pinned versions conflict with this project's",
            ) from error
        self._environment = (
            self._loaded(environment, arguments) if isinstance(environment, str) else environment
        )
        if getattr(self._environment, "tool_defs", None):
            raise ConfigError(
                f"{type(self._environment).__name__} offers tools through the chat template, "
                "which is not supported",
                expected="an environment that replies in text",
                fix="use {kind: tools}, or a custom environment",
            )
        self._calls = AsyncCalls()
        self._episodes: dict[str, _Episode] = {}

    def _loaded(self, name: str, arguments: Mapping[str, Any]) -> Any:
        try:
            return self._verifiers.load_environment(name, **arguments)
        # Broad on purpose: an installed environment may raise anything.
        except Exception as error:
            raise ConfigError(
                f"verifiers cannot load the environment {name!r}",
                got=f"{type(error).__name__}: {str(error)[:200]}",
                fix="install it together with verifiers, or correct the name or the arguments",
            ) from error

    def rows(self, num_rows: int = -1) -> list[dict[str, Any]]:
        """Returns rows of the environment's data set for `train` and `fit`; -1 means all rows."""
        data = self._environment.get_dataset(n=num_rows)
        return [
            {
                "prompt": list(row["prompt"]),
                "answer": str(row.get("answer") or ""),
                "metadata": {"info": row.get("info") or {}},
            }
            for row in data
        ]

    def step(
        self, message_log_batch: Sequence[Sequence[Message]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        """Passes the last turn of each conversation to its episode.

        The environment decides when an episode ends; its rubric then computes the reward.
        """
        turns = [
            partial(self._turn, log, row_metadata)
            for log, row_metadata in zip(message_log_batch, metadata, strict=True)
        ]
        return joined_replies([self._reply(call) for call in self._calls.results(turns)])

    @staticmethod
    def _reply(outcome: Any) -> Reply:
        try:
            reply: Reply = outcome()
        # Broad on purpose: one episode's environment or rubric must not end the others.
        except Exception as error:  # noqa: BLE001 (it is the error of its row)
            got = f"{type(error).__name__}: {error}"
            return failed(RewardError("the verifiers environment failed", got=got[:300]))
        return reply

    async def _turn(self, log: Sequence[Message], row_metadata: Mapping[str, Any]) -> Reply:
        name = row_metadata.get(_EPISODE) or self._begin(_row(log, row_metadata))
        # Out of the table during a turn, so that after an error it is gone.
        episode = self._episodes.pop(name, None)
        if episode is None:
            raise RewardError(
                "the episode is in another process, or had no turn for an hour",
                fix="set environment_workers: {num_workers: 1}",
            )
        if await episode.answer(log[-1]["content"]):
            state = await episode.task
            if state.get("error") is not None:
                raise RewardError(f"the episode failed: {state['error']!r}"[:300])
            return Reply(
                reward=float(state["reward"] or 0.0), terminated=True, metadata=row_metadata
            )
        observation = episode.observation()
        episode.last_turn = time.monotonic()
        self._episodes[name] = episode
        return Reply(
            terminated=False,
            observation=observation,
            metadata={**row_metadata, _EPISODE: name},
        )

    def _begin(self, row: Mapping[str, Any]) -> str:
        for name, episode in list(self._episodes.items()):
            if time.monotonic() - episode.last_turn < _IDLE_SECONDS:
                break  # the first has waited longest
            self._episodes.pop(name).task.cancel()
        name = uuid.uuid4().hex
        self._episodes[name] = _Episode(self._verifiers, self._environment, row)
        return name

    def shutdown(self) -> None:
        """Ends the event loop of the episodes."""
        self._calls.close()


def _row(log: Sequence[Message], row_metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a `RolloutInput`, whose prompt is the messages before the policy's first turn."""
    first = next(index for index, each in enumerate(log) if each["role"] == "assistant")
    return {
        "prompt": [dict(message) for message in log[:first]],
        "answer": row_metadata.get("answer", ""),
        "info": dict(row_metadata.get("info") or {}),
        "example_id": 0,
    }


class _Episode:
    """One run of the environment's loop; `task` returns the final state, scored by the rubric."""

    def __init__(self, verifiers: Any, environment: Any, row: Mapping[str, Any]) -> None:
        self._replies: asyncio.Queue[str] = asyncio.Queue()
        self._requests: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._prompt: list[Any] = []
        self.last_turn = time.monotonic()
        client = _client_class(verifiers)(self)
        self.task = asyncio.ensure_future(_played(environment, row, client))

    async def answer(self, text: str) -> bool:
        """Passes the policy's turn to the environment; returns whether the episode has ended."""
        if not self._prompt and await self._is_over():
            return True  # the environment ended without any turn
        self._replies.put_nowait(text)
        return await self._is_over()

    async def _is_over(self) -> bool:
        request = asyncio.ensure_future(self._requests.get())
        await asyncio.wait({request, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            self._prompt = request.result()
            return False
        request.cancel()
        return True

    def observation(self) -> str:
        """Returns the environment's messages since the policy's last turn."""
        texts: list[str] = []
        for message in reversed(self._prompt):
            if _field(message, "role") == "assistant":
                break
            texts.insert(0, str(_field(message, "content")))
        return "\n".join(texts)

    async def complete(self, prompt: list[Any]) -> str:
        self._requests.put_nowait(list(prompt))
        return await self._replies.get()


async def _played(environment: Any, row: Mapping[str, Any], client: Any) -> Any:
    state = await environment.rollout(row, client, "policy", {})
    if state.get("error") is None:
        await environment.rubric.score_rollout(state)
    return state


def _field(message: Any, name: str) -> Any:
    return message[name] if isinstance(message, Mapping) else getattr(message, name)


def _client_class(verifiers: Any) -> type:
    types = importlib.import_module("verifiers.types")
    base = importlib.import_module("verifiers.clients").Client

    async def get_response(self: Any, prompt: Any, model: str, *_: Any, **__: Any) -> Any:
        text = await self.client.complete(prompt)
        message = types.ResponseMessage(content=text, finish_reason="stop", is_truncated=False)
        return types.Response(id="", created=int(time.time()), model=model, message=message)

    unused = dict.fromkeys(base.__abstractmethods__, lambda *_: None)
    return type("PolicyClient", (base,), {**unused, "get_response": get_response})
