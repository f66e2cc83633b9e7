"""Repeats a training that Python started, on its recorded inputs, in another store.

`python -m nemo_rl_core.trainers.repeating FILE` is what `nemo-rl reproduce` starts, in the folder
that the training ran in. The artifacts that were trained on are read where they lie.
"""

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_rl_core.environments.adapt import as_scorer
from nemo_rl_core.environments.interfaces import Scorer
from nemo_rl_core.errors import NemoRLError, StoreError
from nemo_rl_core.store.object_source import object_source
from nemo_rl_core.trainers.fit_request import FittedTrainer
from nemo_rl_core.trainers.fitting import train_on
from nemo_rl_core.trainers.loop import RunResult
from nemo_rl_core.trainers.recording import FitCall, read_reward, recorded_fit


@dataclass(frozen=True)
class Repetition:
    """A recorded training.

    Attributes:
        trainer: `module:Class` of the trainer.
        settings: Of the trainer.
        config: Of the manifest.
        parents: Folders of the artifacts that were trained on, by role.
        run: The folder of the recorded run, which holds the reward.
        anyway: Whether a changed reward is used.
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
        """Reads what `write` wrote."""
        return cls(**json.loads(file.read_text()))


def repeat(asked: Repetition) -> Path:
    """Trains again, in the store of this process; returns the artifact.

    Raises:
        NemoRLError: If the reward has changed, or the training fails.
    """
    module, _, name = asked.trainer.partition(":")
    cls = getattr(importlib.import_module(module), name)
    trainer = cls(asked.settings)

    def run(artifacts: Mapping[str, Path], work: Path, scorer: Scorer | None) -> RunResult:
        result: RunResult = trainer.run(trainer.run_spec(artifacts, work, scorer=scorer))
        return result

    fitted = FittedTrainer(cls.algorithm, cls, trainer.settings, run)
    call = FitCall(asked.trainer, {"repeats": Path(asked.run).name}, source=fitted.source)
    parents = {role: Path(folder) for role, folder in asked.parents.items()}
    with recorded_fit(call) as stages:
        return train_on(fitted, asked.config, parents, _scorer(asked), stages).folder


def _scorer(asked: Repetition) -> Scorer | None:
    reward = read_reward(Path(asked.run))
    if reward is None:
        return None
    found = object_source(reward[0])
    if found.digest != asked.config.get("reward_fn_source") and not asked.anyway:
        raise StoreError(
            f"the reward {asked.config.get('reward_fn')!r} is not the recorded one",
            expected=f"source {asked.config.get('reward_fn_source')}",
            got=", ".join(found.unknown) or f"source {found.digest}",
            fix="restore its module, or pass --anyway",
        )
    return as_scorer(*reward)


def main() -> None:
    """Repeats what the file describes that is named on the command line."""
    sys.path.insert(0, str(Path.cwd()))  # as in the script that ran here
    try:
        repeat(Repetition.read(Path(sys.argv[1])))
    except NemoRLError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
