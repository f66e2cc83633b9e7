"""Rerunning the same command on a damaged store reports the damage and reruns those stages."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.maintenance.verify import verify
from nemo_rl_core.store.store import Store
from tests.commands import Run

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def damaged(run: Run) -> list[str]:
    """Returns names of the artifacts that the run reports as damaged."""
    return [line.partition(" ")[0] for line in run.lines if " is damaged and is made again" in line]


def test_damaged_artifacts_are_reported_and_made_again(
    first_run: Run, recipe: dict[str, Any], run_recipe: Callable[..., Run], tmp_path: Path
) -> None:
    store = shutil.copytree(first_run.store, tmp_path / "store", symlinks=True)

    def again() -> Run:
        run = run_recipe(recipe, store)
        assert run.exit_code == 0, run.output[-3000:]
        return run

    copied = again()
    assert Path(copied.value("model:")).is_relative_to(store), "the copy is used"
    assert (damaged(copied), again().stages("ran")) == ([], [])

    train_sft, export = copied.artifact("train_sft"), copied.artifact("export")
    promote, weights = copied.artifact("promote"), Path("model", "model.safetensors")
    trained, exported = digest(train_sft / weights), digest(export / weights)
    flip_a_bit(train_sft / weights)
    shutil.rmtree(export)
    repaired = again()
    assert damaged(repaired) == [train_sft.name]
    assert repaired.stages("ran") == ["train_sft", "export"]
    assert (digest(train_sft / weights), digest(export / weights)) == (trained, exported)

    (export / weights).unlink()
    flip_a_bit(promote / "manifest.json")
    repaired = again()
    assert damaged(repaired) == [promote.name, export.name]
    assert repaired.stages("ran") == ["promote", "export"]
    assert digest(Path(repaired.value("model:")) / "model.safetensors") == exported
    # New artifacts have other times, but they remain the parents of the existing ones.
    assert verify(Store(store)).findings == ()
