"""Repeats a training started from Python, on its recorded inputs, in another store.

`nemo-rl reproduce` runs `python -m nemo_rl_core.trainers.fit.repeating FILE` in the working
directory of the training. The artifacts that were trained on are read from their original folders.
"""

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_rl_core.config.functions import FIELDS
from nemo_rl_core.environments.adapt import as_scorer
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.errors import NemoRLError, StoreError
from nemo_rl_core.store.object_source import object_source
from nemo_rl_core.trainers.fit.fitting import train_on
from nemo_rl_core.trainers.fit.recording import FitCall, read_reward, recorded_fit
from nemo_rl_core.trainers.fit.request import TrainerForFit
from nemo_rl_core.trainers.loop import RunResult


@dataclass(frozen=True)
class Repetition:
    """A recorded training, whose folder `run` contains the reward.

    Attributes:
        trainer: `module:Class` of the trainer.
        config: Config in the manifest.
        parents: Folders of the artifacts that were trained on, by role.
        anyway: Whether to use a changed reward.
    """

    trainer: str
    settings: dict[str, Any]
    config: dict[str, Any]
    parents: dict[str, str]
    run: str
    anyway: bool = False

    def write(self, file: Path) -> None:
        """Writes it as JSON."""
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> "Repetition":
        """Reads a file of `write`."""
        return cls(**json.loads(file.read_text()))


def repeat(recorded: Repetition) -> Path:
    """Trains again in the store of this process and returns the artifact."""
    module, _, name = recorded.trainer.partition(":")
    cls = getattr(importlib.import_module(module), name)
    trainer = cls(recorded.settings)
    for argument, fn in trainer.custom_functions.objects.items():
        name = getattr(trainer.config, FIELDS[argument]).target
        _refuse_changed(fn, argument, recorded, name=name)

    def run(artifacts: Mapping[str, Path], work: Path, scorer: Scorer | None) -> RunResult:
        result: RunResult = trainer.run(trainer.run_spec(artifacts, work, scorer=scorer))
        return result

    trainer_for_fit = TrainerForFit(cls.algorithm, cls, trainer.settings, run)
    call = FitCall(
        recorded.trainer, {"repeats": Path(recorded.run).name}, source=trainer_for_fit.source
    )
    parents = {role: Path(folder) for role, folder in recorded.parents.items()}
    with recorded_fit(call) as stages:
        return train_on(trainer_for_fit, recorded.config, parents, _scorer(recorded), stages).folder


def _scorer(recorded: Repetition) -> Scorer | None:
    reward = read_reward(Path(recorded.run))
    if reward is None:
        return None
    name = recorded.config.get("reward_fn", "")
    _refuse_changed(reward[0], "reward_fn", recorded, name=name)
    return as_scorer(*reward)


def _refuse_changed(fn: Any, argument: str, recorded: Repetition, *, name: str) -> None:
    source, expected = object_source(fn), recorded.config.get(f"{argument}_source")
    if source.digest != expected and not recorded.anyway:
        what = "reward" if argument == "reward_fn" else argument
        raise StoreError(
            f"the {what} {name!r} is not the recorded one",
            expected=f"source {expected}",
            got=", ".join(source.unknown) or f"source {source.digest}",
            fix="restore its module, or pass --anyway",
        )


def main() -> None:
    """Repeats the training described by the file named on the command line."""
    sys.path.insert(0, str(Path.cwd()))  # the same as in the script that ran here
    try:
        repeat(Repetition.read(Path(sys.argv[1])))
    except NemoRLError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
