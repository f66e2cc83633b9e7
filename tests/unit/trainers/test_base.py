"""The loop of every trainer: hooks, epochs, validation, resuming, and ranges of steps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.algorithms.grpo.trainer import GRPOTrainer
from nemo_rl_core.algorithms.sft.trainer import SFTTrainer
from nemo_rl_core.config.model import ModelFromConfig
from nemo_rl_core.errors import ConfigError
from nemo_rl_core.trainers.base import BaseTrainer
from nemo_rl_core.trainers.callbacks import Callback, Callbacks
from nemo_rl_core.trainers.loop import RunSpec, StepRange


class StopError(Exception):
    pass


def stopping(hook: str, step: int) -> Callback:
    """Returns a callback that raises in a hook, at a step (for hooks of a step)."""

    class Stopping(Callback):
        pass

    def stop(self: Callback, trainer: Any, *arguments: Any) -> None:
        if not arguments or arguments[0] == step:
            raise StopError(hook)

    setattr(Stopping, hook, stop)
    return Stopping()


def metrics(work: Path) -> list[dict[str, float]]:
    lines = (work / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"] for line in lines]


def test_every_hook_is_called_in_order(
    spec: RunSpec, make_trainer: Callable[..., Any], make_journal: Callable[[], Any]
) -> None:
    journal = make_journal()
    trainer = make_trainer({"count": {"num_steps": 4, "validate_every_num_steps": 3}})
    trainer.run(spec, callbacks=[journal])
    # Six rows, two per step: steps 1 to 3 are epoch 0. A save every 2 steps.
    assert journal.names == [
        "fit_begin",
        *("epoch_begin 0", "step_begin 1", "step_end 1"),
        *("step_begin 2", "step_end 2", "save 2"),
        *("step_begin 3", "validation_begin 3", "validation_end 3", "step_end 3", "epoch_end 0"),
        *("epoch_begin 1", "step_begin 4", "validation_begin 4", "validation_end 4", "step_end 4"),
        *("epoch_end 1", "save 4"),
        "fit_end",
    ]


def test_hooks_get_the_metrics_of_their_step(
    spec: RunSpec, make_trainer: Callable[..., Any], make_journal: Callable[[], Any]
) -> None:
    journal = make_journal()
    make_trainer({"count": {"num_steps": 3, "validate_every_num_steps": 3}}).run(
        spec, callbacks=[journal]
    )
    # One epoch of the rows 1 to 6: their sum is 21, and validation halves it.
    validated = {"validation_half": 10.5}
    last = {"sum": 21.0, "num_valid_tokens": 2.0, **validated}
    assert ("on_validation_end", 3, validated) in journal.calls
    assert ("on_step_end", 3, last) in journal.calls
    assert ("on_epoch_end", 0, last) in journal.calls
    assert metrics(spec.work)[-1] == {"global_step": 3.0, **last}


def test_a_saved_folder_is_complete_when_the_hook_is_called(
    spec: RunSpec, make_trainer: Callable[..., Any]
) -> None:
    saved = []

    class Read(Callback):
        def on_save(self, trainer: Any, step: int, checkpoint: Path) -> None:
            value = json.loads((checkpoint / "model" / "value.json").read_text())
            saved.append((step, value == trainer.sum.value))

    make_trainer({}).run(spec, callbacks=[Read()])
    assert saved == [(2, True), (4, True), (5, True)]


def test_handles_detects_hooks_of_classes_and_objects() -> None:
    class Read(Callback):
        def on_save(self, trainer: Any, step: int, checkpoint: Path) -> None: ...

    callback = Callback()
    assert not Callbacks(None, [Callback(), callback]).handles("on_save")  # type: ignore[arg-type]
    assert Callbacks(None, [Callback(), Read()]).handles("on_save")  # type: ignore[arg-type]
    callback.on_save = lambda *_: None  # type: ignore[method-assign]
    assert Callbacks(None, [callback]).handles("on_save")  # type: ignore[arg-type]
    assert not Callbacks(None, [callback]).handles("on_fit_end")  # type: ignore[arg-type]


def test_callbacks_are_called_in_the_order_given(
    spec: RunSpec, make_trainer: Callable[..., Any]
) -> None:
    order = []

    class Named(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_step_begin(self, trainer: Any, step: int) -> None:
            order.append((step, self.name))

    make_trainer({"count": {"num_steps": 2}}).run(spec, callbacks=[Named("b"), Named("a")])
    assert order == [(1, "b"), (1, "a"), (2, "b"), (2, "a")]


def test_an_invalid_callback_is_refused_before_setup(
    spec: RunSpec, make_trainer: Callable[..., Any]
) -> None:
    trainer = make_trainer({})
    with pytest.raises(TypeError, match="instances of Callback"):
        trainer.run(spec, callbacks=[Callback])
    assert not hasattr(trainer, "sum")


HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_run_stopped_by_a_raising_hook_can_be_resumed(
    hook: str, spec: RunSpec, make_trainer: Callable[..., Any], make_journal: Callable[[], Any]
) -> None:
    settings = {"count": {"validate_every_num_steps": 1}}
    trainer = make_trainer(settings)
    # Epoch 1 has the steps 4 and 5.
    with pytest.raises(StopError):
        trainer.run(spec, callbacks=[stopping(hook, 1 if "epoch" in hook else 4)])
    assert trainer.closed
    again, journal = make_trainer(settings), make_journal()
    again.run(spec, callbacks=[journal])
    assert [step["global_step"] for step in metrics(spec.work)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    # Saved steps are not repeated: none, steps 1 and 2, 1 to 4, or all.
    first = {"on_fit_begin": 1, "on_save": 5, "on_epoch_end": 5, "on_fit_end": 6}.get(hook, 3)
    steps = [call[1] for call in journal.calls if call[0] == "on_step_begin"]
    assert steps == list(range(first, 6))

    other_spec = RunSpec(spec.train, spec.start, spec.work.with_name("uninterrupted"))
    uninterrupted = make_trainer(settings)
    uninterrupted.run(other_spec)
    assert again.sum.value == uninterrupted.sum.value
    assert metrics(spec.work) == metrics(other_spec.work)


def test_a_resume_within_an_epoch_does_not_restart_it(
    spec: RunSpec, make_trainer: Callable[..., Any], make_journal: Callable[[], Any]
) -> None:
    with pytest.raises(StopError):
        make_trainer({}).run(spec, callbacks=[stopping("on_step_begin", 3)])
    journal = make_journal()
    make_trainer({}).run(spec, callbacks=[journal])
    assert journal.names[:4] == ["fit_begin", "step_begin 3", "step_end 3", "epoch_end 0"]
    assert journal.names[4:6] == ["epoch_begin 1", "step_begin 4"]


def test_a_finished_run_is_returned_without_calling_hooks(
    spec: RunSpec, make_trainer: Callable[..., Any], make_journal: Callable[[], Any]
) -> None:
    result = make_trainer({}).run(spec)
    assert (result.step, result.num_tokens, result.peak_memory_gib) == (5, 10, 0.5)
    again, journal = make_trainer({}), make_journal()
    assert again.run(spec, callbacks=[journal]) == result
    assert journal.calls == []
    assert not hasattr(again, "sum")


def test_the_first_row_of_a_step_determines_its_epoch(
    spec: RunSpec, make_trainer: Callable[..., Any], make_journal: Callable[[], Any]
) -> None:
    journal = make_journal()
    # Four rows per step of an epoch of six: step 1 has rows 0-3, step 2 rows 4-7, step 3 rows
    # 8-11, step 4 rows 12-15.
    make_trainer({"count": {"num_steps": 4, "rows_per_step": 4}}).run(spec, callbacks=[journal])
    epochs = [name for name in journal.names if "epoch" in name or "step_end" in name]
    assert epochs == [
        *("epoch_begin 0", "step_end 1", "step_end 2", "epoch_end 0"),
        *("epoch_begin 1", "step_end 3", "epoch_end 1"),
        *("epoch_begin 2", "step_end 4", "epoch_end 2"),
    ]


def test_each_row_is_used_once_per_epoch(spec: RunSpec, make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer({"count": {"num_steps": 6}})
    trainer.run(spec)
    assert metrics(spec.work)[2]["sum"] == 21.0  # 1 + 2 + 3 + 4 + 5 + 6
    assert metrics(spec.work)[5]["sum"] == 42.0


@pytest.mark.parametrize(
    ("iteration", "expected"),
    [(1, StepRange(1, 10)), (2, StepRange(11, 20)), (5, StepRange(41, 50))],
)
def test_an_iteration_has_its_part_of_the_steps(
    spec: RunSpec, iteration: int, expected: StepRange
) -> None:
    trainer = GRPOTrainer({"grpo": {"num_steps_per_iteration": 10}})
    where = RunSpec(spec.train, spec.start, spec.work, iteration=iteration)
    assert trainer._steps(where) == expected
    assert trainer._stage(where) == f"grpo_iteration {iteration}"


def test_a_trainer_with_num_steps_starts_at_the_first_step(spec: RunSpec) -> None:
    assert SFTTrainer({"sft": {"num_steps": 7}})._steps(spec) == StepRange(1, 7)


def test_invalid_settings_are_explained() -> None:
    with pytest.raises(ConfigError, match=r"sft\.num_steps: Input should be greater than 0"):
        SFTTrainer({"sft": {"num_steps": 0}})


def test_a_trainer_without_a_model_cannot_fit() -> None:
    with pytest.raises(ConfigError, match="no model to train") as caught:
        SFTTrainer({}).fit([{"prompt": "a", "completion": "b"}])
    assert "SFTTrainer.from_pretrained" in str(caught.value.fix)


def test_a_minimal_trainer_has_a_name_a_loop_and_an_open_section() -> None:
    class MyAlgoTrainer(BaseTrainer[Any, Any]):
        def _train_step(self, batch: list[Any]) -> dict[str, float]:
            return {}

    trainer = MyAlgoTrainer({"loop": {"num_steps": 3}, "myalgo": {"my_param": 2.0}})
    assert MyAlgoTrainer.algorithm == "myalgo"
    assert trainer.config.num_steps == 3
    assert trainer.settings.myalgo == {"my_param": 2.0}
    assert MyAlgoTrainer({}).settings.myalgo == {}

    class Variant(SFTTrainer):
        def _train_step(self, batch: list[Any]) -> dict[str, float]:
            return {}

    assert (Variant.algorithm, Variant.settings_class) == ("sft", SFTTrainer.settings_class)


def test_a_model_may_be_the_section_of_a_recipe() -> None:
    section = {"kind": "from_config", "hidden_size": 32}
    assert SFTTrainer.from_pretrained(section).model == ModelFromConfig(hidden_size=32)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"kind": "from_config", "hiden_size": 3}, "unknown key 'model.hiden_size'"),
        ({"kind": "fromconfig"}, "model"),
        (None, "model does not name a model"),
        (["m"], "model does not name a model"),
        (SFTTrainer.settings_class(), "model does not name a model"),
    ],
)
def test_an_invalid_model_is_refused(model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        SFTTrainer.from_pretrained(model)
    assert len(str(caught.value).splitlines()) <= 5
