"""A stream's thread beside a caller who trains: who may do what while the other is busy."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_core.backends.generation.vllm_streaming import FinishedRequest
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.held_rows import HeldRow, HeldRows, InProcess
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.errors import RewardError, WorkerError, WorkerLostError
from nemo_rl_core.models.generation import where_made
from nemo_rl_core.models.generation.streaming import KeptCompletion
from nemo_rl_core.rollouts import stream as stream_module
from nemo_rl_core.rollouts.engine import RolloutPlace, SingleTurnEpisode
from nemo_rl_core.rollouts.episode import Bounds
from nemo_rl_core.rollouts.multi_turn import MultiTurnRollouts
from nemo_rl_core.rollouts.stream import RolloutStream
from nemo_rl_core.types import Completion, Prompt, Rollout
from tests.commands import REPOSITORY

SECONDS = 500.0
NUM_TURNS = 3


class Engine:
    """Answers each request with the same digit at once; may be lost, and knows nothing then.

    It is lost at a moment that a real one cannot be made to choose; real ones that stream, fail and
    are killed are in `tests/ray/test_asynchronous.py` and `tests/faults/test_run_faults.py`.
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
        whole, _ = where_made.whole_requests(requests)
        for name, ids, length in zip(
            names, whole["input_ids"], whole["input_lengths"], strict=True
        ):
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

    def _made(self, name: int) -> Completion | KeptCompletion:
        if self.keeps_completions:
            return KeptCompletion(0, len(self._prompts[name]) + 2, 2, truncated=False)
        return Completion(self._answer, (-1.0, -1.0), truncated=False, weight_versions=(0, 0))

    def hand_over(
        self, kept: Mapping[int, KeptCompletion], before: Mapping[int, HeldRow]
    ) -> where_made.HeldCompletions:
        self._refuse_if_lost()
        answer = Completion(self._answer, (-1.0, -1.0), truncated=False, weight_versions=(0, 0))
        backend = SimpleNamespace(
            hand_over=lambda names: [
                FinishedRequest(name, self._prompts.pop(name), answer) for name in names
            ]
        )
        _, *blocks = where_made.hand_over(
            backend,
            names=list(kept),
            model_folder=self._folder,
            going_on=[place for place, name in enumerate(kept) if name in before],
            before=HeldRows.of_each(list(before.values())) if before else None,
        )
        tokens, texts = (HeldRows.of_blocks([InProcess(block)], [len(kept)]) for block in blocks)
        lengths = [[each.input_length, each.completion_length] for each in kept.values()]
        return where_made.HeldCompletions(
            *np.array(lengths).T, np.zeros(len(kept), np.bool_), tokens, texts
        )

    def cancel(self, names: Sequence[int]) -> None:
        self._refuse_if_lost()

    def restart(self, lost: WorkerLostError) -> None:
        self.is_lost, self._done, self._prompts = False, [], {}
        self.num_restarts += 1
        self.restarted_in.append(threading.current_thread().name)


class Patient:
    """Ends after `NUM_TURNS` turns; does what a test says before it answers."""

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


@pytest.fixture(params=[False, True], ids=["brought", "held"])
def holds(request: pytest.FixtureRequest) -> bool:
    """Whether tokens stay with the engine."""
    return bool(request.param)


@pytest.fixture
def environment() -> Patient:
    return Patient()


@pytest.fixture
def make(
    engine: Engine, environment: Patient, tokenizer: Any, holds: bool
) -> Iterator[Callable[..., RolloutStream]]:
    made = []
    bounds = Bounds(max_turns=9, max_tokens=40, max_new_tokens=6)
    rollouts = MultiTurnRollouts(engine, tokenizer, environment, seed=0, bounds=bounds)  # type: ignore[arg-type]

    def stream(**options: Any) -> RolloutStream:
        episode = partial(rollouts.episode, holds=holds)
        made.append(RolloutStream(engine, episode, environment, seed=0, holds=holds, **options))
        return made[-1]

    yield stream
    for each in made:
        each.close()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.002)


def test_turns_are_taken_before_anybody_asks(make: Any, environment: Patient, ask: Any) -> None:
    stream = make()
    stream.begin([ask("8=", "8")], num_generations_per_prompt=2, step=1)
    until(lambda: environment.num_calls >= NUM_TURNS)
    found = stream.take(1)
    assert [(each.sample, each.reward, each.error) for each in found] == [
        (0, 3, None),
        (1, 3, None),
    ]


def test_a_caller_who_will_take_soon_has_the_engine_polled_at_once(
    make: Any, environment: Patient, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_rl_core.rollouts.stream._TURN_POLL_SECONDS", SECONDS)
    stream = make()
    stream.look()  # at nothing, and for nothing that comes later
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    for turn in range(NUM_TURNS):
        time.sleep(0.05)  # no poll but those that were asked for
        assert environment.num_calls == turn
        stream.look()
        until(lambda turn=turn: environment.num_calls == turn + 1)


def test_an_engine_that_is_lost_while_nobody_waits_is_left_until_somebody_does(
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
    (found,) = stream.take(1)
    assert engine.num_restarts == 1
    # It goes on from the turn that was lost, not from the first.
    assert (found.reward, environment.num_calls) == (3, 3)


def test_an_engine_that_was_out_of_reach_once_is_started_again_though_it_lives(
    make: Any, engine: Engine, environment: Patient, ask: Any
) -> None:
    """Its answer to that call is lost, and the next update of weights finds nothing amiss."""

    def lose(call: int) -> None:
        engine.is_lost = call == 1

    environment.before = lose
    stream = make()
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    until(lambda: stream._lost is not None)
    with stream.exclusive():
        engine.is_lost, engine._done = False, []
    (found,) = stream.take(1)
    assert (found.reward, engine.num_restarts) == (3, 1)


@pytest.mark.parametrize("holds", [True], indirect=True)
def test_turns_that_are_lost_with_the_engine_that_kept_them_are_drawn_again(
    make: Any, engine: Engine, environment: Patient, ask: Any
) -> None:
    """It is lost between the poll that names them and the call that puts them elsewhere."""
    handed_over, lost = engine.hand_over, threading.Event()

    def lose(*asked: Any) -> Any:
        engine.is_lost = not lost.is_set()
        lost.set()
        return handed_over(*asked)

    engine.hand_over = lose  # type: ignore[method-assign]
    stream = make()
    stream.begin([ask("8=", "8")], num_generations_per_prompt=2, step=1)
    assert lost.wait(SECONDS)
    assert [each.reward for each in stream.take(1)] == [3, 3]
    assert engine.num_restarts == 1
    assert environment.num_calls == NUM_TURNS


def test_a_lost_engine_is_left_to_the_weights_that_are_handed_over_next(
    make: Any, engine: Engine, ask: Any
) -> None:
    """Whose policy has trained on: a restart before would mark its weights as the old ones."""
    stream = make()
    engine.is_lost = True
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1, next_version=1)
    assert engine.restarted_in == []
    with stream.exclusive():
        engine.restart(WorkerLostError("as update_weights does"))
    assert [each.reward for each in stream.take(1)] == [3]
    assert engine.num_restarts == 1


def test_an_engine_that_the_caller_has_restarted_is_asked_again(
    make: Any, engine: Engine, environment: Patient, ask: Any
) -> None:
    held = threading.Event()
    environment.before = lambda call: held.set()
    stream = make()
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    held.wait(SECONDS)
    with stream.exclusive():
        engine.restart(WorkerLostError("as update_weights does"))
    stream.begin([ask("7=", "7")], num_generations_per_prompt=1, step=2)
    assert [each.reward for step in (1, 2) for each in stream.take(step)] == [3, 3]
    assert engine.restarted_in == ["MainThread"]


def test_what_the_engine_raises_stops_the_caller(make: Any, engine: Engine, ask: Any) -> None:
    engine.failure = WorkerError("worker 0 of 'generation' raised RuntimeError")
    stream = make()
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    with pytest.raises(WorkerError, match="raised RuntimeError"):
        stream.take(1)


def test_what_comes_after_the_second_deadline_does_not_count(
    make: Any, environment: Patient, ask: Any
) -> None:
    let_go = threading.Event()
    environment.before = lambda call: let_go.wait(SECONDS) if call == 1 else None
    stream = make(timeout_seconds=0.1)
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    (found,) = stream.take(1)
    assert found.error == "no answer within 0.1 s, twice"
    assert (found.reward, found.completion.token_ids) == (None, ())
    let_go.set()
    stream.begin([ask("7=", "7")], num_generations_per_prompt=1, step=2)
    stream._timeout_seconds = None
    (found,) = stream.take(2)
    assert (found.reward, found.error) == (3, None)


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
    with stream.exclusive(with_environment=True):
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
    assert [place for _, *place in drawn[2][1]] == [[3, 0], [3, 1], [4, 0], [4, 1]]
    assert len(engine.priorities) == (2 + 4 + 4) * NUM_TURNS  # each turn of each rollout
    assert set(engine.priorities) == {1}
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=2)
    stream.take(2)
    assert engine.priorities[-1] == 2


def test_what_a_draw_raises_is_that_of_its_step(make: Any, ask: Any) -> None:
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


def test_each_draw_may_take_as_long_as_a_step(make: Any, environment: Patient, ask: Any) -> None:
    """The second draw ends after the first deadline, and scoring it takes longer than all."""
    drawn: list[Sequence[Rollout]] = []

    def on_draw(step: int, rollouts: Sequence[Rollout]) -> list[Prompt] | None:
        time.sleep(1.5)
        drawn.append(rollouts)
        return [ask("7=", "7")] if len(drawn) == 1 else None

    stream = make(on_draw=on_draw, timeout_seconds=1)
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    stream.take(1)
    assert [each.error for rollouts in drawn for each in rollouts] == [None, None]
    assert environment.num_calls == 2 * NUM_TURNS  # none was begun once more


def test_a_draw_that_never_ends_is_handed_out_with_errors(
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


def test_a_stream_that_was_closed_over_a_slow_reward_asks_the_engine_for_nothing_more(
    make: Any, engine: Engine, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next user of the workers calls its requests by the same names, from 0 on."""
    monkeypatch.setattr("nemo_rl_core.rollouts.stream._CLOSE_SECONDS", 0.1)
    scores, let_go = threading.Event(), threading.Event()

    def on_draw(step: int, rollouts: Sequence[Rollout]) -> list[Prompt] | None:
        scores.set()
        let_go.wait(SECONDS)
        return [ask("7=", "7")]

    stream = make(on_draw=on_draw)
    stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=1)
    assert scores.wait(SECONDS)
    stream.close()
    asked = len(engine.priorities)
    let_go.set()
    until(lambda: not [each for each in threading.enumerate() if each.name == "rollouts"])
    assert len(engine.priorities) == asked


def test_what_has_come_while_another_step_was_scored_is_not_given_up(
    engine: Engine, tokenizer: Any, ask: Any
) -> None:
    """Step 1 is complete while step 2 is scored, which takes longer than both deadlines."""
    scores, found = threading.Event(), dict[int, list[str | None]]()

    def on_draw(step: int, rollouts: Sequence[Rollout]) -> None:
        if step == 2:
            scores.set()
            time.sleep(2)
        found[step] = [each.error for each in rollouts]

    def episode(prompt: Prompt, place: RolloutPlace) -> SingleTurnEpisode:
        return SingleTurnEpisode(prompt, place, tokenizer=tokenizer)

    answered = engine.poll

    def later_steps_first(*, wait_seconds: float) -> list[tuple[int, Completion]]:
        done = answered(wait_seconds=wait_seconds)
        engine._done = [name for name, _ in done if name == 0 and not scores.is_set()]
        return [each for each in done if each[0] not in engine._done]

    engine.poll = later_steps_first  # type: ignore[method-assign]
    with RolloutStream(
        engine, episode, None, seed=0, timeout_seconds=0.2, on_draw=on_draw
    ) as stream:
        for step in (1, 2):
            stream.begin([ask("8=", "8")], num_generations_per_prompt=1, step=step)
        assert scores.wait(SECONDS)
        for step in (1, 2):
            stream.take(step)
    assert found == {1: [None], 2: [None]}
    assert len(engine.priorities) == 2  # none was asked for once more


def test_the_page_says_how_often_engines_are_polled() -> None:
    page = " ".join((REPOSITORY / "docs/asynchronous.md").read_text().split())
    turns, draws = stream_module._TURN_POLL_SECONDS, stream_module._DRAW_POLL_SECONDS
    assert f"every {turns:g} s for turns and every {draws:g} s for single turns" in page
    assert stream_module._AWAITED_POLL_SECONDS == 0.001
    assert "while the trainer waits for rollouts, every millisecond" in page
