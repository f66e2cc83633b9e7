"""A trainer with a real loop and one number in this process as its policy."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.config.trainer import LoopConfig, TrainerSettings
from nemo_rl_core.data.loader import PromptLoader
from nemo_rl_core.trainers.base import BaseTrainer
from nemo_rl_core.trainers.callbacks import Callback
from nemo_rl_core.trainers.loop import RunSpec


class CountConfig(LoopConfig):
    num_steps: int = 5
    rows_per_step: int = 2
    save_every_num_steps: int = 2


class CountSettings(TrainerSettings):
    count: CountConfig = CountConfig()


class Sum:
    """The sum so far."""

    def __init__(self) -> None:
        self.value = 0

    def save_checkpoint(self, path: Path) -> None:
        (path / "model").mkdir()
        (path / "model" / "value.json").write_text(json.dumps(self.value))

    def load_checkpoint(self, path: Path) -> None:
        self.value = json.loads((path / "model" / "value.json").read_text())


class CountTrainer(BaseTrainer[CountSettings, CountConfig]):
    """Adds up the rows 1 to 6, two per step."""

    algorithm = "count"
    settings_class = CountSettings

    def _set_up(self, spec: RunSpec, resources: ExitStack) -> None:
        self.sum = Sum()
        self.closed = False
        resources.callback(setattr, self, "closed", True)
        self._batches = self._load(spec)

    def _load(self, spec: RunSpec) -> PromptLoader[int]:
        size = self.config.rows_per_step
        return PromptLoader(range(1, 7), batch_size=size, seed=self.settings.seed)

    def _train_step(self, batch: list[int]) -> dict[str, float]:
        self.sum.value += sum(batch)
        return {"sum": float(self.sum.value), "num_valid_tokens": float(len(batch))}

    def _validate(self) -> dict[str, float]:
        return {"half": self.sum.value / 2}

    def _trained(self) -> Sum:
        return self.sum

    def _peak_memory_gib(self) -> float:
        return 0.5


class Journal(Callback):
    """Records every call: the hook's name and its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(trainer: Any, *arguments: Any) -> None:
            assert isinstance(trainer, CountTrainer)
            self.calls.append((name, *arguments))

        return note

    @property
    def names(self) -> list[str]:
        """Returns each call as text such as `step_end 3`."""
        return [
            " ".join([name.removeprefix("on_"), *map(str, rest[:1])]) for name, *rest in self.calls
        ]


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    return RunSpec(train=tmp_path / "train", start=tmp_path / "start", work=tmp_path / "work")


@pytest.fixture
def make_trainer() -> type[CountTrainer]:
    return CountTrainer


@pytest.fixture
def make_journal() -> type[Journal]:
    return Journal
