"""Bounds the files and functions of this project that a GRPO step enters, by profiling."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import pytest

import nemo_rl_core
from nemo_rl_core.algorithms import GRPOTrainer
from nemo_rl_core.distributed.weight_sync import link
from tests.local_workers import LocalWorkers
from tests.unit.algorithms.grpo.test_remote_training import NUM_STEPS, InProcessTrainer, trained

LIBRARY = str(Path(nemo_rl_core.__file__).parent)
MAX_FILES, MAX_FUNCTIONS, MAX_METHODS = 45, 222, 13
MAX_FILES_OF_TRANSFER, MAX_FUNCTIONS_OF_TRANSFER = 8, 39
"""Lower these bounds with the code; a step that needs more is too hard to follow."""


class Trip:
    """The files and functions of this project that a call enters, in all of its threads."""

    def __init__(self) -> None:
        self._entered: set[tuple[str, str]] = set()

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(LIBRARY):
            self._entered.add((code.co_filename.removeprefix(LIBRARY), code.co_qualname))

    def profiled(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a trainer's method that is profiled in the last step."""

        def call(trainer: GRPOTrainer, *args: Any, **kwargs: Any) -> Any:
            if trainer.step == NUM_STEPS:  # the first step also imports and caches
                threading.setprofile(self._note)
                sys.setprofile(self._note)
            try:
                return method(trainer, *args, **kwargs)
            finally:
                sys.setprofile(None)
                threading.setprofile(None)  # type: ignore[arg-type]

        return call

    @property
    def functions(self) -> set[tuple[str, str]]:
        # Comprehensions and lambdas belong to the function around them.
        return {each for each in self._entered if not each[1].rpartition(".")[2].startswith("<")}

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}


@pytest.mark.slow
def test_a_step_enters_few_files_and_functions(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts one step with dtensor and the transformers engine, all in this process."""
    trip = Trip()
    monkeypatch.setattr(GRPOTrainer, "_train_step", trip.profiled(GRPOTrainer._train_step))
    trained(tiny_model, tmp_path)
    assert len(trip.files) <= MAX_FILES, sorted(trip.files)
    assert len(trip.functions) <= MAX_FUNCTIONS, sorted(trip.functions)


@pytest.mark.slow
def test_a_weight_transfer_enters_few_files_and_functions(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the transfer of a step over an open link; both ends are threads of this process."""
    trip, original = Trip(), LocalWorkers.start_single_worker

    def start(workers: LocalWorkers, method: str, *args: Any, **kwargs: Any) -> Any:
        if method not in {"send_weights", "receive_weights"}:
            return original(workers, method, *args, **kwargs)
        return ThreadPoolExecutor(1).submit(original, workers, method, *args, **kwargs)

    def finish_together(
        pending: list[tuple[Any, list[Future[Any]]]], timeout_seconds: float | None
    ) -> list[list[Any]]:
        return [[call.result(timeout=60) for call in calls] for _, calls in pending]

    monkeypatch.setattr(LocalWorkers, "start_single_worker", start)
    monkeypatch.setattr(link, "finish_together", finish_together)
    update = trip.profiled(GRPOTrainer._update_weights)
    monkeypatch.setattr(InProcessTrainer, "_update_weights", update)
    trained(tiny_model, tmp_path)
    assert len(trip.files) <= MAX_FILES_OF_TRANSFER, sorted(trip.files)
    assert len(trip.functions) <= MAX_FUNCTIONS_OF_TRANSFER, sorted(trip.functions)


def test_the_trainer_has_few_methods() -> None:
    methods = [each for each in vars(GRPOTrainer).values() if isinstance(each, FunctionType)]
    properties = [each for each in vars(GRPOTrainer).values() if isinstance(each, property)]
    assert len(methods) + len(properties) <= MAX_METHODS
