"""Streaming engines before new weights: they finish requests and keep others for the update."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from nemo_rl_core.algorithms.sft.loss import NLLLoss
from nemo_rl_core.backends.decoding.requests import DecodingRequest
from nemo_rl_core.backends.generation.vllm_streaming import _PendingRequest
from nemo_rl_core.models.generation.streaming import StreamingGeneration
from nemo_rl_core.rollouts.stream import RolloutStream
from nemo_rl_core.types import Prompt
from tests.ray.ahead import LONG, batch_of, worker_pid

pytestmark = pytest.mark.thorough


@pytest.fixture
def engine(streaming_engine: StreamingGeneration) -> StreamingGeneration:
    return streaming_engine


def test_nearly_complete_requests_are_not_interrupted(engine: StreamingGeneration) -> None:
    """After 71 of 150 tokens 79 are left; 78 would be computed again after a prompt of 7."""
    prompt, first, later = list(range(5, 12)), 1, 2
    limits = {0: 150, 1: 150, 2: LONG}
    priorities = {0: first, 1: first, 2: later}

    def left(backend: Any) -> dict[int, int]:
        drawn = {
            each.request_id: len(backend._state(each).detokenizer.output_token_ids)
            for each in backend._running.values()
        }
        return {name: limits[name] - num_drawn for name, num_drawn in drawn.items()}

    def finished_after(num_drawn: int, backend: Any) -> list[dict[int, int]]:
        """Returns remaining tokens by request, before and after the first ones may be completed."""
        backend._start(
            [
                _PendingRequest(name, DecodingRequest(prompt, name, limit), priorities[name])
                for name, limit in limits.items()
            ]
        )
        for _ in range(num_drawn):
            backend._step()
        before = left(backend)
        backend._finish_first(first)
        after = left(backend)
        backend._interrupt()
        return [before, after]

    def in_its_thread(num_drawn: int) -> list[dict[int, int]]:
        import ray

        def drive(backend: Any) -> list[dict[int, int]]:
            remaining = backend._between_steps(partial(finished_after, num_drawn, backend))
            backend._new_finished(0.0)  # nobody requests them
            return remaining

        remaining: list[dict[int, int]] = ray.get(
            engine._workers._workers[0].__ray_call__.remote(drive)
        )
        return remaining

    for too_few in (0, 71):
        before, after = in_its_thread(too_few)
        assert before == after == {0: 150 - too_few, 1: 150 - too_few, 2: LONG - too_few}
    before, after = in_its_thread(72)
    assert before == {0: 78, 1: 78, 2: LONG - 72}
    assert after == {2: LONG - 150}, "continues meanwhile, without anybody waiting"


def awaiting(engine: StreamingGeneration) -> int:
    """Returns the number of requests kept for new weights; all others have begun."""
    import ray

    (worker, *_) = engine._workers._workers
    count = worker.__ray_call__.remote(
        lambda backend: backend._between_steps(lambda: len(backend._awaiting))
    )
    return int(ray.get(count))


def test_requests_for_the_next_weights_begin_with_them(
    engine: StreamingGeneration, stream: RolloutStream, prompts: list[Prompt], make_policy: Callable
) -> None:
    policy = make_policy(max_tokens_per_microbatch=4096)
    engine.update_weights(policy, weight_version=1)
    stream.begin(prompts, num_generations_per_prompt=1, step=1)
    old = stream.take(1)
    stream.begin(prompts, num_generations_per_prompt=1, step=1, next_version=2)
    time.sleep(0.3)  # long enough for some tokens of the old weights
    assert awaiting(engine) == len(prompts)
    policy.train(batch_of(old), NLLLoss())
    engine.update_weights(policy, weight_version=2)
    assert awaiting(engine) == 0
    ahead = stream.take(1)
    stream.begin(prompts, num_generations_per_prompt=1, step=1, next_version=2)  # are there
    later = stream.take(1)
    for one, other, before in zip(ahead, later, old, strict=True):
        assert set(one.completion.weight_versions) == {2}
        assert one.completion.token_ids == other.completion.token_ids
        assert one.completion.logprobs != before.completion.logprobs


def test_requests_for_weights_that_never_come_can_be_cancelled(
    engine: StreamingGeneration, stream: RolloutStream, prompts: list[Prompt], make_policy: Callable
) -> None:
    engine.update_weights(make_policy(), weight_version=1)
    stream.begin(prompts, num_generations_per_prompt=1, step=1, next_version=9)
    assert awaiting(engine) == len(prompts)
    engine.cancel(list(range(len(prompts))))
    assert awaiting(engine) == 0


def test_requests_for_the_next_weights_survive_their_engine(
    engine: StreamingGeneration, stream: RolloutStream, prompts: list[Prompt], make_policy: Callable
) -> None:
    policy = make_policy()
    engine.update_weights(policy, weight_version=1)
    stream.begin(prompts, num_generations_per_prompt=1, step=1, next_version=2)
    assert awaiting(engine) == len(prompts)
    with stream.exclusive():  # like the trainer: nobody else may call an engine during replacement
        os.kill(worker_pid(engine), signal.SIGKILL)
        engine.update_weights(policy, weight_version=2)
    completed = stream.take(1)
    assert engine.num_restarts == 1
    assert {version for each in completed for version in each.completion.weight_versions} == {2}


def test_an_engine_that_is_lost_while_it_finishes_gets_the_next_weights(
    engine: StreamingGeneration, make_policy: Callable
) -> None:
    policy = make_policy()
    engine.update_weights(policy, weight_version=1)
    pid = worker_pid(engine)
    os.kill(pid, signal.SIGKILL)
    engine.finish_first(2)
    assert engine.num_restarts == 0
    engine.update_weights(policy, weight_version=2)
    assert engine.num_restarts == 1
    assert worker_pid(engine) != pid
