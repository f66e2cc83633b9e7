"""Rollouts of a stream whose completions stay with their engines, against those that are brought.

The stream, the streaming engines' side on the controller and what runs in a worker are the real
ones; two engines complete what they are asked at once, by its seed.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms.grpo.asynchronous import AsyncGRPOTrainer
from nemo_rl_core.algorithms.grpo.data import grpo_batch
from nemo_rl_core.backends.generation.vllm_streaming import FinishedRequest, StreamingVllmBackend
from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.data.pretrained import load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict
from nemo_rl_core.distributed.held_rows import HeldRows, InProcess
from nemo_rl_core.distributed.named_sharding import DATA, TENSOR, NamedSharding
from nemo_rl_core.errors import RewardError, WorkerLostError
from nemo_rl_core.models.generation.balance import RequestBalance
from nemo_rl_core.models.generation.streaming import StreamingGeneration
from nemo_rl_core.models.validation import agreement, agreement_metrics
from nemo_rl_core.rollouts.engine import RolloutPlace, SingleTurnEpisode
from nemo_rl_core.rollouts.held import HeldRollouts
from nemo_rl_core.rollouts.records import load_rollouts, save_rollouts
from nemo_rl_core.rollouts.stream import RolloutStream
from nemo_rl_core.types import Completion, Prompt, Rollout

NUM_ENGINES = 2
PROMPTS = [
    Prompt(id="a", text="1+", token_ids=(5, 6, 7), answer="x", task="sums"),
    Prompt(id="b", text="2", token_ids=(8,), answer="y", task="sums"),
]


def completion_of(seed: int) -> Completion:
    length = 1 + seed % 4
    ids = tuple(4 + (seed + place) % 9 for place in range(length))
    logprobs = tuple(-0.125 * (seed % 7 + place + 1) for place in range(length))  # of 32 bits
    return Completion(ids, logprobs, seed % 2 == 0, weight_versions=(3,) * length)


class Worker:
    """An engine's; it knows nothing of requests after it was started again."""

    poll = StreamingVllmBackend.poll
    poll_lengths = StreamingVllmBackend.poll_lengths

    def __init__(self) -> None:
        self._finished: list[FinishedRequest] = []
        self._kept: dict[int, FinishedRequest] = {}
        self.silent = False
        self.handed_over: list[list[int]] = []

    def submit(self, names: Sequence[int], batch: BatchedDataDict, first_version: int = 0) -> None:
        for row, name in enumerate(names):
            prompt = batch["input_ids"][row, : int(batch["input_lengths"][row])].tolist()
            found = completion_of(int(batch["seeds"][row]))
            self._finished.append(FinishedRequest(name, prompt, found))

    def _new_finished(self, wait_seconds: float) -> list[FinishedRequest]:
        if self.silent:
            return []
        found, self._finished = self._finished[:3], self._finished[3:]
        return found[::-1]

    def cancel(self, names: list[int]) -> None:
        self._finished = [each for each in self._finished if each.name not in names]

    def hand_over(self, names: list[int]) -> list[FinishedRequest]:
        self.handed_over.append(names)
        return StreamingVllmBackend.hand_over(self, names)  # type: ignore[arg-type]


class Workers:
    """The calls of `RayWorkerGroup` that a stream makes."""

    def __init__(self) -> None:
        self.started: list[Worker] = [Worker() for _ in range(NUM_ENGINES)]
        self.lost_when_called = ""

    def start_single_worker(
        self, method: str, *args: Any, rank: int, num_held: int = 0, **kwargs: Any
    ) -> Any:
        name = args[0].__name__ if method == "__ray_call__" else method
        if self.lost_when_called == name:
            raise WorkerLostError("worker 0 of 'generation' died")
        if method == "__ray_call__":
            found = args[0](self.started[rank], **kwargs)
            if not num_held:
                return found
            first, *others = found
            assert len(others) == num_held
            return [first, *map(InProcess, others)]
        return getattr(self.started[rank], method)(**kwargs)

    def run_all_workers_sharded_data(
        self, method: str, *, common_kwargs: dict[str, Any], **_: Any
    ) -> list[Any]:
        return [getattr(worker, method)(**common_kwargs) for worker in self.started]

    def finish(self, pending: list[Any], timeout_seconds: float | None = None) -> list[Any]:
        return pending


class Engines(StreamingGeneration):
    """Streaming engines without Ray."""

    def __init__(self, model_folder: Path) -> None:
        config = SimpleNamespace(
            max_new_tokens=8, ranks_per_engine=1, generate_timeout_seconds=None
        )
        settings: Any = SimpleNamespace(model_folder=model_folder, config=config)
        self._setup, self._sharding = settings, NamedSharding([[0], [1]], (DATA, TENSOR))
        self.num_restarts, self.keeps_completions = 0, False
        self._proven = model_folder
        self._begin()

    def _begin(self) -> None:
        self.workers = Workers()
        self._workers: Any = self.workers
        self._balance, self._arrived = RequestBalance(NUM_ENGINES), []
        self._submitting = []

    def restart(self, lost: WorkerLostError) -> None:
        self.num_restarts += 1
        self._begin()


@pytest.fixture
def make(tiny_model: Path) -> Iterator[Callable[..., tuple[Engines, RolloutStream]]]:
    tokenizer, made = load_tokenizer(tiny_model), []

    def episode(prompt: Prompt, place: RolloutPlace) -> SingleTurnEpisode:
        return SingleTurnEpisode(prompt, place, tokenizer=tokenizer)

    def stream(**options: Any) -> tuple[Engines, RolloutStream]:
        engines = Engines(tiny_model)
        made.append(RolloutStream(engines, episode, None, seed=0, **options))
        return engines, made[-1]

    yield stream
    for each in made:
        each.close()


def taken(stream: RolloutStream, steps: Sequence[int] = (1, 2)) -> list[Sequence[Rollout]]:
    for step in steps:
        stream.begin(PROMPTS, num_generations_per_prompt=5, step=step)
    return [stream.take(step) for step in steps]


def test_what_stays_is_what_would_be_brought(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, brings = make()
    here = taken(brings)
    engines, holds = make(holds=True)
    with monkeypatch.context() as patch:
        patch.setattr(HeldRows, "fetched", None)  # nothing is read on the way
        held = taken(holds)
    assert all(isinstance(each, HeldRollouts) for each in held)
    assert [list(each) for each in held] == here
    assert all(len(worker.handed_over) == 2 for worker in engines.workers.started)  # one a step
    for ours, theirs in zip(held, here, strict=True):
        batches = [
            grpo_batch(ours.with_outcomes([1.0] * 10)).fetched(),
            grpo_batch([each.scored(1.0) for each in theirs]),
        ]
        assert set(batches[0]) == set(batches[1])
        for name, column in batches[1].items():
            assert batches[0][name].dtype == column.dtype, name
            assert torch.equal(batches[0][name], column), name


@pytest.mark.parametrize("call", ["hand_over", "poll_lengths"])
def test_what_a_lost_engine_has_kept_is_asked_for_again(make: Any, call: str) -> None:
    engines, stream = make(holds=True)
    expected = [list(each) for each in taken(stream)]
    engines.workers.lost_when_called = call
    assert [list(each) for each in taken(stream)] == expected
    assert engines.num_restarts == 1


def test_what_was_kept_by_engines_that_the_caller_restarts_is_asked_for_again(make: Any) -> None:
    engines, stream = make(holds=True)
    expected = [list(each) for each in taken(stream)]
    for step in (1, 2):
        stream.begin(PROMPTS, num_generations_per_prompt=5, step=step)
    first = list(stream.take(1))  # by now some of step 2 are kept, too
    with stream.exclusive():
        engines.restart(WorkerLostError("as update_weights does"))
    assert [first, list(stream.take(2))] == expected


def test_one_that_never_comes_has_an_error_and_no_tokens(make: Any, tmp_path: Path) -> None:
    engines, stream = make(holds=True, timeout_seconds=0.05)
    _, brings = make()
    (here,) = taken(brings, [1])
    engines.workers.started[1].silent = True
    (found,) = taken(stream, [1])
    failed = [each for each in found if each.error is not None]
    assert failed
    for ours, theirs in zip(found, here, strict=True):
        if ours.error is None:
            assert ours == theirs
        else:
            assert ours.error == "no answer within 0.05 s, twice"
            assert (ours.prompt, ours.text) == (theirs.prompt, "")
            assert ours.completion == Completion((), (), truncated=True)
    scores: list[float | RewardError] = [float(row) for row in range(10 - len(failed))]
    scores[1] = RewardError("no number")
    scored = found.with_scored(found.valid().with_outcomes(scores))
    kept = [each for each in scored if not str(each.error).startswith("no answer")]
    assert [each.reward for each in kept] == [0.0, None, *scores[2:]]
    assert kept[1].error == "no number"
    save_rollouts(scored, tmp_path / "step.parquet")
    assert load_rollouts(tmp_path / "step.parquet") == list(scored)


class Draws:
    """Two draws a step; after the first of all, engines are lost at a call.

    Attributes:
        found: All draws.
        engines: To be lost.
    """

    engines: Engines

    def __init__(self, lost_when_called: str = "") -> None:
        self._lost_when_called = lost_when_called
        self.found: list[Sequence[Rollout]] = []

    def __call__(self, step: int, rollouts: Sequence[Rollout]) -> list[Prompt] | None:
        self.found.append(rollouts)
        if len(self.found) == 1:
            self.engines.workers.lost_when_called = self._lost_when_called
        return PROMPTS[::-1] if len(self.found) % 2 else None


@pytest.mark.parametrize("lost_when_called", ["", "hand_over", "poll_lengths"])
def test_draws_that_stay_are_those_that_would_be_brought(make: Any, lost_when_called: str) -> None:
    here, held = Draws(), Draws(lost_when_called)
    for draws, holds in ((here, False), (held, True)):
        draws.engines, stream = make(holds=holds, on_draw=draws)
        for step in (1, 2):
            stream.begin(PROMPTS, num_generations_per_prompt=5, step=step)
            stream.take(step)
    assert len(held.found) == 4
    assert all(isinstance(each, HeldRollouts) for each in held.found)
    assert [list(each) for each in held.found] == here.found
    assert held.engines.num_restarts == int(bool(lost_when_called))


def test_a_draw_that_ended_on_engines_that_the_caller_restarts_is_asked_for_again(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, held = Draws(), Draws()
    here.engines, brings = make(on_draw=here)
    held.engines, holds = make(holds=True, on_draw=held)
    hand_out = holds._end_draws

    def after_a_restart() -> None:
        if holds._ended_draws() and not held.engines.num_restarts:
            with holds.exclusive():
                held.engines.restart(WorkerLostError("as update_weights does"))
        hand_out()

    monkeypatch.setattr(holds, "_end_draws", after_a_restart)
    for stream in (brings, holds):
        stream.begin(PROMPTS, num_generations_per_prompt=5, step=1)
        stream.take(1)
    assert held.engines.num_restarts == 1
    assert [list(each) for each in held.found] == here.found


def test_ranks_say_how_old_tokens_are_as_the_gate_does() -> None:
    """Steps 3 to 5 have drawn the tokens of step 6; only those of the last are compared."""
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(6, 9, generator=generator)
    mask = torch.rand(6, 9, generator=generator) < 0.8
    gaps = 0.01 * torch.randn(6, 9, generator=generator)
    versions = torch.randint(3, 6, (6, 9), generator=generator)
    batch = BatchedDataDict(
        {
            "token_mask": mask,
            "sample_mask": torch.ones(6),
            "compared_mask": torch.ones(6),
            "generation_logprobs": logprobs + torch.where(versions == 5, gaps, 1.0),
            "prev_logprobs": logprobs,
            "weight_versions": versions * mask,
        }
    )
    parts_of_it = {"config": SimpleNamespace(gate=GateConfig()), "step": 6, "sampler": None}
    trainer: Any = object.__new__(type("Gated", (AsyncGRPOTrainer,), parts_of_it))
    _, expected = trainer._check_consistency(batch)
    parts = [agreement(batch, GateConfig(), version=5)]
    found = agreement_metrics(parts, GateConfig())
    assert found is not None
    assert {name: found[name] for name in expected} == expected
    assert found.keys() - expected.keys() == {"kl_generation_trainer", "sampling_importance_ratio"}
    halves = [agreement(batch.slice(i, i + 3), GateConfig(), version=5) for i in (0, 3)]
    assert agreement_metrics(halves, GateConfig()) == pytest.approx(found)
    assert expected["staleness_max"] == 2.0
