"""Compares the rollouts of a stream, whose completions stay with their engines, with the samples.

The stream, the controller side of the streaming engines and the code in the workers are real; two
engines complete each request at once, depending on its seed.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl_core.algorithms.grpo.data import grpo_batch
from nemo_rl_core.backends.generation.vllm_streaming import FinishedRequest, StreamingVllmBackend
from nemo_rl_core.config.trainer import GateConfig
from nemo_rl_core.data.pretrained import decoded, load_tokenizer
from nemo_rl_core.distributed.batched_data_dict import BatchedDataDict, InProcess, RemoteRows
from nemo_rl_core.distributed.named_sharding import DATA, TENSOR, NamedSharding
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.errors import RewardError, WorkerLostError
from nemo_rl_core.models.generation.streaming import (
    RequestBalance,
    StreamingGeneration,
    TurnGeneration,
)
from nemo_rl_core.models.validation import agreement, agreement_metrics, check_consistency
from nemo_rl_core.rollouts.engine import SingleTurnEpisode, request_seed
from nemo_rl_core.rollouts.episode import Bounds
from nemo_rl_core.rollouts.multi_turn import MultiTurnRollouts
from nemo_rl_core.rollouts.records import load_rollouts, save_rollouts
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts
from nemo_rl_core.rollouts.stream import RolloutStream
from nemo_rl_core.types import Completion, Prompt, Rollout

NUM_ENGINES = 2
PROMPTS = [
    Prompt(id="a", text="1+", token_ids=(5, 6, 7), answer="x", task="sums"),
    Prompt(id="b", text="2", token_ids=(8,), answer="y", task="sums"),
]


def completion_of(seed: int) -> Completion:
    length = 1 + seed % 4
    ids = tuple(4 + (seed + index) % 9 for index in range(length))
    logprobs = tuple(-0.125 * (seed % 7 + index + 1) for index in range(length))  # exact in float32
    return Completion(ids, logprobs, seed % 2 == 0, weight_versions=(3,) * length)


class Worker:
    """An engine's worker, which has no requests after a restart."""

    poll = StreamingVllmBackend.poll
    poll_lengths = StreamingVllmBackend.poll_lengths

    def __init__(self) -> None:
        self._finished: list[FinishedRequest] = []
        self._kept: dict[int, FinishedRequest] = {}
        self.silent = False
        self.taken_names: list[list[int]] = []

    def submit(self, names: Sequence[int], batch: BatchedDataDict, first_version: int = 0) -> None:
        for row, name in enumerate(names):
            prompt = batch["input_ids"][row, : int(batch["input_lengths"][row])].tolist()
            draws = completion_of(int(batch["seeds"][row]))
            self._finished.append(FinishedRequest(name, prompt, draws))

    def _new_finished(self, wait_seconds: float) -> list[FinishedRequest]:
        if self.silent:
            return []
        draws, self._finished = self._finished[:3], self._finished[3:]
        return draws[::-1]

    def cancel(self, request_ids: list[int]) -> None:
        self._finished = [each for each in self._finished if each.request_id not in request_ids]

    def take_completions(self, names: list[int]) -> list[FinishedRequest]:
        self.taken_names.append(names)
        return StreamingVllmBackend.take_completions(self, names)  # type: ignore[arg-type]


class Workers:
    """The calls of `RayWorkerGroup` that a stream makes."""

    def __init__(self) -> None:
        self.started: list[Worker] = [Worker() for _ in range(NUM_ENGINES)]
        self.lost_when_called = ""

    def start_single_worker(
        self, method: str, *args: Any, rank: int, num_remote: int = 0, **kwargs: Any
    ) -> Any:
        name = args[0].__name__ if method == "__ray_call__" else method
        if self.lost_when_called == name:
            raise WorkerLostError("worker 0 of 'generation' died")
        if method == "__ray_call__":
            draws = args[0](self.started[rank], **kwargs)
            if not num_remote:
                return draws
            first, *others = draws
            assert len(others) == num_remote
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
        self.num_engines, self.num_restarts, self.keeps_completions = NUM_ENGINES, 0, False
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


class TurnEngines(TurnGeneration):
    """The same for turns of synchronous rollouts; notes when it wakes up and sleeps."""

    __init__ = Engines.__init__
    _begin = Engines._begin
    restart = Engines.restart

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> None:
        self.calls = ["wake"]

    def finish_generation(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("sleep")


class Echo:
    """Answers with the number of the turn, after a while; ends at the third."""

    async def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        turn = sum(each["role"] == "assistant" for log in message_log_batch for each in log)
        await asyncio.sleep(0.01 * (hash(message_log_batch[0][-1]["content"]) % 3))
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"{turn}="}],
            metadata=list(metadata),
            next_stop_strings=[None],
            rewards=torch.tensor([0.5]),
            terminateds=torch.tensor([turn == 3]),
        )


@pytest.mark.parametrize("lost", ["", "take_remotely"])
def test_synchronous_episodes_are_streamed(tiny_model: Path, tokenizer: Any, lost: str) -> None:
    engines = TurnEngines(tiny_model)
    engines.workers.lost_when_called = lost
    bounds = Bounds(max_turns=9, max_tokens=200, max_new_tokens=8)
    rollouts = MultiTurnRollouts(engines, tokenizer, Echo(), seed=0, bounds=bounds)
    drawn = rollouts.run(
        PROMPTS, num_generations_per_prompt=5, step=1, first_group=2, releases_memory=True
    )
    assert engines.num_restarts == bool(lost)
    assert engines.calls == ["wake", "sleep"]
    indices = [(group, sample) for group in (2, 3) for sample in range(5)]
    assert [(each.group, each.sample) for each in drawn] == indices
    for each, index in zip(drawn, indices, strict=True):
        turns = [completion_of(request_seed(0, 1, *index, turn)) for turn in range(3)]
        assert each.error is None
        assert each.text == "\n".join(decoded(tokenizer, turn.token_ids) for turn in turns)
        made = each.completion.read()
        tokens = zip(made.token_ids, made.logprobs, made.token_mask, strict=True)
        assert [token[:2] for token in tokens if token[2]] == [
            pair for turn in turns for pair in zip(turn.token_ids, turn.logprobs, strict=True)
        ]
        assert made.weight_versions == ()


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(tiny_model)


@pytest.fixture
def make(tiny_model: Path) -> Iterator[Callable[..., tuple[Engines, RolloutStream]]]:
    made = []

    def stream(**options: Any) -> tuple[Engines, RolloutStream]:
        engines = Engines(tiny_model)
        made.append(RolloutStream(engines, SingleTurnEpisode, None, seed=0, **options))
        return engines, made[-1]

    yield stream
    for each in made:
        each.close()


def taken(stream: RolloutStream, steps: Sequence[int] = (1, 2)) -> list[Sequence[Rollout]]:
    for step in steps:
        stream.begin(PROMPTS, num_generations_per_prompt=5, step=step)
    return [stream.take(step) for step in steps]


def samples(
    tokenizer: Any, step: int, prompts: Sequence[Prompt] = PROMPTS, first_group: int = 0
) -> list[Rollout]:
    """Returns the rollouts that the workers sample in a step."""
    indexed = [
        (prompt, group, sample, completion_of(request_seed(0, step, group, sample)))
        for group, prompt in enumerate(prompts, start=first_group)
        for sample in range(5)
    ]
    return [
        Rollout(prompt, each, decoded(tokenizer, each.token_ids), group=group, sample=sample)
        for prompt, group, sample, each in indexed
    ]


def test_rollouts_of_a_stream_equal_the_samples(
    make: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = [samples(tokenizer, step) for step in (1, 2)]
    engines, stream = make()
    with monkeypatch.context() as patch:
        patch.setattr(RemoteRows, "fetched", None)  # nothing is fetched
        remote = taken(stream)
    assert all(isinstance(each, RemoteRollouts) for each in remote)
    assert [list(each) for each in remote] == here
    assert all(len(worker.taken_names) == 2 for worker in engines.workers.started)  # one per step
    for ours, theirs in zip(remote, here, strict=True):
        batches = [
            grpo_batch(ours.with_outcomes([1.0] * 10)).fetched(),
            grpo_batch([each.scored(1.0) for each in theirs]).fetched(),
        ]
        assert set(batches[0]) == set(batches[1])
        for name, column in batches[1].items():
            assert batches[0][name].dtype == column.dtype, name
            assert torch.equal(batches[0][name], column), name


@pytest.mark.parametrize("call", ["take_remotely", "poll_lengths"])
def test_completions_kept_by_a_lost_engine_are_requested_again(make: Any, call: str) -> None:
    engines, stream = make()
    expected = [list(each) for each in taken(stream)]
    engines.workers.lost_when_called = call
    assert [list(each) for each in taken(stream)] == expected
    assert engines.num_restarts == 1


def test_completions_kept_by_restarted_engines_are_requested_again(make: Any) -> None:
    engines, stream = make()
    expected = [list(each) for each in taken(stream)]
    for step in (1, 2):
        stream.begin(PROMPTS, num_generations_per_prompt=5, step=step)
    first = list(stream.take(1))  # by now, some of step 2 are kept too
    with stream.exclusive():
        engines.restart(WorkerLostError("as update_weights does"))
    assert [first, list(stream.take(2))] == expected


def test_a_rollout_that_times_out_has_an_error_and_no_tokens(
    make: Any, tokenizer: Any, tmp_path: Path
) -> None:
    engines, stream = make(timeout_seconds=0.05)
    here = samples(tokenizer, 1)
    engines.workers.started[1].silent = True
    (draws,) = taken(stream, [1])
    failed = [each for each in draws if each.error is not None]
    assert failed
    for ours, theirs in zip(draws, here, strict=True):
        if ours.error is None:
            assert ours == theirs
        else:
            assert ours.error == "no answer within 0.05 s, twice"
            assert (ours.prompt, ours.text) == (theirs.prompt, "")
            assert ours.completion == Completion((), (), truncated=True)
    scores: list[float | RewardError] = [float(row) for row in range(10 - len(failed))]
    scores[1] = RewardError("no number")
    scored = draws.with_scored(draws.valid().with_outcomes(scores))
    kept = [each for each in scored if not str(each.error).startswith("no answer")]
    assert [each.reward for each in kept] == [0.0, None, *scores[2:]]
    assert kept[1].error == "no number"
    save_rollouts(scored, tmp_path / "step.parquet")
    assert load_rollouts(tmp_path / "step.parquet") == list(scored)


class Draws:
    """Asks for two draws per step and loses the engines at a call after the first draw.

    Attributes:
        draws: Rollouts of all draws.
        engines: Engines to lose.
    """

    engines: Engines

    def __init__(self, lost_when_called: str = "") -> None:
        self._lost_when_called = lost_when_called
        self.draws: list[Sequence[Rollout]] = []

    def __call__(self, step: int, rollouts: Sequence[Rollout]) -> list[Prompt] | None:
        self.draws.append(rollouts)
        if len(self.draws) == 1:
            self.engines.workers.lost_when_called = self._lost_when_called
        return PROMPTS[::-1] if len(self.draws) % 2 else None


@pytest.mark.parametrize("lost_when_called", ["", "take_remotely", "poll_lengths"])
def test_draws_of_a_stream_equal_the_samples(
    make: Any, tokenizer: Any, lost_when_called: str
) -> None:
    draws = Draws(lost_when_called)
    draws.engines, stream = make(on_draw=draws)
    for step in (1, 2):
        stream.begin(PROMPTS, num_generations_per_prompt=5, step=step)
        stream.take(step)
    assert all(isinstance(each, RemoteRollouts) for each in draws.draws)
    assert [list(each) for each in draws.draws] == [
        rollouts
        for step in (1, 2)
        for rollouts in (samples(tokenizer, step), samples(tokenizer, step, PROMPTS[::-1], 2))
    ]
    assert draws.engines.num_restarts == int(bool(lost_when_called))


def test_a_draw_that_ended_on_restarted_engines_is_requested_again(
    make: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = Draws()
    draws.engines, stream = make(on_draw=draws)
    end_draws = stream._end_draws

    def after_a_restart() -> None:
        if stream._ended_draws() and not draws.engines.num_restarts:
            with stream.exclusive():
                draws.engines.restart(WorkerLostError("as update_weights does"))
        end_draws()

    monkeypatch.setattr(stream, "_end_draws", after_a_restart)
    stream.begin(PROMPTS, num_generations_per_prompt=5, step=1)
    stream.take(1)
    assert draws.engines.num_restarts == 1
    expected = [samples(tokenizer, 1), samples(tokenizer, 1, PROMPTS[::-1], 2)]
    assert [list(each) for each in draws.draws] == expected


def test_ranks_report_the_same_staleness_as_the_gate() -> None:
    """Tokens of step 6 have the versions 3 to 5; only those of version 5 are compared."""
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
    _, expected = check_consistency(batch, GateConfig(), version=5)
    parts = [agreement(batch, GateConfig(), version=5)]
    draws = agreement_metrics(parts, GateConfig())
    assert draws is not None
    assert {name: draws[name] for name in expected} == expected
    assert draws.keys() - expected.keys() == {"kl_generation_trainer", "sampling_importance_ratio"}
    halves = [agreement(batch.slice(i, i + 3), GateConfig(), version=5) for i in (0, 3)]
    assert agreement_metrics(halves, GateConfig()) == pytest.approx(draws)
    assert expected["staleness_max"] == 2.0
