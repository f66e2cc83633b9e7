"""A finished store is damaged; the same command finds it, says so, and makes those stages again."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_core.maintenance.verify import verify
from nemo_rl_core.store.store import Store
from tests.commands import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def damaged(run: Run) -> list[str]:
    """Names of the artifacts that the run says it has found damaged, a line each."""
    return [line.partition(" ")[0] for line in run.lines if " is damaged and is made again" in line]


@pytest.mark.thorough
def test_damage_is_found_said_and_made_again(
    first_run: Run, recipe: dict[str, Any], run_recipe: Callable[..., Run], tmp_path: Path
) -> None:
    store = shutil.copytree(first_run.store, tmp_path / "store", symlinks=True)

    def again() -> Run:
        run = run_recipe(recipe, store)
        assert run.exit_code == 0, run.output[-3000:]
        return run

    copied = again()
    assert Path(copied.value("model:")).is_relative_to(store), "it is the copy that is used"
    assert (damaged(copied), again().stages("ran")) == ([], [])

    train_sft, export = copied.artifact("train_sft"), copied.artifact("export")
    promote, weights = copied.artifact("promote"), Path("model", "model.safetensors")
    trained, exported = digest(train_sft / weights), digest(export / weights)
    flip_a_bit(train_sft / weights)
    shutil.rmtree(export)
    mended = again()
    assert damaged(mended) == [train_sft.name]
    assert mended.stages("ran") == ["train_sft", "export"]
    assert (digest(train_sft / weights), digest(export / weights)) == (trained, exported)

    (export / weights).unlink()
    flip_a_bit(promote / "manifest.json")
    mended = again()
    assert damaged(mended) == [promote.name, export.name]
    assert mended.stages("ran") == ["promote", "export"]
    assert digest(Path(mended.value("model:")) / "model.safetensors") == exported
    # What was made again has other times, and its children were made from the same all the same.
    assert verify(Store(store)).findings == ()
