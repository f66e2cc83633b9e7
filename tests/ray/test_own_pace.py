"""Episodes of a slow environment on a real vLLM engine that takes requests at any time."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.models.generation import VllmGeneration
from nemo_rl_core.models.generation.streaming import TurnGeneration
from nemo_rl_core.rollouts.multi_turn import MultiTurnRollouts
from nemo_rl_core.types import Prompt, Rollout
from tests.unit.rollouts.test_own_pace import BOUNDS, MAX_TURNS, NUM_EPISODES, Slow, answer


class AtOnce(Slow):
    """Gives the same answers to all episodes together, without sleeping."""

    def step(  # type: ignore[override]
        self, message_log_batch: Sequence[Any], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        return answer(message_log_batch, metadata)


def test_turns_are_submitted_while_others_run(
    session: ClusterSession, generation_setup: GenerationSetup, tiny_model: Path
) -> None:
    tokenizer = load_tokenizer(tiny_model)
    texts = [f"{number}+" for number in range(NUM_EPISODES)]
    prompts = [
        Prompt(text, text, tuple(prompt_token_ids(tokenizer, text)), text[:-1], task="")
        for text in texts
    ]
    setup = replace(generation_setup, max_model_len=96)

    def play(engine: Any, environment: Any, step: int = 1) -> tuple[list[Rollout], float]:
        rollouts = MultiTurnRollouts(engine, tokenizer, environment, seed=1, bounds=BOUNDS)
        start = time.perf_counter()
        played = rollouts.run(
            prompts, num_generations_per_prompt=1, step=step, releases_memory=True
        )
        seconds = time.perf_counter() - start
        # The engine's batches differ, and with them the last bits of logprobs.
        return [
            replace(each, completion=replace(each.completion.read(), logprobs=()))
            for each in played
        ], seconds

    expected, _ = play(VllmGeneration(session, setup), AtOnce(seed=0))
    engine, slow = TurnGeneration(session, setup), Slow(seed=1)
    play(engine, AtOnce(seed=0))  # the proof of its weights
    _, of_engine = play(engine, AtOnce(seed=0))
    played, seconds = play(engine, slow)
    assert played == expected
    turns = range(1, MAX_TURNS + 1)
    slowest = max(
        sum(slow.seconds.get((number, turn), 0.0) for turn in turns)
        for number in range(NUM_EPISODES)
    )
    # The engine computes fewer turns at a time, so it may need up to its time by rounds per turn.
    assert seconds <= 1.15 * slowest + MAX_TURNS * of_engine
    again, _ = play(engine, Slow(seed=2))
    assert again == expected
