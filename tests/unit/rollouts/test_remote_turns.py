"""Compares conversations of several engines with those of one engine in this process."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_rl_core.distributed.batched_data_dict import (
    BatchedDataDict,
    InProcess,
    RemoteRow,
    RemoteRows,
)
from nemo_rl_core.environments.interfaces import EnvironmentReturn
from nemo_rl_core.models.generation import remote_completions
from nemo_rl_core.rollouts.batch import (
    failure_metrics,
    rollout_batch,
    rollout_metrics,
    valid_rollouts,
)
from nemo_rl_core.rollouts.engine import RemoteTokens, RolloutIndex
from nemo_rl_core.rollouts.episode import Bounds, PlayedEpisode, played_rollouts
from nemo_rl_core.rollouts.multi_turn import MultiTurnRollouts
from nemo_rl_core.rollouts.records import save_rollouts
from nemo_rl_core.rollouts.remote_rollouts import RemoteRollouts, Turns
from nemo_rl_core.types import Prompt, Rollout
from tests.unit.rollouts.conftest import Countdown, Scripted


class Keeping(Scripted):
    """Several engines that keep their completions in blocks, like real ones.

    Each answers like `Scripted`, so tests compare everything between engine and batch.
    """

    def __init__(self, tokenizer: Any, answer: Any, folder: Path, num_engines: int) -> None:
        super().__init__(tokenizer, answer)
        self._folder, self._num_engines = folder, num_engines
        self.sent: list[BatchedDataDict] = []

    def finish_generation(self, *, discards_weights: bool = False) -> None: ...

    def complete(
        self, requests: remote_completions.Requests, *, greedy: bool, weight_version: int | None
    ) -> remote_completions.RemoteCompletions:
        assert not greedy
        self.sent.append(requests.batch())
        groups = remote_completions.parts_of_engines(requests, self._num_engines)
        answers = [self._answered(part, weight_version) for group in groups for part in group]
        return remote_completions.joined(answers)

    def _answered(self, part: remote_completions.Requests, weight_version: int | None) -> Any:
        lengths, *blocks = remote_completions.complete(
            self,
            part,
            model_folder=self._folder,
            greedy=False,
            sleep=None,
            weight_version=weight_version,
        )
        return [lengths, *map(InProcess, blocks)]


@pytest.fixture
def both(tokenizer: Any, tokenizer_folder: Path):
    """Function that returns rollouts of an engine in this process and of several others."""

    def run(
        prompts: Any,
        answer: Any,
        bounds: Bounds,
        *,
        group: int = 3,
        num_engines: int = 2,
        environment: Any = None,
        weight_version: int | None = None,
    ):
        remote = Keeping(tokenizer, answer, tokenizer_folder, num_engines)
        options: dict[str, Any] = {"num_generations_per_prompt": group, "step": 5, "first_group": 2}
        drawn = []
        for engine in (Scripted(tokenizer, answer), remote):
            rollouts = MultiTurnRollouts(
                engine, tokenizer, environment or Countdown(), seed=3, bounds=bounds
            )
            rollouts.weight_version = weight_version
            drawn.append(rollouts.run(prompts, **options))
        return *drawn, remote

    return run


def differing(request: dict[str, Any]) -> str:
    """Answers by seed, so that conversations differ in length and some cannot be scored."""
    return ("1", "2", "31", "9!", "+", "12345!")[request["seed"] % 6]


def assert_same_batch(remote: Sequence[Rollout], here: Sequence[Rollout]) -> None:
    assert list(remote) == list(here)
    ours, theirs = rollout_batch(remote), rollout_batch(here)
    fetched, expected = ours.fetched(), theirs.fetched()
    assert torch.equal(fetched["written_lengths"], expected["token_mask"].sum(1))
    assert fetched.keys() == expected.keys()
    for name, values in expected.items():
        assert fetched[name].dtype == values.dtype
        assert torch.equal(fetched[name], values), name
    assert rollout_metrics(ours) == rollout_metrics(theirs) == rollout_metrics(expected)


numbers = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    starts=numbers,
    max_turns=st.integers(1, 5),
    max_tokens=st.integers(1, 30),
    max_new_tokens=st.integers(1, 6),
    num_engines=st.integers(1, 3),
)
def test_remote_conversations_equal_local_ones(
    both: Any,
    ask: Any,
    starts: list[int],
    max_turns: int,
    max_tokens: int,
    max_new_tokens: int,
    num_engines: int,
) -> None:
    bounds = Bounds(max_turns, max_tokens, max_new_tokens)
    prompts = [ask(f"{number}=", str(number)) for number in starts]
    here, remote, _ = both(prompts, differing, bounds, num_engines=num_engines)
    assert isinstance(remote, RemoteRollouts)
    assert list(remote) == here
    assert failure_metrics(remote) == failure_metrics(here)
    valid = valid_rollouts(here)
    if valid:
        assert_same_batch(valid_rollouts(remote), valid)
        rows = np.arange(0, len(valid), 2), np.arange(1, len(valid), 2)
        parts = [valid_rollouts(remote).select(each) for each in rows]
        expected = [valid.select(each) for each in rows]
        assert_same_batch(RemoteRollouts.joined(parts), RemoteRollouts.joined(expected))


def test_each_turn_is_sent_once_without_earlier_turns(both: Any, ask: Any) -> None:
    bounds = Bounds(max_turns=3, max_tokens=40, max_new_tokens=6)
    here, remote, engine = both([ask("21=", "21")], lambda request: "5", bounds, group=2)
    first, *later = engine.sent
    assert "before" not in first
    assert [each["input_lengths"].tolist() for each in later] == [[3, 3], [3, 3]]  # 16= and 11=
    assert all(isinstance(each["before"], RemoteRows) for each in later)
    assert [each["before_lengths"].tolist() for each in later] == [[6, 6], [11, 11]]
    assert len({id(each) for each in remote.source.completions.tokens.references}) == 2
    assert list(remote) == here


class Lenient(Countdown):
    """Continues after any answer."""

    def step(self, message_log_batch: Sequence[Any], metadata: Sequence[Any]) -> EnvironmentReturn:
        return replace(super().step(message_log_batch, metadata), errors=None)


def test_all_turns_have_the_version_of_the_batch(both: Any, ask: Any) -> None:
    bounds = Bounds(max_turns=3, max_tokens=40, max_new_tokens=9)
    prompts = [ask("21=", "21"), ask("8=", "8")]
    for drawn in both(prompts, differing, bounds, weight_version=4)[:2]:
        completions = [each.completion for each in drawn]
        assert max(len(each.turn_rewards) for each in drawn) > 1
        assert [each.weight_versions for each in completions] == [
            (4,) * len(each.token_ids) for each in completions
        ]


def test_an_empty_turn_is_closed_like_any_other(both: Any, ask: Any, tokenizer: Any) -> None:
    """The end of the policy's turn before does not count as its end."""
    bounds = Bounds(max_turns=3, max_tokens=40, max_new_tokens=6)

    def answer(request: dict[str, Any]) -> str:
        return "!" if request["text"].count("<eos>") == 1 else "5"

    here, remote, _ = both([ask("9=", "9")], answer, bounds, group=2, environment=Lenient())
    assert here[0].error is None
    assert tokenizer.decode(here[0].completion.token_ids) == "5<eos>4=<eos>4=5<eos>"
    assert_same_batch(remote, here)


def test_records_of_remote_conversations_are_the_same_bytes(
    both: Any, ask: Any, tmp_path: Path
) -> None:
    bounds = Bounds(max_turns=3, max_tokens=12, max_new_tokens=4)
    here, remote, _ = both([ask("8=", "8"), ask("21=", "21")], differing, bounds)
    for name, rollouts in (("here", here), ("remote", remote)):
        save_rollouts(rollouts, tmp_path / name)
    assert (tmp_path / "remote").read_bytes() == (tmp_path / "here").read_bytes()


def test_the_environments_tokens_have_the_version_of_the_turn_before() -> None:
    block = InProcess(
        {
            "input_ids": torch.tensor([[1, 8, 5, 2, 9, 9, 6]]).numpy(),
            "token_mask": torch.tensor([[0, 1, 1, 0, 0, 1]]).bool().numpy(),
            "generation_logprobs": torch.tensor([[0, -1.0, -2, 0, 0, -3]]).numpy(),
            "weight_versions": torch.tensor([[0, 3, 4, 0, 0, 5]]).numpy(),
        }
    )
    prompt = Prompt("a", "8", (1, 8), "", "")
    turns = Turns((), (0.5, 0.5), 3, 0)
    played = PlayedEpisode(RemoteTokens(RemoteRow(block, 0), 7), False, "", turns, 1.0, None)
    lost = PlayedEpisode.failed(prompt, "no answer")
    requests = [(prompt, RolloutIndex(0, 1, 0, sample)) for sample in range(2)]
    one, other = played_rollouts(requests, [[played], [lost]])
    assert one.completion.token_ids == (5, 2, 9, 9, 6)
    assert one.completion.generated == (True, True, False, False, True)
    assert one.completion.weight_versions == (3, 4, 4, 4, 5)
    assert (other.error, other.completion.token_ids, other.reward) == ("no answer", (), None)
