"""The endpoint for agents takes at most 5 % of the time of sampling, with a real vLLM engine."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.agents.episode import AgentRollouts
from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.config.model import TextModelFromConfig
from nemo_rl_core.config.trainer import RolloutSettings
from nemo_rl_core.converters.materialize import materialize
from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.event_loop import event_loop
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments.factory import make_scorer
from nemo_rl_core.models.generation.streaming import TurnGeneration
from nemo_rl_core.types import Prompt

pytestmark = pytest.mark.thorough

NUM_AGENTS, NUM_TURNS, NUM_TOKENS = 8, 4, 64
SETTINGS = RolloutSettings.model_validate(
    {
        "environment": {"kind": "agent", "target": "tests.unit.agents.talking_agent:run"},
        "rollouts": {"max_turns": NUM_TURNS, "max_rollout_tokens": 1500},
        "generation": {"max_new_tokens": NUM_TOKENS, "kv_cache_gib": 1, "max_num_seqs": 64},
        "cluster": {"num_threads": 1},
    }
)
SMOLLM2_135M = TextModelFromConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    max_position_embeddings=2048,
)
"""A model with the shape of SmolLM2-135M, and a smaller vocabulary."""


def test_the_endpoint_takes_little_of_the_time_of_sampling(
    session: ClusterSession, tmp_path: Path
) -> None:
    """The endpoint's CPU time is that of the event loop's thread, which also starts the agents.

    The engine has one thread, so its CPU time is the least time that sampling can take. On an EPYC
    (28 November 2026, one run): 0.14 of 27.9 CPU-s.
    """
    materialize(SMOLLM2_135M, tmp_path, seed=0)
    tokenizer = load_tokenizer(tmp_path)
    setup = GenerationSetup(
        model_folder=tmp_path, config=SETTINGS.generation, max_model_len=2000, stop_token_ids=()
    )
    engine = TurnGeneration(session, setup)
    rollouts = AgentRollouts(engine, tokenizer, SETTINGS, make_scorer(SETTINGS.environment))
    text = "A question of some words, as a user might ask it. " * 2
    prompt = Prompt("0", text, tuple(prompt_token_ids(tokenizer, text)), "", task="")
    prompts = [replace(prompt, id=str(number)) for number in range(NUM_AGENTS)]

    def play(step: int) -> Sequence[Any]:
        return rollouts.run(prompts, num_generations_per_prompt=1, step=step, releases_memory=True)

    play(0)  # starts the engine, the server and the host of the agents
    of_endpoint, of_engine = endpoint_seconds(), engine_seconds(engine)
    played = [*play(1)]
    of_endpoint, of_engine = endpoint_seconds() - of_endpoint, engine_seconds(engine) - of_engine
    rollouts.close()
    assert [each.reward for each in played] == [NUM_TURNS] * NUM_AGENTS
    assert of_endpoint <= 0.05 * of_engine, (of_endpoint, of_engine)


def endpoint_seconds() -> float:
    event_loop()
    (thread,) = [each for each in threading.enumerate() if each.name == "events"]
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def engine_seconds(engine: TurnGeneration) -> float:
    return sum(engine._workers.cpu_seconds(10).values())
