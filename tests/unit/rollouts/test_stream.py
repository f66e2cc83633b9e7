"""A stream's thread and a training caller: calls that each may make while the other is busy."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_core.backends.generation.vllm_streaming import FinishedRequest
from nemo_rl_core.distributed.batched_data_dict import (
    BatchedDataDict,
    InProcess,
    RemoteRow,
    RemoteRows,
)
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.errors import RewardError, WorkerError, WorkerLostError
from nemo_rl_core.models.generation import remote_completions
from nemo_rl_core.models.generation.streaming import KeptCompletion
from nemo_rl_core.rollouts.engine import SingleTurnEpisode
from nemo_rl_core.rollouts.episode import Bounds
from nemo_rl_core.rollouts.multi_turn import MultiTurnRollouts
from nemo_rl_core.rollouts.stream import RolloutStream
from nemo_rl_core.types import Completion, Prompt, Rollout

SECONDS = 500.0
NUM_TURNS = 3


class Engine:
    """Answers each request at once with the same digit; may be lost, with all its requests.

    It is lost at moments that cannot be forced on a real engine. Real engines that stream, fail
    and are killed are in `tests/ray/test_asynchronous.py` and `tests/faults/test_run_faults.py`.
    """

    def __init__(self, tokenizer: Any, tokenizer_folder: Path) -> None:
        self._folder = tokenizer_folder
        self._prompts: dict[int, list[int]] = {}
        self.keeps_completions = False
        self._answer = (*tokenizer.encode("5", add_special_tokens=False), tokenizer.eos_token_id)
        self._done: list[int] = []
        self.num_restarts = 0
        self.is_lost = False
        self.failure: Exception | None = None
        self.restarted_in: list[str] = []
        self.priorities: list[int] = []

    def _refuse_if_lost(self) -> None:
        if self.is_lost:
            raise WorkerLostError("worker 0 of 'generation' died")

    def submit(
        self, names: Sequence[int], requests: BatchedDataDict, *, first_version: int = 0
    ) -> None:
        self._refuse_if_lost()
        self._done += names
        full, _ = remote_completions.full_requests(requests)
        for name, ids, length in zip(names, full["input_ids"], full["input_lengths"], strict=True):
            self._prompts[name] = ids[:length].tolist()
        self.priorities += requests["priorities"].tolist()

    def poll(self, *, wait_seconds: float) -> list[tuple[int, Any]]:
        self._refuse_if_lost()
        if self.failure is not None:
            raise self.failure
        done, self._done = self._done, []
        if not done:
            time.sleep(min(wait_seconds, 0.01))
        return [(name, self._made(name)) for name in done]

    def _made(self, name: int) -> KeptCompletion:
        return KeptCompletion(0, len(self._prompts[name]) + 2, 2, truncated=False)

    def take_remotely(
        self, kept: Mapping[int, KeptCompletion], before: Mapping[int, RemoteRow] | None = None
    ) -> remote_completions.RemoteCompletions:
        self._refuse_if_lost()
        before = before or {}
        answer = Completion(self._answer, (-1.0, -1.0), truncated=False, weight_versions=(0, 0))
        backend = SimpleNamespace(
            take_completions=lambda names: [
                FinishedRequest(name, self._prompts.pop(name), answer) for name in names
            ]
        )
        _, *blocks = remote_completions.take_remotely(
            backend,
            request_ids=list(kept),
            model_folder=self._folder,
            continued=[row for row, name in enumerate(kept) if name in before],
            before=RemoteRows.of_each(list(before.values())) if before else None,
        )
        tokens, texts = (RemoteRows.of_blocks([InProcess(block)], [len(kept)]) for block in blocks)
        lengths = [[each.input_length, each.completion_length] for each in kept.values()]
        return remote_completions.RemoteCompletions(
            *np.array(lengths).T, np.zeros(len(kept), np.bool_), tokens, texts
        )

    def cancel(self, names: Sequence[int]) -> None:
        self._refuse_if_lost()

    def restart(self, lost: WorkerLostError) -> None:
        self.is_lost, self._done, self._prompts = False, [], {}
        self.num_restarts += 1
        self.restarted_in.append(threading.current_thread().name)


class Patient:
    """Ends after `NUM_TURNS` turns; calls a test's hook before it answers."""

    def __init__(self) -> None:
        self.before: Callable[[int], None] = lambda call: None
        self.num_calls = 0

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any]) -> EnvironmentReturn:
        self.num_calls += 1
        self.before(self.num_calls)
        turns = [sum(m["role"] == "assistant" for m in log) for log in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "1="}] * len(turns),
            metadata=list(metadata),
            next_stop_strings=[None] * len(turns),
            rewards=torch.ones(len(turns)),
            terminateds=torch.tensor([turn == NUM_TURNS for turn in turns]),
        )

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {}


@pytest.fixture
def engine(tokenizer: Any, tokenizer_folder: Path) -> Engine:
    return Engine(tokenizer, tokenizer_folder)


@pytest.fixture
def environment() -> Patient:
    return Patient()


@pytest.fixture
def make(
    engine: Engine, environment: Patient, tokenizer: Any
) -> Iterator[Callable[..., RolloutStream]]:
    made = []
    bounds = Bounds(max_turns=9, max_tokens=40, max_new_tokens=6)
    rollouts = MultiTurnRollouts(engine, tokenizer, environment, seed=0, bounds=bounds)  # type: ignore[arg-type]

    def stream(**options: Any) -> RolloutStream:
        made.append(RolloutStream(engine, rollouts.episode, environment, seed=0, **options))
        return made[-1]

    yield stream
    for each in made:
        each.close()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.002)


def test_turns_are_taken_before_anybody_waits(make: Any, environment: Patient, ask: Any) -> None:
    stream = make()
    stream.begin([ask("8=", "8")], num_generations_per_prompt=2, step=1)
    until(lambda: environment.num_calls >= NUM_TURNS)
    rollouts = stream.take(1)
    assert [(each.sample, each.reward, each.error) for each in rollouts] == [
        (0, 3, None),
        (1, 3, None),
    ]


class Panic(BaseException):
    """As a library in Rust raises it."""


def test_what_ends_the_environments_thread_is_raised_by_take(
    make: Any, environment: Patient, ask: Any
) -> None:
    def fail(call: int) -> None:
        raise Panic

    environment.before = fail
    stream = make()
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    with pytest.raises(Panic):
        stream.take(1)


def test_look_polls_the_engine_at_once(
    make: Any, environment: Patient, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_rl_core.rollouts.stream._TURN_POLL_SECONDS", SECONDS)
    stream = make()
    stream.poll_soon()  # has no effect on later requests
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    for turn in range(NUM_TURNS):
        time.sleep(0.05)  # only requested polls
        assert environment.num_calls == turn
        stream.poll_soon()
        until(lambda turn=turn: environment.num_calls == turn + 1)


def test_an_engine_lost_while_nobody_waits_is_restarted_when_somebody_does(
    make: Any, engine: Engine, environment: Patient, ask: Any
) -> None:
    def lose(call: int) -> None:
        engine.is_lost = call == 1

    environment.before = lose
    stream = make()
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    until(lambda: engine.is_lost)
    time.sleep(0.2)  # several looks of the thread
    assert (engine.num_restarts, environment.num_calls) == (0, 1)
    (rollout,) = stream.take(1)
    assert engine.num_restarts == 1
    # It continues from the lost turn, not from the first.
    assert (rollout.reward, environment.num_calls) == (3, 3)


def test_an_engine_that_was_unreachable_once_is_restarted_even_if_it_lives(
    make: Any, engine: Engine, environment: Patient, ask: Any
) -> None:
    """Its answer to that call is lost, and the next weight update would not notice."""

    def lose(call: int) -> None:
        engine.is_lost = call == 1

    environment.before = lose
    stream = make()
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    until(lambda: stream._lost is not None)
    with stream.exclusive():
        engine.is_lost, engine._done = False, []
    (rollout,) = stream.take(1)
    assert (rollout.reward, engine.num_restarts) == (3, 1)


def test_turns_lost_with_their_engine_are_drawn_again(
    make: Any, engine: Engine, environment: Patient, ask: Any
) -> None:
    """It is lost between the poll that names them and the call that stores them elsewhere."""
    original, lost = engine.take_remotely, threading.Event()

    def lose(*args: Any) -> Any:
        engine.is_lost = not lost.is_set()
        lost.set()
        return original(*args)

    engine.take_remotely = lose  # type: ignore[method-assign]
    stream = make()
    stream.begin([ask("8=", "8")], num_generations_per_prompt=2, step=1)
    assert lost.wait(SECONDS)
    assert [each.reward for each in stream.take(1)] == [3, 3]
    assert engine.num_restarts == 1
    assert environment.num_calls == NUM_TURNS


def test_a_lost_engine_is_restarted_by_the_next_weight_update(
    make: Any, engine: Engine, ask: Any
) -> None:
    """The policy has new weights, which an earlier restart would label as the old ones."""
    stream = make()
    engine.is_lost = True
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1, next_version=1)
    assert engine.restarted_in == []
    with stream.exclusive():
        engine.restart(WorkerLostError("as update_weights does"))
    assert [each.reward for each in stream.take(1)] == [3]
    assert engine.num_restarts == 1


def test_an_engine_restarted_by_the_caller_gets_its_requests_again(
    make: Any, engine: Engine, environment: Patient, ask: Any
) -> None:
    called = threading.Event()
    environment.before = lambda call: called.set()
    stream = make()
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    called.wait(SECONDS)
    with stream.exclusive():
        engine.restart(WorkerLostError("as update_weights does"))
    stream.begin([ask("7=", "7")], num_generations_per_prompt=1, step=2)
    assert [each.reward for step in (1, 2) for each in stream.take(step)] == [3, 3]
    assert engine.restarted_in == ["MainThread"]


def test_errors_of_the_engine_stop_the_caller(make: Any, engine: Engine, ask: Any) -> None:
    engine.failure = WorkerError("worker 0 of 'generation' raised RuntimeError")
    stream = make()
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    with pytest.raises(WorkerError, match="raised RuntimeError"):
        stream.take(1)


def test_answers_after_the_second_deadline_do_not_count(
    make: Any, environment: Patient, ask: Any
) -> None:
    let_go = threading.Event()
    environment.before = lambda call: let_go.wait(SECONDS) if call == 1 else None
    stream = make(timeout_seconds=0.1)
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    (rollout,) = stream.take(1)
    assert rollout.error == "no answer within 0.1 s, twice"
    assert (rollout.reward, rollout.completion.token_ids) == (None, ())
    let_go.set()
    stream.begin([ask("7=", "7")], num_generations_per_prompt=1, step=2)
    stream._timeout_seconds = None
    (rollout,) = stream.take(2)
    assert (rollout.reward, rollout.error) == (3, None)


def test_weights_do_not_wait_for_a_slow_environment_but_a_validation_does(
    make: Any, environment: Patient, ask: Any
) -> None:
    thinks, let_go = threading.Event(), threading.Event()

    def think(call: int) -> None:
        thinks.set()
        let_go.wait(SECONDS)

    environment.before = think
    stream = make()
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    assert thinks.wait(SECONDS)
    with stream.exclusive():
        assert not let_go.is_set()
    threading.Timer(0.1, let_go.set).start()
    with stream.environment_alone(), stream.exclusive():
        assert let_go.is_set()
        calls = environment.num_calls
        time.sleep(0.1)
        assert environment.num_calls == calls
    assert stream.take(1)[0].reward == 3


def test_a_closed_stream_leaves_no_thread(make: Any, ask: Any) -> None:
    stream = make()
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    stream.close()
    assert not [each for each in threading.enumerate() if each.name == "rollouts"]


def test_further_draws_are_made_while_nobody_waits(make: Any, ask: Any, engine: Engine) -> None:
    drawn: list[tuple[int, list[tuple[str, int, int]]]] = []

    def on_draw(step: int, rollouts: Sequence[Rollout]) -> list[Prompt] | None:
        drawn.append((step, [(each.prompt.text, each.group, each.sample) for each in rollouts]))
        is_enough = step == 2 or len(drawn) > 2
        return None if is_enough else [ask("7=", "7"), ask("6=", "6")]

    stream = make(on_draw=on_draw)
    stream.begin([ask("8=", "8")], num_generations_per_prompt=2, step=1)
    until(lambda: len(drawn) == 3)
    stream.take(1)
    assert drawn[0] == (1, [("8=", 0, 0), ("8=", 0, 1)])
    assert drawn[1] == (1, [("7=", 1, 0), ("7=", 1, 1), ("6=", 2, 0), ("6=", 2, 1)])
    assert [indices for _, *indices in drawn[2][1]] == [[3, 0], [3, 1], [4, 0], [4, 1]]
    assert len(engine.priorities) == (2 + 4 + 4) * NUM_TURNS  # each turn of each rollout
    assert set(engine.priorities) == {1}
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=2)
    stream.take(2)
    assert engine.priorities[-1] == 2


def test_an_error_in_a_draw_is_raised_for_its_step(make: Any, ask: Any) -> None:
    raised = threading.Event()

    def on_draw(step: int, rollouts: Sequence[Rollout]) -> list[Prompt] | None:
        if step == 2:
            raised.set()
            raise RewardError("4 of 4 rollouts could not be scored")
        raised.wait(SECONDS)
        return None

    stream = make(on_draw=on_draw)
    for step in (2, 1, 3):
        stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=step)
    assert raised.wait(SECONDS)
    stream.take(1)
    with pytest.raises(RewardError, match="4 of 4"):
        stream.take(2)
    stream.take(3)


def test_a_hook_that_exits_ends_the_wait(make: Any, ask: Any) -> None:
    def on_draw(step: int, rollouts: Sequence[Rollout]) -> None:
        raise SystemExit("no room left for the hook's records")

    stream = make(on_draw=on_draw)
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    with pytest.raises(SystemExit, match="no room left"):
        stream.take(1)


@pytest.mark.slow
def test_each_draw_may_take_as_long_as_a_step(make: Any, environment: Patient, ask: Any) -> None:
    """The second draw ends after the first deadline; its scoring exceeds the timeout, too."""
    drawn: list[Sequence[Rollout]] = []

    def on_draw(step: int, rollouts: Sequence[Rollout]) -> list[Prompt] | None:
        time.sleep(1.5)
        drawn.append(rollouts)
        return [ask("7=", "7")] if len(drawn) == 1 else None

    stream = make(on_draw=on_draw, timeout_seconds=1)
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    stream.take(1)
    assert [each.error for rollouts in drawn for each in rollouts] == [None, None]
    assert environment.num_calls == 2 * NUM_TURNS  # none was repeated


def test_a_draw_that_never_ends_is_returned_with_errors(
    make: Any, environment: Patient, ask: Any
) -> None:
    let_go, drawn = threading.Event(), []

    def on_draw(step: int, rollouts: Sequence[Rollout]) -> list[Prompt] | None:
        drawn.append([each.error for each in rollouts])
        return None

    environment.before = lambda call: let_go.wait(2) if call == 1 else None
    stream = make(on_draw=on_draw, timeout_seconds=0.2)
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    stream.take(1)
    assert drawn == [["no answer within 0.2 s, twice"]]
    let_go.set()


def test_a_stream_closed_during_a_slow_reward_sends_no_more_requests(
    make: Any, engine: Engine, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next user of the workers reuses the request names, from 0."""
    monkeypatch.setattr("nemo_rl_core.rollouts.stream.CLOSE_SECONDS", 0.1)
    scores, let_go = threading.Event(), threading.Event()

    def on_draw(step: int, rollouts: Sequence[Rollout]) -> list[Prompt] | None:
        scores.set()
        let_go.wait(SECONDS)
        return [ask("7=", "7")]

    stream = make(on_draw=on_draw)
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    assert scores.wait(SECONDS)
    stream.close()
    num_requests = len(engine.priorities)
    let_go.set()
    until(lambda: not [each for each in threading.enumerate() if each.name == "rollouts"])
    assert len(engine.priorities) == num_requests


@pytest.mark.slow
def test_completions_that_arrive_during_scoring_do_not_time_out(engine: Engine, ask: Any) -> None:
    """Step 1 is complete while step 2 is scored, which takes longer than both deadlines."""
    scores, errors = threading.Event(), dict[int, list[str | None]]()

    def on_draw(step: int, rollouts: Sequence[Rollout]) -> None:
        if step == 2:
            scores.set()
            time.sleep(2)
        errors[step] = [each.error for each in rollouts]

    answered = engine.poll

    def later_steps_first(*, wait_seconds: float) -> list[tuple[int, KeptCompletion]]:
        done = answered(wait_seconds=wait_seconds)
        engine._done = [name for name, _ in done if name == 0 and not scores.is_set()]
        return [each for each in done if each[0] not in engine._done]

    engine.poll = later_steps_first  # type: ignore[method-assign]
    with RolloutStream(
        engine, SingleTurnEpisode, None, seed=0, timeout_seconds=0.2, on_draw=on_draw
    ) as stream:
        for step in (1, 2):
            stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=step)
        assert scores.wait(SECONDS)
        for step in (1, 2):
            stream.take(step)
    assert errors == {1: [None], 2: [None]}
    assert len(engine.priorities) == 2  # none was requested again
