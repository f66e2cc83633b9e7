"""An environment over the current version of `verifiers`, which conflicts with the lock.

It is imported only by isolated actors: this process has neither `verifiers` nor its `openai`.
"""

import asyncio
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch
import verifiers.v1 as vf

from nemo_rl_core.environments.interfaces import EnvironmentReturn, Message


class SumData(vf.TaskData):  # type: ignore[misc]
    answer: str


class Sum(vf.Task[SumData, vf.State]):  # type: ignore[misc]
    @vf.reward(weight=0.5)  # type: ignore[untyped-decorator]
    async def exact(self, trace: Any) -> float:
        return float(trace.last_reply == self.data.answer)


class TwoTries:
    """Asks a second time after a wrong answer; `verifiers` scores each answer with 0 or 0.5."""

    def __init__(self, versions: dict[str, str]) -> None:
        installed = {name: metadata.version(name) for name in versions}
        assert installed == versions, installed

    def step(
        self, message_log_batch: Sequence[Sequence[Message]], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        rewards = [
            asyncio.run(scored(log[0]["content"], log[-1]["content"], about["answer"]))
            for log, about in zip(message_log_batch, metadata, strict=True)
        ]
        ended = [
            reward > 0 or len(log) > 2
            for reward, log in zip(rewards, message_log_batch, strict=True)
        ]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": " no:"} for _ in rewards],
            metadata=list(metadata),
            next_stop_strings=[None] * len(rewards),
            rewards=torch.tensor(rewards),
            terminateds=torch.tensor(ended),
        )


async def scored(prompt: str, reply: str, answer: str) -> float:
    task = Sum(SumData(prompt=prompt, answer=answer))
    trace = vf.Trace(
        task=vf.TraceTask(type="Sum", data=task.data), agent=vf.AgentInfo(config=vf.AgentConfig())
    )
    trace.root_reply = reply
    await task.score(trace)
    return float(trace.reward)
