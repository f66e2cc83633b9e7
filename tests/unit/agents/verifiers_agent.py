"""An agent that plays an environment of `verifiers`, whose packages the run does not have."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig


class Twice(vf.MultiTurnEnv):  # type: ignore[misc]
    @vf.stop  # type: ignore[untyped-decorator]
    async def has_two_turns(self, state: Any) -> bool:
        return len(state["trajectory"]) == 2

    async def env_response(self, *_: Any, **__: Any) -> Any:
        return [{"role": "user", "content": "And then?"}]


async def length(completion: Any, answer: str) -> float:
    return float(len(completion) + len(answer))


async def play(row: Any) -> float:
    data = Dataset.from_list([{"question": row["prompt"], "answer": row["answer"]}])
    environment = Twice(dataset=data, rubric=vf.Rubric(funcs=[length]))
    url = os.environ["OPENAI_BASE_URL"]
    client = ClientConfig(api_base_url=url, api_key_var="OPENAI_API_KEY")
    example = {"prompt": row["messages"], "answer": row["answer"], "info": {}, "example_id": 0}
    state = await environment.rollout(example, client, "policy", {})
    if state.get("error") is not None:
        raise state["error"]
    await environment.rubric.score_rollout(state)
    return float(state["reward"])


if __name__ == "__main__":
    reward = asyncio.run(play(json.load(sys.stdin)))
    Path(os.environ["NEMO_RL_REWARD_FILE"]).write_text(str(reward))
