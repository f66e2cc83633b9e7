"""Environments in actors: one that hangs or is killed loses only the rows on which it fails."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from nemo_rl_core.config.environment import (
    ByTask,
    EnvironmentConfig,
    EnvironmentWorkers,
    WeightedSum,
)
from nemo_rl_core.config.multi_turn import GuessNumberGame
from nemo_rl_core.config.single_turn import ExactMatch, RegexMatch, RewardFunction
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.environments import actor_pool
from nemo_rl_core.environments.factory import make_remote_scorer, make_scorer
from nemo_rl_core.environments.interfaces import Scorer, score_rollouts
from nemo_rl_core.environments.multi_turn.replies import split
from nemo_rl_core.environments.post_processing import post_process
from nemo_rl_core.environments.rewards.retries import num_retries
from nemo_rl_core.errors import ConfigError, RewardError, WorkerError
from nemo_rl_core.store.watching import watching
from nemo_rl_core.types import Completion, Prompt, Rollout

REWARDS = """
import os, signal, time, urllib.request
from pathlib import Path

HERE = Path(__file__).parent

def score(prompt: str, response: str) -> float:
    if response.startswith("http"):
        urllib.request.urlopen(response).close()
    if response == "hang":
        time.sleep(600)
    if response == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "raise":
        raise LookupError("no answer sheet")
    if response == "wait" and not (HERE / "killed").exists():
        (HERE / "pid").write_text(str(os.getpid()))
        time.sleep(600)
    return len(response) / 3
"""


@pytest.fixture
def make(
    session: ClusterSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Scorer]]:
    """Creates scorers in actors, ended after the test; by default of the function above."""
    (tmp_path / "odd_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    made: list[Scorer] = []

    def remote(config: EnvironmentConfig | None = None, **options: float) -> Scorer:
        config = config or RewardFunction(target="odd_rewards:score")
        workers = EnvironmentWorkers.model_validate({"rows_per_call": 3, **options})
        made.append(make_remote_scorer(config, workers))
        return made[-1]

    yield remote
    for scorer in made:
        scorer.close()


def rollouts(*texts: str, task: str = "sums", metadata: str = "{}") -> list[Rollout]:
    prompt = Prompt("0", "12+34=", (1,), "46", task, metadata)
    return [Rollout(prompt, Completion((), (), truncated=False), text) for text in texts]


def assert_only(outcomes: list[float | RewardError], failures: dict[int, str], rows: list[Rollout]):
    """Asserts that the rows of `failures` have these errors, and that all others have scores."""
    for index, (outcome, row) in enumerate(zip(outcomes, rows, strict=True)):
        if index in failures:
            assert isinstance(outcome, RewardError)
            assert failures[index] in str(outcome)
            assert repr(row.text) in str(outcome)
        else:
            assert outcome == len(row.text) / 3


@pytest.mark.slow
def test_an_actor_that_dies_loses_only_the_row_that_kills_it(make: Callable[..., Scorer]) -> None:
    rows = rollouts("a", "bb", "die", "cccc", "raise", "d", "ee")
    scorer = make(num_workers=2)
    for _ in range(2):  # replaced actors work like the original ones
        outcomes = scorer.score(rows)
        assert_only(outcomes, {2: "the environment's actor died", 4: "no answer sheet"}, rows)


class _Flaky(BaseHTTPRequestHandler):
    """Answers the first request of each path with 503."""

    requested: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        status = 200 if self.path in self.requested else 503
        self.requested.add(self.path)
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.mark.slow
def test_a_reward_that_fails_in_the_network_is_called_again_in_its_actor(
    make: Callable[..., Scorer],
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Flaky) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        rows = rollouts("a", f"{url}/1", "bb", "cccc", f"{url}/2")
        before = num_retries()
        outcomes = make(num_workers=2).score(rows)
        server.shutdown()
    assert_only(outcomes, {}, rows)
    assert num_retries() - before == 2


@pytest.mark.thorough
def test_an_environment_that_fails_all_the_time_stops_the_run(
    make: Callable[..., Scorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_pool, "_MAX_FAILED_IN_A_ROW", 3)
    scorer = make()
    with pytest.raises(WorkerError, match="3 consecutive calls") as stopped:
        scorer.score(rollouts(*["die"] * 6))
    assert "the last one died" in stopped.value.got
    rows = rollouts("a", "bb", "die")  # a piece and a single row: two failures
    assert_only(scorer.score(rows), {2: "the environment's actor died"}, rows)


@pytest.mark.thorough
def test_an_actor_killed_from_outside_loses_no_row(
    make: Callable[..., Scorer], tmp_path: Path
) -> None:
    def kill() -> None:
        while not (tmp_path / "pid").exists():
            time.sleep(0.02)
        (tmp_path / "killed").touch()
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    rows = rollouts("a", "wait", "bb", "cccc")
    outcomes = make(num_workers=2).score(rows)
    killer.join()
    assert_only(outcomes, {}, rows)


@pytest.mark.thorough
def test_a_reward_that_hangs_loses_only_its_row(make: Callable[..., Scorer]) -> None:
    rows = rollouts("a", "hang", "bb", "cccc", "d", "ee", "f")
    outcomes = make(num_workers=2, call_timeout_seconds=8).score(rows)
    assert_only(outcomes, {1: "gave no answer"}, rows)
    assert "nothing within 8 s" in str(outcomes[1])


@pytest.mark.thorough
def test_scores_do_not_depend_on_the_number_of_actors(make: Callable[..., Scorer]) -> None:
    config = ByTask.model_validate(
        {
            "tasks": [
                {"task": "sums", "environment": ExactMatch()},
                {"task": "form", "environment": RegexMatch(pattern="[0-9]+")},
            ]
        }
    )
    rows = rollouts("46", "47") + rollouts("46", "x", task="form") + rollouts("46", "1", "2")
    expected = make_scorer(config).score(rows)
    assert expected == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    for num_workers in (1, 3):
        assert make(config, num_workers=num_workers).score(rows) == expected


@pytest.mark.slow
def test_components_of_a_reward_are_returned(make: Callable[..., Scorer]) -> None:
    parts = [{"environment": ExactMatch()}, {"environment": RegexMatch(pattern="[0-9]+")}]
    config = WeightedSum.model_validate({"parts": parts})
    rows = rollouts("46", "47", "x")
    scorer = make(config)
    scored = score_rollouts(scorer, rows)
    assert scored == score_rollouts(make_scorer(config), rows)
    assert [each.components for each in scored] == [(1, 1), (0, 1), (0, 0)]
    # The mean of each component has its name, with actors and without.
    columns = {"reward_components": torch.tensor([each.components for each in scored]).float()}
    batch = {"rewards": torch.tensor([2.0, 1.0, 0.0]), **columns}
    for each in (scorer, make_scorer(config)):
        _, means = post_process(each, batch)
        assert means == pytest.approx({"exact": 1 / 3, "regex": 2 / 3})


@pytest.mark.slow
def test_a_game_in_actors_equals_one_in_this_process(make: Callable[..., Scorer]) -> None:
    here = make_scorer(GuessNumberGame()).environment
    remote = make(GuessNumberGame(), num_workers=2).environment
    logs, metadata = [], []
    for guess in range(7):
        logs.append([{"role": "user", "content": "0-6="}, {"role": "a", "content": str(guess)}])
        secret = {"secret": 3, "low": 0, "high": 6}
        metadata.append({"game": secret, "max_turns": 3} if guess != 4 else {})
    replies = split(remote.step(logs, metadata), 7)
    assert replies == split(here.step(logs, metadata), 7)
    assert [reply.observation for reply in replies] == [
        "1-6=",
        "2-6=",
        "3-6=",
        "",
        "",
        "0-4=",
        "0-5=",
    ]
    assert replies[4].error is not None
    # More rows than a call has, but one batch: a third of all games is won.
    batch = {"rewards": torch.tensor([0.0, 1.0, 0.0] * 4), "tasks": ["guess_number"] * 12}
    rewards, metrics = post_process(remote, batch)
    assert rewards.tolist() == batch["rewards"].tolist()
    assert metrics == pytest.approx({"won_fraction": 1 / 3})
    with pytest.raises(RewardError, match=r"'GameEnvironment' failed(.|\n)*KeyError"):
        remote.global_post_process_and_metrics({"tasks": []})


def test_invalid_environments_are_refused_with_their_message(make: Callable[..., Scorer]) -> None:
    with pytest.raises(ConfigError, match="not a valid regular expression"):
        make(RegexMatch(pattern="("))


READING = """
import importlib, os
from pathlib import Path

def score(prompt: str, response: str) -> float:
    other = importlib.import_module("read_" + "by_name")
    words = (Path(__file__).parent / "read_words.txt").read_text().split()
    (Path(__file__).parent / "scored.txt").write_text(response)
    return float(len(words) + other.X + int(os.environ.get("READ_OFFSET", "0")))
"""


def test_reads_in_actors_belong_to_the_stage(make: Callable[..., Scorer], tmp_path: Path) -> None:
    (tmp_path / "reading_rewards.py").write_text(READING)
    (tmp_path / "read_by_name.py").write_text("X = 1")
    (tmp_path / "read_words.txt").write_text("one two")
    with watching({"reading_rewards"}) as watch:
        scorer = make(RewardFunction(target="reading_rewards:score"), num_workers=1)
        assert scorer.score(rollouts("a", "b")) == [3.0, 3.0]
        scorer.close()
        reads = watch.reads()
    assert {name.replace(f"{tmp_path}/", ""): bool(each) for name, each in reads.items()} == {
        "file read_words.txt": True,
        "module read_by_name.py": True,
        "variable READ_OFFSET": False,
    }
