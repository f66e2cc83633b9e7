"""Complete runs in which something hangs, dies or fails: they end, and lose only what they report.

Every fault comes from outside: a reward that reads a file, a signal to a process.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.algorithms import AsyncGRPOTrainer, GRPOTrainer
from nemo_rl_core.distributed.session import ClusterSession
from nemo_rl_core.errors import RewardError, WorkerLostError
from nemo_rl_core.rollouts.batch import valid_rollouts
from nemo_rl_core.rollouts.records import RolloutRecords
from nemo_rl_core.trainers.callbacks import Callback
from nemo_rl_core.trainers.fit.fitting import TrainResult
from nemo_rl_core.types import Rollout
from tests.training import Watch, assert_equal_weights, replay

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("session")]

NUM_STEPS, SAVE_EVERY, NUM_ROWS = 4, 2, 16
# Each prompt occurs in one step only, so that its faults concern that step.
ROWS = [{"prompt": f"{n}+{n % 7}=", "answer": str(n + n % 7)} for n in range(10, 34)]
REWARD = """
import json, time
from pathlib import Path

HERE = Path(__file__).parent

def score(prompt: str, response: str) -> float:
    for fault in ("hang", "raise", "slow"):
        pairs = HERE / fault
        if pairs.exists() and [prompt, response] in json.loads(pairs.read_text()):
            if fault == "raise":
                raise LookupError("no answer sheet")
            time.sleep(600 if fault == "hang" else 1)
    return response.count("7") + 0.1 * len(response)
"""
KINDS: dict[str, Any] = {"by turns": GRPOTrainer, "ahead": AsyncGRPOTrainer}
SETTINGS: dict[str, Any] = {
    "cluster": {"num_threads": 1},
    "generation": {"max_new_tokens": 48, "kv_cache_gib": 1, "max_num_seqs": 64},
    "environment": {"kind": "function", "target": "faulty_reward:score"},
    "environment_workers": {"call_timeout_seconds": 5},
    "max_prompt_tokens": 16,
    "num_prompts_per_step": 4,
    "num_generations_per_prompt": 4,
    "num_steps_per_iteration": NUM_STEPS,
    "save_every_num_steps": SAVE_EVERY,
    "learning_rate": 0.01,
    "loss": {"importance": {"kind": "truncated"}},
}
ENGINE = ("VllmBackend.generate", "StreamingVllmBackend.poll")
TRAINER = ("DTensorBackend.compute_together", "DTensorBackend.train_step")


class Runs:
    """Runs of one kind of trainer; files in its folder control the reward.

    Args:
        kind: Key of `KINDS`.
        model: Model to start from.
        folder: Folder of the reward.
    """

    def __init__(self, kind: str, model: Path, folder: Path) -> None:
        self._kind, self._model, self._folder = kind, model, folder

    def fit(
        self,
        *,
        callbacks: Sequence[Callback] = (),
        name: str | None = None,
        max_staleness: int = 0,
        **settings: Any,
    ) -> TrainResult:
        ahead = {"max_staleness": max_staleness} if self._kind == "ahead" else None
        trainer = KINDS[self._kind].from_pretrained(
            self._model, asynchronous=ahead, **{**SETTINGS, **settings}
        )
        result: TrainResult = trainer.fit(ROWS, callbacks=callbacks, name=name)
        return result

    def afflict(self, fault: str, *rollouts: Rollout) -> None:
        """Lets the reward hang on these rollouts, raise, or be slow."""
        pairs = [[rollout.prompt.text, rollout.text] for rollout in rollouts]
        (self._folder / fault).write_text(json.dumps(pairs))

    def heal(self) -> None:
        for fault in ("hang", "raise", "slow"):
            (self._folder / fault).unlink(missing_ok=True)

    def replay(self, result: TrainResult, records: RolloutRecords, work: Path) -> Path:
        """Trains again on records without an engine or a reward; returns the model's folder."""
        ahead = {"max_staleness": 0} if self._kind == "ahead" else None
        trainer = KINDS[self._kind].from_pretrained("unused", asynchronous=ahead, **SETTINGS)
        replay(trainer, result, records.folder, work)
        return work


@pytest.fixture(params=list(KINDS), scope="module")
def runs(
    request: pytest.FixtureRequest,
    session: ClusterSession,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("reward")
    with pytest.MonkeyPatch.context() as patch:
        # Each kind of trainer imports a separate module: a module is imported once.
        name = f"faulty_reward_{folder.name}".replace("-", "_")
        (folder / f"{name}.py").write_text(REWARD)
        patch.syspath_prepend(folder)
        patch.setitem(SETTINGS, "environment", {"kind": "function", "target": f"{name}:score"})
        yield Runs(request.param, tiny_model, folder)


@pytest.fixture(scope="module")
def undisturbed(runs: Runs) -> TrainResult:
    return runs.fit()


@pytest.fixture(autouse=True)
def _healed(runs: Runs) -> Any:
    yield
    runs.heal()


def recorded(result: TrainResult, step: int) -> list[Rollout]:
    return RolloutRecords(result.folder / "rollouts").load(step)


def token_ids(rollouts: Sequence[Rollout]) -> list[tuple[int, ...]]:
    return [rollout.completion.token_ids for rollout in rollouts]


def counts(result: TrainResult, name: str) -> list[float]:
    """Returns that metric step by step."""
    assert [metrics["global_step"] for metrics in result.metrics] == [1, 2, 3, 4]
    return [metrics[name] for metrics in result.metrics]


def test_nothing_is_lost_where_nothing_happens(runs: Runs, undisturbed: TrainResult) -> None:
    for name in ("num_failed_rollouts", "num_engine_restarts", "num_environment_restarts"):
        assert counts(undisturbed, name) == [0, 0, 0, 0]


def test_a_reward_that_hangs_on_a_row_costs_that_row(
    runs: Runs, undisturbed: TrainResult, tmp_path: Path
) -> None:
    lost = recorded(undisturbed, 2)[5]
    runs.afflict("hang", lost)
    result = runs.fit()
    assert counts(result, "num_failed_rollouts") == [0, 1, 0, 0]
    assert counts(result, "failed_fraction")[1] == 1 / NUM_ROWS
    # The first time with other rows, the second time by itself.
    assert counts(result, "num_environment_restarts") == [0, 2, 0, 0]
    failed = [each for step in range(1, 5) for each in recorded(result, step) if each.error]
    assert [(each.prompt.id, each.text, each.reward) for each in failed] == [
        (lost.prompt.id, lost.text, None)
    ]
    assert "nothing within 5 s" in str(failed[0].error)
    assert token_ids(recorded(result, 2)) == token_ids(recorded(undisturbed, 2))
    # Only the remaining rows were trained on, as if the lost one had never existed.
    others = RolloutRecords(tmp_path / "others")
    for step in range(1, NUM_STEPS + 1):
        others.save(step, valid_rollouts(recorded(result, step)))
    assert_equal_weights(result.folder, runs.replay(result, others, tmp_path / "work"))
    # The same as if the reward had refused it at once.
    runs.heal()
    runs.afflict("raise", lost)
    refused = runs.fit()
    assert counts(refused, "num_environment_restarts") == [0, 0, 0, 0]
    assert_equal_weights(result.folder, refused.folder)
    with pytest.raises(AssertionError):
        assert_equal_weights(result.folder, undisturbed.folder)


def test_an_environment_actor_that_is_killed_costs_nothing(
    runs: Runs, undisturbed: TrainResult, killer: Callable[..., Any]
) -> None:
    runs.afflict("slow", recorded(undisturbed, 2)[3])
    kill = killer("_ScoringActor.run", wait_seconds=0.2)
    result = runs.fit(callbacks=[kill])
    assert kill.join() == ["ray::_ScoringActor.run"]
    assert counts(result, "num_environment_restarts") == [0, 1, 0, 0]
    assert counts(result, "num_failed_rollouts") == [0, 0, 0, 0]
    assert_equal_weights(result.folder, undisturbed.folder)


def test_an_engine_that_is_killed_while_it_generates_costs_nothing(
    runs: Runs, undisturbed: TrainResult, killer: Callable[..., Any], tmp_path: Path
) -> None:
    kill = killer(*ENGINE)
    result = runs.fit(callbacks=[kill])
    assert kill.join()[0].removeprefix("ray::").startswith(ENGINE)
    assert counts(result, "num_engine_restarts") == [0, 1, 0, 0]
    assert counts(result, "num_failed_rollouts") == [0, 0, 0, 0]
    assert token_ids(recorded(result, 2)) == token_ids(recorded(undisturbed, 2))
    records = RolloutRecords(result.folder / "rollouts")
    assert_equal_weights(result.folder, runs.replay(result, records, tmp_path / "work"))
    assert_equal_weights(result.folder, undisturbed.folder)


def test_a_killed_trainer_stops_the_run_which_resumes_from_its_save(
    runs: Runs, undisturbed: TrainResult, killer: Callable[..., Any]
) -> None:
    kill = killer(*TRAINER, step=4)
    with pytest.raises(WorkerLostError, match="'training' died") as stopped:
        runs.fit(callbacks=[kill, SaveIsWritten(step=3)], name="killed trainer")
    assert kill.join()[0].removeprefix("ray::") in TRAINER
    assert "resumes from the last save" in str(stopped.value)
    watch = Watch()
    result = runs.fit(callbacks=[watch], name="killed trainer")
    assert watch.steps == [3, 4]
    assert_equal_weights(result.folder, undisturbed.folder)
    assert [token_ids(recorded(result, step)) for step in (1, 2, 3, 4)] == [
        token_ids(recorded(undisturbed, step)) for step in (1, 2, 3, 4)
    ]


class SaveIsWritten(Callback):
    """Lets a step end once the trainer has written the save before it.

    Saves are written while steps continue; until a step ends after that, a save dies with the
    trainer.
    """

    def __init__(self, *, step: int) -> None:
        self._step = step

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        while step == self._step and not trainer.policy.checkpoint_is_written():
            time.sleep(0.01)


def test_too_many_failures_stop_the_run_until_the_reward_is_fixed(
    runs: Runs, undisturbed: TrainResult
) -> None:
    lost = recorded(undisturbed, 3)[:2]
    runs.afflict("raise", *lost)
    with pytest.raises(RewardError) as stopped:
        runs.fit(name="failing reward")
    text = str(stopped.value)
    assert "2 of 16 rollouts could not be scored" in text
    for words in ("at most 10%", "LookupError: no answer sheet", "max_failed_fraction"):
        assert words in text
    runs.heal()
    watch = Watch()
    result = runs.fit(callbacks=[watch], name="failing reward")
    assert watch.steps == [3, 4]
    assert_equal_weights(result.folder, undisturbed.folder)
