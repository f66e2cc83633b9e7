"""Episodes of an environment whose answers take times with a heavy tail, on a real engine."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_core.backends.generation.base import GenerationSetup
from nemo_rl_core.backends.generation.hugging_face import HuggingFaceBackend
from nemo_rl_core.config.generation import HuggingFaceGenerationConfig
from nemo_rl_core.data.chat import prompt_token_ids
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.environments.adapt import EnvironmentScorer
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.errors import WorkerError
from nemo_rl_core.models.interfaces import GenerationInterface
from nemo_rl_core.rollouts.engine import Complete, RolloutIndex
from nemo_rl_core.rollouts.episode import Bounds, MultiTurnEpisode, PlayedEpisode
from nemo_rl_core.rollouts.multi_turn import MultiTurnRollouts
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.types import Completion, Prompt, Rollout
from tests.unit.rollouts.conftest import Countdown, Scripted

NUM_EPISODES, MAX_TURNS = 16, 6
BOUNDS = Bounds(max_turns=9, max_tokens=80, max_new_tokens=6)


class Engine(GenerationInterface):
    """Transformers' loop in this process; counts its seconds and the rows of its batches."""

    def __init__(self, folder: Path) -> None:
        self.backend = HuggingFaceBackend()
        config = HuggingFaceGenerationConfig(max_new_tokens=6)
        self.backend.setup(
            GenerationSetup(model_folder=folder, config=config, max_model_len=96, stop_token_ids=())
        )
        self.seconds, self.batches = 0.0, list[int]()

    def generate(self, data: BatchedDataDict, greedy: bool) -> BatchedDataDict:
        start = time.perf_counter()
        output = self.backend.generate(data, greedy=greedy)
        self.seconds += time.perf_counter() - start
        self.batches.append(data.size)
        return output

    def prepare_for_generation(self) -> None: ...

    def finish_generation(self) -> None: ...


class Slow:
    """Sleeps before each answer, by a clock with a seed; an episode has 2 to 6 turns."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.seconds: dict[tuple[int, int], float] = {}  # by episode and turn

    async def step(
        self, message_log_batch: Sequence[Any], metadata: Sequence[Any]
    ) -> EnvironmentReturn:
        (turn,), (number,) = _turns(message_log_batch), _numbers(metadata)
        clock = random.Random(f"{self.seed}/{number}/{turn}")
        start = time.perf_counter()
        await asyncio.sleep(min(0.03 * clock.paretovariate(0.9), 1.0))
        self.seconds[number, turn] = time.perf_counter() - start
        return answer(message_log_batch, metadata)


def answer(message_log_batch: Sequence[Any], metadata: Sequence[Any]) -> EnvironmentReturn:
    turns = _turns(message_log_batch)
    pairs = zip(turns, _numbers(metadata), strict=True)
    return EnvironmentReturn(
        observations=[{"role": "environment", "content": f"{turn}="} for turn in turns],
        metadata=list(metadata),
        next_stop_strings=[None] * len(turns),
        rewards=torch.tensor([len(log[-1]["content"]) / 8 for log in message_log_batch]),
        terminateds=torch.tensor([turn == 2 + number % (MAX_TURNS - 1) for turn, number in pairs]),
    )


def _turns(message_log_batch: Sequence[Any]) -> list[int]:
    return [sum(message["role"] == "assistant" for message in log) for log in message_log_batch]


def _numbers(metadata: Sequence[Any]) -> list[int]:
    return [int(each["answer"]) for each in metadata]


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Engine(tiny_model)
    torch.set_num_threads(num_threads)


@pytest.fixture
def play(engine: Engine, tiny_model: Path) -> Callable[[Any], RemoteRollouts]:
    tokenizer = load_tokenizer(tiny_model)
    texts = [f"{number}+" for number in range(NUM_EPISODES)]
    prompts = [
        Prompt(text, text, tuple(prompt_token_ids(tokenizer, text)), text[:-1], "")
        for text in texts
    ]

    def run(environment: Any) -> RemoteRollouts:
        rollouts = MultiTurnRollouts(engine, tokenizer, environment, seed=1, bounds=BOUNDS)
        return rollouts.run(prompts, num_generations_per_prompt=1, step=1)

    return run


@pytest.mark.slow
def test_a_step_takes_as_long_as_its_slowest_episode_and_the_engine(
    engine: Engine, play: Callable[[Any], RemoteRollouts]
) -> None:
    environment = Slow(seed=1)
    start = time.perf_counter()
    rollouts = play(environment)
    seconds = time.perf_counter() - start
    assert [each.error for each in rollouts] == [None] * NUM_EPISODES
    turns = range(1, MAX_TURNS + 1)
    slowest = max(
        sum(environment.seconds.get((number, turn), 0.0) for turn in turns)
        for number in range(NUM_EPISODES)
    )
    rounds = sum(
        max(environment.seconds.get((number, turn), 0.0) for number in range(NUM_EPISODES))
        for turn in turns
    )
    assert seconds <= 1.15 * slowest + engine.seconds
    assert rounds > 1.4 * slowest  # of the same answers, if each turn waited for all


@pytest.mark.slow
def test_time_changes_no_bit(engine: Engine, play: Callable[[Any], RemoteRollouts]) -> None:
    first, second = Slow(seed=1), Slow(seed=2)
    rollouts = list(play(first))
    assert list(play(second)) == rollouts
    assert set(engine.batches) == {1}
    orders = [list(each.seconds) for each in (first, second)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


class Failing(MultiTurnEpisode):
    async def play(self, complete: Complete) -> list[PlayedEpisode]:
        played = await super().play(complete)
        if self._index.sample == 1:
            raise LookupError("no such page")
        return played * (1 + self._index.sample)


def test_an_episode_that_raises_is_counted_and_one_may_have_several_samples(
    play_with: Any,
) -> None:
    rollouts = play_with(Failing)
    assert [(each.sample, each.error is None) for each in rollouts] == [
        (0, True),
        (1, False),
        (2, True),
        (2, True),
        (2, True),
    ]
    assert "LookupError: no such page (test_own_pace.py" in str(rollouts[1].error)


@pytest.mark.parametrize("error", [KeyError("7"), SystemExit()])
def test_an_error_of_an_asynchronous_step_is_that_of_its_episode(
    ask: Any, tokenizer: Any, error: BaseException
) -> None:
    class Broken:
        async def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
            raise error

    engine = Scripted(tokenizer, lambda request: "5")
    rollouts = MultiTurnRollouts(engine, tokenizer, Broken(), seed=3, bounds=BOUNDS)
    (rollout,) = rollouts.run([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    assert "the environment 'Broken' raised for prompt '8='" in str(rollout.error)


class Cancelled(MultiTurnEpisode):
    async def play(self, complete: Complete) -> list[PlayedEpisode]:
        if self._index.sample == 1:
            raise asyncio.CancelledError  # of a task that it has started
        return await super().play(complete)


def test_a_cancellation_that_nobody_has_asked_for_is_an_error_of_its_episode(
    play_with: Any,
) -> None:
    assert [each.error is None for each in play_with(Cancelled)] == [True, False, True]


class Lost(MultiTurnEpisode):
    async def play(self, complete: Complete) -> list[PlayedEpisode]:
        raise WorkerError("the environment failed in 32 consecutive calls")


def test_actors_that_fail_again_and_again_end_the_run(play_with: Any) -> None:
    with pytest.raises(WorkerError, match="32 consecutive calls"):
        play_with(Lost)


def test_an_error_of_the_engine_ends_the_run(ask: Any, tokenizer: Any) -> None:
    def fail(request: Any) -> str:
        raise LookupError("no weights")

    rollouts = MultiTurnRollouts(
        Scripted(tokenizer, fail), tokenizer, Countdown(), seed=3, bounds=BOUNDS
    )
    with pytest.raises(LookupError, match="no weights"):
        rollouts.run([ask("8=", "8")], num_generations_per_prompt=2, step=1)


def test_an_asynchronous_environment_also_scores_single_turns() -> None:
    class Length:
        async def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
            await asyncio.sleep(0)
            rewards = [float(len(log[-1]["content"])) for log in message_log_batch]
            return EnvironmentReturn(
                [], list(metadata), [], torch.tensor(rewards), torch.ones(len(rewards))
            )

    prompt = Prompt("0", "1+", (1,), "", "")
    rollouts = [Rollout(prompt, Completion((), (), truncated=False), text) for text in ("a", "bcd")]
    assert EnvironmentScorer(Length()).score(rollouts) == [1.0, 3.0]


@pytest.fixture
def play_with(ask: Any, tokenizer: Any) -> Callable[[type], Sequence[Any]]:
    class Rollouts(MultiTurnRollouts):
        kind: type

        def episode(self, prompt: Prompt, index: RolloutIndex, answers: Any = None) -> Any:
            return self.kind(
                prompt,
                index,
                bounds=BOUNDS,
                tokenizer=tokenizer,
                stop_strings=(),
                answer=answers(0),
            )

    def run(kind: type) -> Sequence[Any]:
        engine = Scripted(tokenizer, lambda request: "5")
        rollouts = Rollouts(engine, tokenizer, Countdown(), seed=3, bounds=BOUNDS)
        rollouts.kind = kind
        return rollouts.run([ask("8=", "8")], num_generations_per_prompt=3, step=1)

    return run
