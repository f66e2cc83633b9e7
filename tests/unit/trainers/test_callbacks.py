"""Callbacks that stop a run with a result, a checkpoint and the state `stopped`."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core import Callback, EarlyStopping
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.history.queries import History
from nemo_rl_core.store.store import Store
from tests.training import AddTrainer

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("NEMO_RL_HOME", str(tmp_path / "store"))
    return Store.default()


class StopAt(Callback):
    """Stops the run in a step."""

    stops = True

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        if step == self.step:
            trainer.stop(f"that was step {step}")


def fit(model: Path, *callbacks: Callback, name: str | None = None, reward: float = 1.0) -> Any:
    trainer = AddTrainer.from_pretrained(model, num_steps=6)
    return trainer.fit(
        ROWS, reward_fn=lambda prompt, completion: reward, callbacks=callbacks, name=name
    )


@pytest.mark.slow
def test_a_stopped_run_has_a_result(tiny_model: Path, store: Store) -> None:
    result = fit(tiny_model, StopAt(2))
    assert result.step == 2 and len(result.metrics) == 2
    assert result.stopped == "stopped at step 2 of 6: that was step 2"
    assert (result.checkpoint / "value.json").is_file()
    with History(store) as history:
        (run,) = history.executions().items
        assert (run.state, run.error) == ("stopped", result.stopped)
    assert fit(tiny_model).stopped == ""


@pytest.mark.slow
def test_the_key_of_a_named_run_depends_on_stopping_callbacks(tiny_model: Path) -> None:
    stopped = fit(tiny_model, StopAt(2), name="one")
    assert fit(tiny_model, StopAt(2), name="one").folder == stopped.folder
    assert fit(tiny_model, StopAt(3), name="one").step == 3
    complete = fit(tiny_model, name="one")
    assert complete.step == 6
    assert fit(tiny_model, Callback(), name="one").folder == complete.folder


@pytest.mark.slow
def test_a_callback_without_stops_cannot_stop_a_run(tiny_model: Path) -> None:
    class Silent(StopAt):
        stops = False

    with pytest.raises(ConfigError, match="write stops = True in the class"):
        fit(tiny_model, Silent(2))


@pytest.mark.slow
def test_early_stopping_ends_a_run_that_does_not_improve(tiny_model: Path) -> None:
    result = fit(tiny_model, EarlyStopping("reward", patience=2))
    assert result.step == 3
    assert "reward has not improved on 1 for 2 values" in result.stopped


@pytest.mark.parametrize(
    ("arguments", "values", "num_since"),
    [
        ({}, [], 0),
        ({}, [0.1, 0.3, 0.2, 0.3], 2),
        ({"mode": "min"}, [0.9, 0.5, 0.6, 0.4], 0),
        ({"min_change": 0.1}, [0.1, 0.15, 0.19, 0.21], 0),
        ({"min_change": 0.1}, [0.1, 0.15, 0.19], 2),
        ({}, [0.1, float("nan"), float("nan")], 2),
    ],
)
def test_values_since_the_best(
    arguments: dict[str, Any], values: list[float], num_since: int
) -> None:
    assert EarlyStopping("reward", **arguments).values_since_best(values) == num_since


def test_invalid_arguments_of_early_stopping_are_refused() -> None:
    for arguments in ({"mode": "lowest"}, {"patience": 0}, {"min_change": -1.0}):
        with pytest.raises(ConfigError, match="EarlyStopping cannot work"):
            EarlyStopping("reward", **arguments)


def test_a_metric_missing_from_all_steps_is_named(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(tiny_model, EarlyStopping("rewrad")).step == 6
    assert "no step has the metric 'rewrad'; steps have" in capsys.readouterr().err
